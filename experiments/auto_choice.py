"""The auto head as it was first built, run by run: a negative result, and what was changed because of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from committed import Run, having
from disagreements import said
from tables import AUTO, FIRST_AUTO, Rows, Table, ece_cell, paper_order, row_title, shown, spread

TODAY = ("d32f2bf",)  # commits whose runs chose by today's rule
RULE_NOTE = (
    "All committed runs but seeds 1 to 3 of SST binary chose by auto's first rule: the best NLL on held-back "
    "calibration data. The library has become more careful since: every candidate is compared at the scale that suits "
    "it best, a head is kept only if it beats the scalar temperature by more than a standard error, and the last "
    "temperature is part of auto. So what a user gets today may differ from these lines in which head is chosen. In "
    "the three runs made with today's rule it kept the scalar temperature."
)
REASON = """ A few hundred to a thousand held-back samples tell heads apart only roughly, and nothing made sure that the
    chosen one is as sure on average as all calibration data say."""
SCALED_MAIN = "main+T"
OUTPUTS = (SCALED_MAIN, FIRST_AUTO.output, AUTO.output)


class Case(NamedTuple):
    """A run that has the auto head, named by row and seed, with what was chosen in it."""

    name: str
    seed: int
    run: Run

    @property
    def choice(self) -> str:
        """What auto chose."""
        return choice_of(self.run)

    @property
    def words(self) -> str:
        """The run in a sentence."""
        return f"{self.name}, seed {self.seed}"

    def pair(self, key: str, output: str = FIRST_AUTO.output) -> tuple[float, float]:
        """A number of an output, and temperature scaling's."""
        ours, theirs = (self.run.number(name, key) for name in (output, SCALED_MAIN))
        assert ours is not None
        assert theirs is not None
        return ours, theirs


def cases(rows: Rows) -> list[Case]:
    """Every run whose auto head was chosen by the first rule, in the tables' order."""
    found = []
    for row in sorted(rows, key=paper_order):
        runs = having(rows[row].get("cross-entropy", []), FIRST_AUTO.output)
        runs = [run for run in runs if not run.results["environment"]["commit"].startswith(TODAY)]
        found += [Case(row_title(row, rows), run.seed, run) for run in runs]
    return found


def choice_of(run: Run) -> str:
    """The spec of the chosen head in words."""
    spec = (run.results.get("selection") or {}).get("spec")
    if not spec:
        return "the scalar temperature"
    reads = [spec["reads"]] if isinstance(spec["reads"], str) else spec["reads"]
    return f"reads {' and '.join(reads)}, beta0 {spec['beta0']:g}"


def auto_table(rows: Rows) -> Table:
    """ECE and NLL of temperature scaling, of auto as first built, and of auto with its last temperature."""
    lines = [_line(case) for case in cases(rows)]
    head = ["run", "auto chose", "ECE: cross entropy + temperature", "auto as first built", "auto + temperature",
            "NLL: cross entropy + temperature", "auto as first built", "auto + temperature"]  # fmt: skip
    notes = [
        "ECE in percent, with the band of a perfect model in brackets; bold: not above it. One line for each run.",
        "As first built, auto had no last temperature. The last temperature is one scalar, fitted to the chosen "
        "output's predictions of all calibration data.",
        RULE_NOTE,
    ]
    return Table("auto", "The auto head, as first built and with a last temperature", head, lines, notes)


def _line(case: Case) -> list[str]:
    eces = [ece_cell([case.run], output) for output in OUTPUTS]
    nlls = [case.run.number(output, "nll") for output in OUTPUTS]
    return [
        case.words,
        case.choice,
        *eces,
        *(shown(spread([nll] if nll is not None else []), scale=1, digits=4) for nll in nlls),
    ]


def first_rule(rows: Rows, *, short: bool = False) -> str:
    """What was wrong with the first rule, counted, with the worst cases, and what the last temperature repairs.

    `short` leaves out the cases and the reasons.
    """
    found = cases(rows)
    if not found:
        return ""
    eces, nlls = (worst_cases(found, key) for key in ("ece", "nll"))
    text = """chosen by NLL on held-back calibration data, with nothing after it, auto had a lower NLL than temperature
        scaling in {nll[0]} and a lower ECE in {ece[0]} of {n} runs."""
    if not short:
        text += " Furthest behind in each row, ECE: {eces}." if eces else ""
        text += " In NLL: {nlls}." if nlls else ""
        text += REASON
    text += """ With a last scalar temperature, fitted to its output on all calibration data, as it is shown everywhere
        else, its NLL is lower in {nll[1]} and its ECE in {ece[1]} of {n}{rest}."""
    return said(
        text,
        n=len(found),
        nll=[wins(found, "nll", output) for output in OUTPUTS[1:]],
        ece=[wins(found, "ece", output) for output in OUTPUTS[1:]],
        eces="; ".join(_told(case, "ece") for case in eces),
        nlls="; ".join(_told(case, "nll") for case in nlls[:1]),
        rest=_not_repaired(nlls[:1]),
    )


def wins(found: Sequence[Case], key: str, output: str) -> int:
    """In how many runs a number of an output is lower than temperature scaling's."""
    return sum(ours < theirs for ours, theirs in (case.pair(key, output) for case in found))


def worst_cases(found: Sequence[Case], key: str) -> list[Case]:
    """Of each row the run in which auto as first built was furthest behind temperature scaling, the worst one first."""

    def behind(case: Case) -> float:
        ours, theirs = case.pair(key)
        return ours - theirs

    worst = {
        case.name: case for case in sorted(found, key=behind) if behind(case) > 0
    }  # the last one of a row stays
    return sorted(worst.values(), key=behind, reverse=True)


def _told(case: Case, key: str) -> str:
    scale, digits = (100, 2) if key == "ece" else (1, 3)
    ours, theirs = (f"{scale * value:.{digits}f}" for value in case.pair(key))
    return f"{ours} against {theirs} ({case.words})"


def _not_repaired(worst: Sequence[Case]) -> str:
    """Where a wrong choice stays one: temperature alone does not make up for it."""
    told = []
    for case in worst:
        ours, theirs = case.pair("nll", AUTO.output)
        told += [f"{case.words}, NLL {ours:.3f} against {theirs:.3f}"] if ours > theirs else []
    return f"; it does not undo a wrong choice ({'; '.join(told)})" if told else ""
