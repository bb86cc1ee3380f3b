"""What pages written by hand quote from results: blocks between two comments, made by `make results`.

    <!-- results: evidence -->
    ... written anew each time ...
    <!-- end -->

Everything outside of such blocks is left as it is.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from committed import FITTED, RESULTS, Row, Run, having, mean_shift, numbers
from findings import (
    PAPER_HEAD,
    SHOWN,
    auto,
    fit_head,
    fit_head_text,
    fitted,
    guard,
    paper_head,
    shift,
    temperature,
)
from guards import PERTURBED
from headline import between, frozen_lines, line_of, perturbed_line, range_line, rival_lines
from paper import TABLE_1
from post_hoc import beside_peers, two_networks
from seen import FAMILY_UNSEEN, GUARD, KIND_UNSEEN
from shift import NOT_NOISE, evaluated, sets_of
from tables import (
    AUTO,
    DATA_TITLES,
    GAP,
    PAPER_SOURCES,
    RIVALS,
    Rows,
    Table,
    ece_cell,
    paper_order,
    reference,
    row_title,
    seeds_said,
    shown,
)
from withdrawal import NAME, first_run

from doublehead.data import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/which-method.md", "docs/calibrators.md", "docs/tutorials/training.md")
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WRAP: dict[str, Any] = {"width": 118, "break_long_words": False, "break_on_hyphens": False}
DEMO = ROOT / "docs/images/demo.json"
AFTERWARDS = tuple(source for source in RIVALS if source.method in ("last-layer", "ensemble-4"))
LOSSES = (*PAPER_SOURCES[1:4], *(source for source in RIVALS if source not in AFTERWARDS))


def blocks(rows: Rows, results: Path = RESULTS) -> dict[str, str]:
    """The text of every block by its name."""
    frozen = results / "imagenet_frozen.json"
    return {
        "demo": demo_table(),
        "measured": measured(rows, frozen).markdown(),
        "other-rows": other_rows(rows),
        "findings": points(
            [temperature(rows), paper_head(rows), auto(rows), fitted(rows), shift(rows), guard(rows)]
        ),
        "first-run": textwrap.fill(first_run(rows, f"[its numbers]({NAME})"), **WRAP),
        "evidence": evidence(rows).markdown(),
        "guide-findings": points([auto(rows), paper_head(rows), fitted(rows), fit_head(frozen), guard(rows)]),
        "two-networks": two_networks(results).markdown(),
        "beside-peers": beside_peers().markdown(),
        "fit-head": textwrap.fill(fit_head_text(frozen), **WRAP),
    }


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page with its blocks made anew.

    >>> filled("a\\n<!-- results: x -->\\nold\\n<!-- end -->\\nb", {"x": "new"})
    'a\\n<!-- results: x -->\\n\\nnew\\n\\n<!-- end -->\\nb'
    """
    return BLOCK.sub(lambda found: f"{found[1]}\n{made[found[2]].strip()}\n\n{found[3]}", text)


def points(lines: Sequence[str]) -> str:
    """One point each, in lines as long as those of the pages."""
    return "\n".join(textwrap.fill(f"- {line}", subsequent_indent="  ", **WRAP) for line in lines if line)


def demo_table(demo: Path = DEMO) -> str:
    """The table of `make demo`; bold where an ECE is not above a perfect model's band."""
    lines = []
    for row in json.loads(demo.read_text())["rows"]:
        accuracy, ece, low, high, auroc = (
            f"{100 * row[key]:.{digits}f}"
            for key, digits in (
                ("accuracy", 2),
                ("ece", 2),
                ("ece_floor_low", 2),
                ("ece_floor_high", 2),
                ("auroc gaussian_noise:5", 1),
            )
        )
        bold = "**" if row["ece"] <= row["ece_floor_high"] else ""
        lines.append([row["method"], accuracy, f"{bold}{ece}{bold}", f"{low} to {high}", f"{row['nll']:.4f}",
                      f"{row['brier']:.4f}", auroc])  # fmt: skip
    head = [
        "method",
        "accuracy %",
        "ECE %",
        "a perfect model's ECE %",
        "NLL",
        "Brier",
        "AUROC % against noise",
    ]
    return Table("demo", "", head, lines).markdown()


