"""What the shift guard buys and costs: an ablation, its targets with their answers, and sentences about both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from committed import SCALED, Run, Spread, having, mean_shift, numbers
from disagreements import said
from seen import FAMILY_UNSEEN, GUARD, KIND_UNSEEN, is_guard
from shift import (
    GUARD_NOTES,
    NOT_NOISE,
    evaluated,
    few_heads,
    guards,
    lines_of,
    rows_with_shift,
    seen_words,
    sets_of,
    share,
)
from tables import BAND_NOTE, GAP, Rows, Source, Table, ece_cell, eces_of_parts, row_title, seeds_said, shown

from doublehead.data import FAMILIES

WITHOUT = ("main", "annealing-double-head")  # lines of the shift tables that are no step towards the guard
PERTURBED = "both@noise+broad-1"  # of the perturbed heads the one that all seeds have
SCORES = {"nll": "NLL", "brier": "Brier score"}


class Answer(NamedTuple):
    """A target, what was measured, and whether that meets it; `short` names the target within a sentence."""

    target: str
    measured: str
    met: bool
    short: str


def rows_with_guards(rows: Rows) -> list[tuple[str, list[Run]]]:
    """The rows that have guards evaluated under shift, by title, with the runs that have any."""
    found = []
    for row, runs in rows_with_shift(rows):
        some = [run for run in runs if any(evaluated([run], one.output) for one in guards([run]))]
        found += [(row_title(row, rows), some)] if some else []
    return found


def ablation(rows: Rows) -> Table:
    """From temperature scaling to the guard, step by step, on the runs that have guards."""
    lines: list[list[str]] = []
    for name, runs in rows_with_guards(rows):
        lines += [[name, *_line(source, evaluated(runs, source.output))] for source in steps(runs)]
    head = ["row", "output", "seeds", "families seen in training", "clean ECE", "clean NLL",
            "mean ECE, all 13 families", "as a share of temperature scaling's",
            "9 families that are no noise"]  # fmt: skip
    notes = [
        BAND_NOTE,
        "Percent but for NLL. Perturbed heads (the first one of each kind) act on every image; a guard is put round "
        "the auto head and does nothing on nine tenths of the clean calibration images. `noise+broad` taught both: "
        "compare these for what the form of the guard does, and guards with each other for what their teachers do.",
        "A share is taken against temperature scaling on the seeds that have the line; lines of fewer seeds than "
        "others are not comparable with them to the last digit.",
        *GUARD_NOTES,
    ]
    return Table("guards", "The shift guard, step by step", head, lines or [[GAP] * len(head)], notes)


def steps(runs: Sequence[Run]) -> list[Source]:
    """The lines of the ablation: temperature scaling, auto, perturbed heads, then guards from the least taught on.

    Each perturbed head is followed by the same with a temperature after it, which auto and guards have by themselves.
    """
    order = (f"{GUARD}@noise+broad", FAMILY_UNSEEN, KIND_UNSEEN, GUARD)
    found = {source.output: source for source in lines_of(runs) if is_guard(source.output)}
    plain = [one for one in few_heads(runs) if not is_guard(one.output) and one.output not in WITHOUT]
    lines = []
    for one in plain:
        lines.append(one)
        if "@" in one.output:
            lines.append(Source(f"{one.title} + temperature", one.method, f"{one.output}{SCALED}"))
    return [*lines, *(found[name] for name in order if name in found)]


def _line(source: Source, runs: Sequence[Run]) -> list[str]:
    nll = shown(numbers(runs, source.output, "nll"), scale=1, digits=4)
    return [source.title, str(len(runs)), seen_words(source.output), ece_cell(runs, source.output), nll,
            shown(mean_shift(runs, source.output, sets_of(FAMILIES))), share(runs, source.output),
            shown(mean_shift(runs, source.output, sets_of(NOT_NOISE)))]  # fmt: skip


# Targets -----------------------------------------------------------------------------------------------------------


def answers(runs: Sequence[Run]) -> list[Answer]:
    """The guard's targets on the runs that have it; none where no run has.

    Corruption is judged where the family was unseen; clean data there, as the mean over those guards, and again for
    the guard that a user gets, which saw all families.
    """
    return [
        *_shift_answer(runs),
        *_clean_answers(runs, FAMILY_UNSEEN, "guard, family unseen"),
        *_clean_answers(runs, GUARD, "guard that saw all families"),
    ]


def _shift_answer(runs: Sequence[Run]) -> list[Answer]:
    has = evaluated(runs, FAMILY_UNSEEN)
    ours, rival = (mean_shift(has, output, sets_of(FAMILIES)) for output in (FAMILY_UNSEEN, "main+T"))
    if ours is None or rival is None:
        return []
    target = "mean ECE over all 13 families below half of temperature scaling's"
    measured = f"{shown(ours)} against {shown(rival)}: {ours.mean / rival.mean:.2f} of it"
    met = ours.mean < rival.mean / 2
    return [Answer(f"guard, family unseen: {target}", measured, met, "mean ECE below half")]


def _clean_answers(runs: Sequence[Run], output: str, who: str) -> list[Answer]:
    has = having(runs, output)
    ece, high = (numbers(has, output, key) for key in ("ece", "ece_floor_high"))
    if ece is None or high is None:
        return []
    parts = eces_of_parts(has, output)
    inside = sum(one <= top for one, top in parts)
    each = f"; {inside} of its {len(parts)} guards are not above theirs" * (len(parts) > 1)
    measured = f"{shown(ece)}, band up to {100 * high.mean:.2f}{each}"
    short = "clean ECE not above the band"
    made = [Answer(f"{who}: {short}", measured, ece.mean <= high.mean, short)]
    for key, title in SCORES.items():
        ours, theirs = numbers(has, output, key), numbers(has, "main", key, "after")
        if ours and theirs:
            measured = " against ".join(shown(one, scale=1, digits=4) for one in (ours, theirs))
            target = f"{who}: clean {title} not worse than temperature scaling's"
            made.append(Answer(target, measured, ours.mean <= theirs.mean, f"clean {title} not worse"))
    return made


# Sentences ---------------------------------------------------------------------------------------------------------


def row_words(name: str, runs: Sequence[Run]) -> str:
    """The headline of a row: each family measured by a guard that never saw it, then what else there is."""
    has = evaluated(runs, FAMILY_UNSEEN)
    if not has:
        return ""
    ours, rival = (mean_shift(has, output, sets_of(FAMILIES)) for output in (FAMILY_UNSEEN, "main+T"))
    nlls = [shown(numbers(has, output, "nll"), scale=1, digits=4) for output in (FAMILY_UNSEEN, "main+T")]
    made = _shift_answer(has) + _clean_answers(has, FAMILY_UNSEEN, "")
    return said(
        """{name}{seeds}: mean ECE {ours} against {rival}, {share} of it{each}{others}; on clean images ECE {clean},
        where temperature scaling has {before}, and NLL {nlls[0]} against {nlls[1]}. Targets: {verdicts}""",
        name=name,
        seeds=f" (means over {len(has)} seeds)" if len(has) > 1 else "",
        ours=shown(ours, digits=1),
        rival=shown(rival, digits=1),
        share=share(has, FAMILY_UNSEEN),
        each=f" (by seed: {', '.join(share([run], FAMILY_UNSEEN) for run in has)})" if len(has) > 1 else "",
        others=_other_shares(runs, len(has)),
        clean=ece_cell(has, FAMILY_UNSEEN),
        before=ece_cell(has, "main", "after"),
        nlls=nlls,
        verdicts=", ".join(f"{one.short} ({'yes' if one.met else '**no**'})" for one in made),
    )


def _other_shares(runs: Sequence[Run], n_seeds: int) -> str:
    """The same share with the whole kind unseen, and with everything seen; nothing of what was not run."""
    told = []
    for output, what in (
        (KIND_UNSEEN, "where its whole kind was unseen"),
        (GUARD, "with all families seen in training"),
    ):
        has = evaluated(runs, output)
        fewer = f", {seeds_said(len(has))}" * (len(has) != n_seeds)
        told += [f"{share(has, output)} {what}{fewer}"] if has else []
    return f" ({'; '.join(told)})" if told else ""


def guard_text(rows: Rows) -> str:
    """What the guard does, row by row; for the report."""
    lines = [row_words(name, runs) for name, runs in rows_with_guards(rows)]
    made = "\n".join(f"- {line}." for line in lines if line)
    if not made:
        return "No committed run has guards with families left out yet."
    return "\n\n".join(filter(None, (made, beside_perturbed(rows))))


def beside_perturbed(rows: Rows) -> str:
    """The guard against a head trained on perturbed batches, on the same networks; nothing where no run has both."""
    told = []
    for name, runs in rows_with_guards(rows):
        has = evaluated(having(runs, PERTURBED), FAMILY_UNSEEN)
        if has:
            told.append(f"{name}: {_three(has, numbers_of=NOT_NOISE)}")
    return said(
        """Beside it stands the head that reads features and statistics and was trained on perturbed batches, which saw
        Gaussian noise alone. Guard; that head; that head with a last temperature: {told}.""",
        told="; ".join(told),
    ) if told else ""  # fmt: skip


def _three(runs: Sequence[Run], numbers_of: Sequence[str]) -> str:
    """Mean ECE over all families and over some, clean ECE and clean NLL, of the guard and a perturbed head."""
    outputs = (FAMILY_UNSEEN, PERTURBED, f"{PERTURBED}{SCALED}")
    over = {"all families": FAMILIES, f"{len(numbers_of)} that are no noise": numbers_of}
    made = [f"{what} {_semicolons([mean_shift(runs, one, sets_of(some)) for one in outputs])}"
            for what, some in over.items()]  # fmt: skip
    made.append(f"clean ECE {_semicolons([numbers(runs, one, 'ece') for one in outputs])}")
    made.append(f"clean NLL {_semicolons([numbers(runs, one, 'nll') for one in outputs], 1, 4)}")
    return ", ".join(made)


def _semicolons(values: Sequence[Spread | None], scale: float = 100, digits: int = 2) -> str:
    return " / ".join(shown(value, scale=scale, digits=digits) for value in values)
