"""Sentences about the committed results that pages quote: what was counted, with the numbers, and no verdicts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from auto_choice import choice_of, last_of
from committed import FITTED, having, numbers
from disagreements import said
from guards import row_words, rows_with_guards
from headline import between
from paper import TABLE_1
from report import clean_shares
from shift import shift_summary
from tables import AUTO, PAPER_SOURCES, Rows, paper_order, reference, row_title, shown

from doublehead.data import FAMILIES

SHOWN = (("cifar10", "resnet50"), ("cifar100", "resnet50"))  # the rows that README and guide show in full
PAPER_HEAD = PAPER_SOURCES[5].output


def _in(met: Sequence[bool]) -> str:
    return f"{sum(met)} of {len(met)}"


def temperature(rows: Rows) -> str:
    """What temperature scaling scores here and in the paper."""
    known = [row for row in sorted(rows, key=paper_order) if (row.data, row.model) in TABLE_1]
    pairs = []
    for row in known:
        ours = numbers(rows[row].get("cross-entropy", []), "main", "ece", "after")
        if ours is not None:
            pairs.append((row, ours, TABLE_1[row.data, row.model].cell("cross-entropy").after))
    told = [
        f"ECE {shown(ours)} on {row_title(row, rows)} (the paper: {cell:.2f})"
        for row, ours, cell in pairs
        if (row.data, row.model) in SHOWN
    ]
    return said(
        "**Temperature scaling**, fitted by NLL: {here}. It is below what the paper prints in {below} rows.",
        here="; ".join(told) or "not run on the CIFAR sets",
        below=_in([100 * ours.mean < cell for _, ours, cell in pairs]),
    )


def paper_head(rows: Rows) -> str:
    """What the paper's head does to accuracy, and its NLL beside temperature scaling's."""
    change, lost = {}, []
    nlls: dict[bool, list[str]] = {
        True: [],
        False: [],
    }  # row by row: whether it is lower than temperature scaling's
    for row in sorted(rows, key=paper_order):
        runs = having(rows[row].get("cross-entropy", []), PAPER_HEAD)
        ours, theirs = (numbers(runs, output, "nll") for output in (PAPER_HEAD, "main+T"))
        if ours and theirs:
            told = f"{row_title(row, rows)} ({ours.mean:.4f} against {theirs.mean:.4f})"
            nlls[ours.mean < theirs.mean].append(told)
        each = [
            (run.number(PAPER_HEAD, "accuracy") or 0) - (run.number("main", "accuracy") or 0) for run in runs
        ]
        lost += [one < 0 for one in each]
        if each:
            change[row_title(row, rows)] = 100 * statistics.fmean(each)
    if not change:
        return "**The paper's head:** not run."
    low, high = min(change, key=change.__getitem__), max(change, key=change.__getitem__)
    ends = " to ".join(f"{change[name]:+.2f} points ({name})" for name in dict.fromkeys((low, high)))
    return said(
        """**The paper's head** (beta0 1.2) answers by itself and has less accuracy than the network in {lost} runs:
        {ends}. Its NLL is lower than temperature scaling's on {lower}, and not on {higher}. Heads that scale the
        network's own logits keep every prediction.""",
        lost=_in(lost),
        ends=ends,
        lower=", ".join(nlls[True]) or "no row",
        higher=", ".join(nlls[False]) or "no row",
    )


def auto(rows: Rows) -> str:
    """The auto head against temperature scaling, run by run, and what it does to accuracy where it does anything."""
    runs = [run for row in rows for run in having(rows[row].get("cross-entropy", []), AUTO.output)]
    if not runs:
        return "**The auto head:** not run."

    def less(key: str) -> list[float]:
        """By how much it is above temperature scaling, to the last digit that tables show."""
        pairs = [[run.number(output, key) or 0.0 for output in (AUTO.output, "main+T")] for run in runs]
        return [round(ours - theirs, 4) + 0.0 for ours, theirs in pairs]  # + 0.0: no -0.0000

    def inside(output: str, when: str) -> str:
        pairs = [[run.number(output, key, when) or 0.0 for key in ("ece", "ece_floor_high")] for run in runs]
        return _in([ece <= high for ece, high in pairs])

    accuracies = [[run.number(output, "accuracy") or 0.0 for output in (AUTO.output, "main")] for run in runs]
    nlls, eces = less("nll"), less("ece")
    choices = [choice_of(run) for run in runs]
    return said(
        """**The auto head against temperature scaling, on clean data:** its NLL is lower in {nll} runs and higher in
        {worse} (auto minus temperature: {nlls}), its ECE lower in {ece} and higher in {above}. An ECE not above a
        perfect model's band: auto {ours} runs, temperature scaling {theirs}. It chose the scalar temperature in
        {scalar} runs, the paper's head in {paper}, and ended with a curve in {bent}.{accuracy}""",
        nll=_in([one < 0 for one in nlls]),
        worse=sum(one > 0 for one in nlls),
        nlls=between(nlls, 1, 4),
        scalar=_in([choice == "the scalar temperature" for choice in choices]),
        paper=_in([choice.startswith("the paper's head") for choice in choices]),
        bent=_in([last_of(run).endswith("a curve") for run in runs]),
        ece=_in([one < 0 for one in eces]),
        above=sum(one > 0 for one in eces),
        ours=inside(AUTO.output, "before"),
        theirs=inside("main", "after"),
        accuracy=_accuracy_changes([ours - theirs for ours, theirs in accuracies]),
    )