def measured(rows: Rows, frozen: Path) -> Table:
    """The README's table: the rows shown in full, then the frozen ImageNet network."""
    lines: list[list[str]] = []
    for which in SHOWN:
        found = reference(rows, which)
        lines += _measured_row(found[0], found[1]) if found else []
    for name, title, accuracy, ece, nll, *_ in frozen_lines(frozen):
        lines.append([f"**{name}**: {title}" if name else title, accuracy, ece, nll, ""])
    return Table("measured", "", ["", "accuracy", "ECE", "NLL", "ECE corrupted"], lines)


def _measured_row(row: Row, methods: Mapping[str, list[Run]]) -> list[list[str]]:
    runs, seeds = methods.get("cross-entropy", []), max(map(len, methods.values()))
    printed = TABLE_1[row.data, row.model]
    losses = [source for source in LOSSES if source.method in methods]
    lines = [
        line_of("cross entropy", runs, "main", "before", seeds),
        line_of("+ temperature scaling", runs, "main", "after", seeds),
        line_of(
            f"paper's head, beta0 1.2 (the paper: {printed.annealing:.2f})", runs, PAPER_HEAD, "before", seeds
        ),
        line_of("auto head", runs, AUTO.output, "before", seeds),
        line_of("`fit_head` after training", runs, FITTED, "before", seeds),
        perturbed_line(runs, "heads trained on perturbed batches, range over {n}"),
        line_of("guarded auto head, each family unseen by its guard", runs, FAMILY_UNSEEN, "before", seeds),
        line_of("... a guard that saw all families in training", runs, GUARD, "before", seeds),
        _losses_line({source.title: methods[source.method] for source in losses}, seeds),
        *rival_lines(methods, AFTERWARDS, seeds).values(),
    ]
    name = f"**{row_title(row, [])}, {row.epochs} epochs, {seeds_said(seeds)}**: "
    lines = [[*line[:4], line[5]] for line in lines if line]  # without the Brier score
    return [[name * (i == 0) + line[0], *line[1:]] for i, line in enumerate(lines)]


def _losses_line(methods: Mapping[str, list[Run]], seeds: int) -> list[str]:
    """One line for all other losses: the range over them."""
    if not methods:
        return []
    counts = [len(runs) for runs in methods.values()]
    few = f"{between(counts, 1, 0)} seeds" if max(counts) > 1 else "1 seed"
    title = f"other losses + temperature, range over {', '.join(methods)}"
    title += f" ({few})" * (set(counts) != {seeds})
    return range_line(title, [(runs, "main", "after") for runs in methods.values()])


def other_rows(rows: Rows) -> str:
    """ECE of five methods on every other row that there is, one line each."""
    lines = []
    for row in sorted(rows, key=paper_order):
        runs = rows[row].get("cross-entropy", [])
        shown_in_full = [found[0] for found in (reference(rows, which) for which in SHOWN) if found]
        if row in shown_in_full or not runs:
            continue
        n = len(runs)
        cells = [ece_cell(runs, "main", of=n), ece_cell(runs, "main", "after", of=n),
                 *(ece_cell(runs, output, of=n) for output in (PAPER_HEAD, AUTO.output, FITTED))]  # fmt: skip
        name = f"{row_title(row, [])}, {row.epochs} epochs, {seeds_said(n)}"
        lines.append([name, shown(numbers(runs, "main", "accuracy")), *cells])
    head = [
        "other rows: ECE",
        "network's accuracy",
        "cross entropy",
        "+ temperature",
        "paper's head",
        "auto head",
        "`fit_head` after training",
    ]
    return Table("other-rows", "", head, lines).markdown() if lines else "No other rows have been run."


