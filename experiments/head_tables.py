"""Tables of the staged head: what its stages are worth, its rivals, and small calibration sets."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from results import HERE, StoredRun
from tables import Page, markdown, row_of, title_of

STAGES = {
    "temperature": "temperature",
    "stage: map": "+ class map",
    "stage: head": "+ temperature per sample",
    "stage: numbers": "+ numbers of the features",
    "stage: distances": "+ pool with distances to class means",
    "stage: opinion": "+ pool with heads trained beside",
    "head+opinion": "+ curve",
    "head+mirror": "+ mirror view",
}
RIVALS = {"temperature": "temperature", "svs": "SVS", "sms": "SMS"}


def stages_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """What each stage of the staged head is worth, and what keeping the predictions costs."""
    wide = table[table.test_set == "test"].pivot_table("value", ["run", "output"], "metric")
    shown = [
        run.name
        for run in runs
        if all((run.name, name) in wide.index for name in STAGES if "mirror" not in name)
    ]
    lines, rows = [], dict.fromkeys(row_of(name) for name in shown)
    for name, title in STAGES.items():
        cells = []
        for row in rows:
            members = [run for run in shown if row_of(run) == row and (run, name) in wide.index]
            if not members:
                cells.append("-")
                continue
            change = [wide.nll[run, name] / wide.nll[run, "temperature"] - 1 for run in members]
            ece = [wide.ece[run, name] for run in members]
            cells.append(f"{100 * sum(change) / len(members):+.2f} / {100 * sum(ece) / len(members):.2f}")
        lines.append([title, *cells])
    titles = [title_of(next(run for run in runs if row_of(run.name) == row)) for row in rows]
    kept = []
    for run in shown:
        two = wide.loc[[(run, "head+opinion"), (run, "head+opinion, best")]]
        cells = [
            f"{own:.{digits}f} / {free:.{digits}f}"
            for own, free, digits in ((*two.nll, 4), (*(100 * two.ece), 2), (*(100 * two.accuracy), 2))
        ]
        kept.append([f"`{run}`", *cells])
    return "\n".join(
        [
            "# The stages of the staged head\n",
            "## What each stage is worth\n",
            "Change of the test NLL against temperature scaling, percent / ECE, percent; means over seeds. Each line "
            "allows one more stage, and the head uses it where it pays on held-back calibration data.\n",
            markdown(["allowed", *titles], lines),
            '## `keep="predictions"` and `keep="best"`\n',
            "The staged head with features and second opinion: the default, which keeps every prediction, / "
            '`keep="best"`.\n',
            markdown(["run", "NLL", "ECE", "accuracy"], kept),
        ]
    )


def versus_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """The staged head against temperature scaling and the two best rivals, development and blind."""
    found = pd.read_csv(HERE / "versus.csv")
    columns = [
        "classifier",
        "classes",
        "samples",
        "NLL as it is",
        *(f"NLL {name}" for name in RIVALS.values()),
    ]
    head = [*columns, "NLL head", *(f"to {name}" for name in RIVALS.values()), "ECE head"]
    parts = [
        "# The staged head and its rivals\n",
        "SVS and SMS are structured vector and matrix scaling of probmetrics. Differences of the NLL are head minus "
        "rival, paired, with 95 % intervals; bold where the interval excludes 0. The head reads logits alone, as its "
        "rivals do, except in lines marked features, and keeps every prediction, which its rivals do not. ECE with the "
        "upper end of a perfect model's range, percent.\n",
    ]
    for part, about in PARTS.items():
        rows = found[found.part == part]
        parts += [
            f"## {about[0]}\n",
            f"{about[1]}\n",
            markdown(head, [_versus_line(row) for _, row in rows.iterrows()]),
        ]
        parts.append(_wins(rows))
    return "\n".join(parts)


PARTS = {
    "development": (
        "Development",
        "Settings were chosen on calibration data of these classifiers. The halves of ImageNet share 5,000 images, and "
        "the last layer's answer to damped features was picked among about 20 variants on the calibration part of two "
        "other halves, so these rows are not independent of that choice.",
    ),
    "blind": (
        "Blind",
        "Classifiers of other kinds, on data that was never used before (`experiments/blind.py`). Nine were chosen "
        "and trained without tuning; all are shown. They were calibrated once, after the head's settings were fixed.",
    ),
    "after": (
        "The same classifiers afterwards",
        "The first look led to one change: the class map clips its input, which forests need. These numbers are "
        "not blind.",
    ),
}


def _versus_line(row: pd.Series) -> list[str]:
    gaps = []
    for name in RIVALS:
        gap, reach = row[f"to_{name}"], row[f"reach_{name}"]
        text = f"{gap:+.4f} ± {reach:.4f}"
        gaps.append(f"**{text}**" if abs(gap) > reach else text)
    numbers = [f"{row[f'nll_{name}']:.4f}" for name in ("none", *RIVALS)]
    sizes = [str(row.classes), f"{row.calib:,} / {row.test:,}"]
    ece = f"{100 * row.ece:.2f} ({100 * row.ece_high:.2f})"
    return [row["name"], *sizes, *numbers, f"{row.nll_head:.4f}", *gaps, ece]


def _wins(rows: pd.DataFrame) -> str:
    """Each classifier counts once: of ImageNet the first half, by logits."""
    rows, lines = rows[~rows.name.str.contains("half [1-9]|features")], []
    for name, title in RIVALS.items():
        gap, reach = rows[f"to_{name}"], rows[f"reach_{name}"]
        counts = [int((gap < -reach).sum()), int((gap.abs() <= reach).sum()), int((gap > reach).sum())]
        change = (rows.nll_head / rows[f"nll_{name}"] - 1).mean()
        lines.append([title, *map(str, counts), f"{100 * change:+.2f}"])
    return markdown(
        ["head against", "clearly lower", "level", "clearly higher", "mean change of NLL, percent"], lines
    )


def safety_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """How often the head is worse than the better of doing nothing and temperature scaling."""
    found = pd.read_csv(HERE / "safety.csv")
    lines = []
    for _, row in found.iterrows():
        shares = [f"{100 * row[key]:.1f}" for key in ("worse", "temperature_worse", "opened")]
        losses = [f"{max(row[key], 0):.4f}" for key in ("worst", "temperature_worst")]
        sizes = [f"{row[key]:,.0f}" for key in ("classes", "n", "draws")]
        lines.append(
            [*sizes, shares[0], losses[0], shares[1], losses[1], shares[2], f"{100 * row.gain:+.1f}"]
        )
    head = [
        "classes",
        "samples",
        "draws",
        "head worse",
        "largest loss",
        "temperature worse",
        "its largest loss",
        "stages opened",
        "NLL saved",
    ]
    return "\n".join(
        [
            "# Small calibration sets\n",
            "Draws of calibration sets from real logits (`experiments/safety.py`). Worse: the NLL on other samples is "
            "more than 0.002 above the better of the raw network and temperature scaling, which is known only later. "
            "Draws mix calibration and test data. That stages open from 30 wrong predictions on was chosen on 860 "
            "draws of each size; the shares of the others differ by at most a point. Shares in percent of draws; NLL "
            "saved against temperature scaling, percent.\n",
            markdown(head, lines),
        ]
    )


PAGES: dict[str, Page] = {"stages": stages_page, "versus": versus_page, "safety": safety_page}