def fitted(rows: Rows) -> str:
    """The head fitted after training against temperature scaling and auto, run by run; nothing where there is none."""
    runs = [run for row in rows for run in having(rows[row].get("cross-entropy", []), FITTED, AUTO.output)]

    def less(key: str, rival: str) -> list[float]:
        """By how much it is above a rival, to the last digit that tables show."""
        pairs = [[run.number(output, key) or 0.0 for output in (FITTED, rival)] for run in runs]
        return [round(ours - theirs, 4) + 0.0 for ours, theirs in pairs]

    bands = [[run.number(FITTED, key) or 0.0 for key in ("ece", "ece_floor_high")] for run in runs]
    nlls, autos = less("nll", "main+T"), less("nll", AUTO.output)
    return said(
        """**The head fitted after training** (`fit_head`), on the {n} runs whose logits were kept: its NLL is lower
        than temperature scaling's in {lower} and higher in {higher} (the difference: {nlls}), its ECE lower in {ece}
        and not above a perfect model's band in {inside}. Beside the auto head its NLL is lower in {before} and higher
        in {behind} ({autos}).""",
        n=len(runs),
        lower=_in([one < 0 for one in nlls]),
        higher=_in([one > 0 for one in nlls]),
        nlls=between(nlls, 1, 4),
        ece=_in([one < 0 for one in less("ece", "main+T")]),
        inside=_in([ece <= high for ece, high in bands]),
        before=_in([one < 0 for one in autos]),
        behind=_in([one > 0 for one in autos]),
        autos=between(autos, 1, 4),
    ) if runs else ""  # fmt: skip


def _accuracy_changes(changes: Sequence[float]) -> str:
    """In how many runs auto's accuracy is not the network's, and by how many points; nothing where it always is."""
    changed = [100 * one for one in changes if one]
    if not changed:
        return ""
    ends = " to ".join(dict.fromkeys(f"{one:+.2f}" for one in (min(changed), max(changed))))
    return f" In {_in([one != 0 for one in changes])} runs its accuracy is not the network's: {ends} points."


def shift(rows: Rows) -> str:
    """What perturbed calibration batches buy under corruption and cost on clean data."""
    lines = []
    for which in SHOWN:
        found = reference(rows, which)
        numbers_of = shift_summary(found[1].get("cross-entropy", []), tuple(FAMILIES)) if found else {}
        if numbers_of:
            lines.append(_shift_words(row_title(found[0], rows), numbers_of))  # type: ignore[index]
    shares = clean_shares(rows)
    if not lines or not shares:
        return "**Under corruption:** not run."
    return said(
        """**Under corruption,** heads trained on perturbed calibration batches against temperature scaling: {lines}.
        Heads that saw clean images only have {shares} times temperature scaling's mean ECE there.""",
        lines="; ".join(lines),
        shares=between(shares, 1, 2),
    )


def _shift_words(name: str, found: Mapping[str, Any]) -> str:
    return said(
        "{name} mean ECE {heads} against {rival:.1f}, and {clean} against {before:.2f} on clean images",
        heads=between(found["heads"], 100, 1),
        rival=100 * found["temperature"],
        name=name,
        clean=between(found["clean"], 100, 2),
        before=100 * found["clean_temperature"],
    )


def guard(rows: Rows) -> str:
    """What the shift guard buys under corruption it never saw and costs on clean data; nothing where it was not run."""
    full = [found[0] for found in (reference(rows, which) for which in SHOWN) if found]
    lines = [row_words(name, runs) for name, runs in rows_with_guards({row: rows[row] for row in full})]
    lines = [line for line in lines if line]
    return said(
        """**The shift guard** round the auto head, each family of corruption measured by a guard that never saw it,
        against temperature scaling: {lines}.""",
        lines=". ".join(lines),
    ) if lines else ""  # fmt: skip


def _frozen(frozen: Path) -> dict[str, Any]:
    """Means of the frozen network's splits, and in how many `fit_head` is below temperature scaling."""
    splits = json.loads(frozen.read_text())["splits"] if frozen.exists() else []
    if not splits:
        return {}
    ours, scaled = ([split[name] for split in splits] for name in ("fit_head", "temperature"))
    wins = {key: _in([a[key] < b[key] for a, b in zip(ours, scaled)]) for key in ("nll", "ece")}
    means = {f"{name}_{key}": statistics.fmean(one[key] for one in rows)
             for name, rows in (("ours", ours), ("theirs", scaled)) for key in ("nll", "ece", "ece_floor")}  # fmt: skip
    seconds = [split["seconds"] for split in splits]
    return {**means, **wins, "n": len(splits), "fast": min(seconds), "slow": max(seconds)}


def fit_head(frozen: Path) -> str:
    """`fit_head` against temperature scaling, for the guide."""
    found = _frozen(frozen)
    return said(
        """**`fit_head` beats temperature scaling in NLL in {nll} splits** ({ours_nll:.4f} against {theirs_nll:.4f} on
        average), in ECE in {ece}.""",
        **found,
    ) if found else "**`fit_head`:** not run."  # fmt: skip


def fit_head_text(frozen: Path) -> str:
    """The same for the tutorial, with the time it took."""
    found = _frozen(frozen)
    if not found:
        return "It has not been measured on a trained ImageNet network."
    percent = {name: 100 * found[name] for name in ("ours_ece", "theirs_ece", "ours_ece_floor")}
    return said(
        """On a trained ImageNet ResNet-50 (2,500 images to calibrate, 2,500 to test, {n} splits) it brings the NLL from
        {theirs_nll:.4f} with temperature scaling to {ours_nll:.4f} and the ECE from {theirs_ece:.2f} % to
        {ours_ece:.2f} %, where a perfect model scores {ours_ece_floor:.2f} %. Its NLL is the lower one in {nll} splits,
        its ECE in {ece}. It took {fast:.1f} to {slow:.1f} seconds on one CPU core
        (`experiments/imagenet_frozen.py`).""",
        **{**found, **percent},
    )