def evidence(rows: Rows) -> Table:
    """The guide's table: what its advice rests on."""
    found = [one for one in (reference(rows, which) for which in SHOWN) if one]
    columns = [_evidence_of(methods.get("cross-entropy", [])) for _, methods in found]
    guarded = [_guard_evidence(methods.get("cross-entropy", [])) for _, methods in found]
    findings = [
        "a temperature head: ECE at beta0 1.0 / 1.2",
        "temperature scaling: ECE, NLL",
        "the head chosen from the bank (auto): ECE, NLL",
        "a head fitted after training (`fit_head`): ECE, NLL",
        "the paper's head: accuracy, beside the network's",
        "corrupted images: mean ECE of temperature scaling, of a perturbed head",
        "... without noise, a kind of which that head has seen",
        "clean images: ECE of that head",
    ]
    names = [
        f"{DATA_TITLES[row.data]} ({row.epochs} epochs, {seeds_said(len(methods.get('cross-entropy', [])))})"
        for row, methods in found
    ]
    if any(GAP not in column[0] for column in guarded):
        findings += GUARD_FINDINGS
        columns = [[*column, *more] for column, more in zip(columns, guarded)]
    return Table("evidence", "", ["finding", *names], [list(line) for line in zip(findings, *columns)])


GUARD_FINDINGS = [
    "corrupted images: mean ECE of temperature scaling, of the shift guard with each family unseen",
    "... with its whole kind unseen; with all families seen in training",
    "clean images: ECE, NLL of the shift guard (means over the guards with families unseen)",
    "... of temperature scaling on the same networks",
]


def _guard_evidence(runs: Sequence[Run]) -> list[str]:
    """What is added to a column where any row has guards."""
    n, has = len(runs), evaluated(runs, FAMILY_UNSEEN)

    def corrupted(some: Sequence[Run], output: str) -> str:
        return shown(mean_shift(some, output, sets_of(FAMILIES)), digits=1)

    others = [evaluated(runs, output) for output in (KIND_UNSEEN, GUARD)]
    return [
        "; ".join(corrupted(has, output) for output in ("main+T", FAMILY_UNSEEN)) + _fewer(has, n),
        "; ".join(
            corrupted(some, output) + _fewer(some, n) for some, output in zip(others, (KIND_UNSEEN, GUARD))
        ),
        *(
            f"{ece_cell(has, output)}; {shown(numbers(has, output, 'nll'), scale=1, digits=4)}"
            + _fewer(has, n)
            for output in (FAMILY_UNSEEN, "main+T")
        ),
    ]


def _evidence_of(runs: Sequence[Run]) -> list[str]:
    """One column: pairs are taken on the runs that have both."""
    n = len(runs)
    headed, perturbed = having(runs, PAPER_HEAD), evaluated(runs, PERTURBED)

    def nll(output: str, when: str) -> str:
        return shown(numbers(runs, output, "nll", when), scale=1, digits=4)

    def corrupted(families: Sequence[str]) -> str:
        means = [mean_shift(perturbed, output, sets_of(families)) for output in ("main+T", PERTURBED)]
        return "; ".join(shown(mean, digits=1) for mean in means) + _fewer(perturbed, n)

    return [
        " / ".join(ece_cell(runs, output, of=n) for output in ("temperature-1", "temperature-1.2")),
        f"{ece_cell(runs, 'main', 'after', of=n)}; {nll('main', 'after')}",
        *(f"{ece_cell(runs, output, of=n)}; {nll(output, 'before')}" for output in (AUTO.output, FITTED)),
        "; ".join(shown(numbers(headed, output, "accuracy")) for output in (PAPER_HEAD, "main"))
        + _fewer(headed, n),
        corrupted(tuple(FAMILIES)),
        corrupted(NOT_NOISE),
        ece_cell(runs, PERTURBED, of=n),
    ]


def _fewer(runs: Sequence[Run], n: int) -> str:
    return f" ({seeds_said(len(runs))})" if 0 < len(runs) < n else ""
