"""The headline table for the README, the targets that were set and whether they were met, and the certificates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from committed import RESULTS, Row, Run, mean_shift, numbers
from paper import TABLE_1
from shift import perturbed_heads, sets_of, shift_summary
from tables import (
    AUTO,
    BAND_NOTE,
    GAP,
    PAPER_NOTE,
    PAPER_SOURCES,
    RIVALS,
    Rows,
    Table,
    ece_cell,
    paper_order,
    shown,
    title_of,
)

from doublehead.data import FAMILIES

FROZEN = RESULTS / "imagenet_frozen.json"
FROZEN_TITLES = {"raw": "as trained", "temperature": "temperature scaling", "fit_head": "`fit_head` (ours)"}
FROZEN_COMMAND = "`python experiments/imagenet_frozen.py FILE.npz`"


def headline(rows: Rows, frozen: Path = FROZEN) -> Table:
    """Ours against temperature scaling, the paper's head and the rivals, with the command that makes each line."""
    lines: list[list[str]] = []
    for row in sorted(rows, key=paper_order):
        lines += _row_lines(row, rows[row])
    lines += _frozen_lines(frozen)
    head = ["", "method", "accuracy", "ECE", "NLL", "Brier", "ECE corrupted", "made by"]
    notes = [
        BAND_NOTE,
        PAPER_NOTE,
        "Percent but for NLL and Brier. Corrupted: mean ECE over 13 families of CIFAR-10-C in five severities.",
        "Every method had the same epochs and the same calibration data. The auto head was chosen on held-back "
        "calibration data; perturbed heads are shown as the range over all that were trained, since none was chosen.",
    ]
    return Table("headline", "Ours, the paper's head and the rivals", head, lines, notes)


def _row_lines(row: Row, methods: dict[str, list[Run]]) -> list[list[str]]:
    """Our lines of a row, then the paper's; the first one carries the row's name."""
    seeds = max(map(len, methods.values()))
    name = f"{title_of(row.data, row.model)}, {row.epochs} epochs, {_seeds(seeds)}"
    lines = [*_head_lines(row, methods.get("cross-entropy", [])), *_rival_lines(row, methods, seeds)]
    published = TABLE_1.get((row.data, row.model))
    if published:
        after, annealed = published.cell("cross-entropy").after, published.annealing
        lines += [["*paper: cross entropy + temperature*", "", f"*{after:.2f}*", "", "", "", ""],
                  ["*paper: annealing double head*", "", f"*{annealed:.2f}*", "", "", "", ""]]  # fmt: skip
    return [[name if i == 0 else "", *line] for i, line in enumerate(line for line in lines if line)]


def _head_lines(row: Row, runs: Sequence[Run]) -> list[list[str]]:
    """Cross entropy and what rides on it."""
    command, head = _command(row, "cross-entropy"), PAPER_SOURCES[5]
    return [
        _line("Cross entropy", runs, "main", "before", command),
        _line("Cross entropy + temperature scaling", runs, "main", "after", command),
        _line(f"Paper's head: {head.title.lower()}", runs, head.output, "before", command),
        _line(AUTO.title, runs, AUTO.output, "before", command),
        *_perturbed_line(runs, command),
    ]


def _rival_lines(row: Row, methods: dict[str, list[Run]], seeds: int) -> list[list[str]]:
    """The other losses and methods, after temperature scaling; fewer seeds than the row has are named."""
    lines = []
    for source in (*PAPER_SOURCES[1:4], *RIVALS):
        runs = methods.get(source.method, [])
        fewer = f" ({_seeds(len(runs))})" if len(runs) < seeds and "ensemble" not in source.method else ""
        command = _command(row, source.method)
        lines.append(_line(f"{source.title} + temperature{fewer}", runs, "main", "after", command))
    return lines


def _seeds(n: int) -> str:
    return f"{n} seed{'s' * (n != 1)}"


def _line(title: str, runs: Sequence[Run], output: str, when: str, command: str) -> list[str]:
    if numbers(runs, output, "ece", when) is None:
        return []
    shifted = mean_shift(runs, output + ("+T" if when == "after" else ""), sets_of(FAMILIES))
    corrupted = shown(shifted, digits=1) if shifted else ""
    scores = [shown(numbers(runs, output, key, when), scale=1, digits=4) for key in ("nll", "brier")]
    return [
        title,
        shown(numbers(runs, output, "accuracy", when)),
        ece_cell(runs, output, when),
        *scores,
        corrupted,
        command,
    ]


def _perturbed_line(runs: Sequence[Run], command: str) -> list[list[str]]:
    """One line for all perturbed heads: the range of each number, since none was chosen."""
    heads = [source.output for source in perturbed_heads(runs)]
    if not heads:
        return []
    shifted = [mean_shift(runs, output, sets_of(FAMILIES)) for output in heads]
    cells = [_range(runs, heads, "accuracy", 100, 2), _range(runs, heads, "ece", 100, 2)]
    low, high = (_means(runs, heads, f"ece_floor_{side}") for side in ("low", "high"))
    cells[1] += f" ({100 * min(low):.2f} to {100 * max(high):.2f})"
    cells += [_range(runs, heads, key, 1, 3) for key in ("nll", "brier")]
    corrupted = between([one.mean for one in shifted if one], 100, 1)
    return [[f"Perturbed heads (ours; {len(heads)} of them)", *cells, corrupted, command]]


def _means(runs: Sequence[Run], outputs: Sequence[str], key: str) -> list[float]:
    found = [numbers(runs, output, key) for output in outputs]
    return [one.mean for one in found if one]


def _range(runs: Sequence[Run], outputs: Sequence[str], key: str, scale: float, digits: int) -> str:
    return between(_means(runs, outputs, key), scale, digits)


def between(values: Sequence[float], scale: float, digits: int) -> str:
    """The smallest and the largest of some numbers; one where they print the same."""
    if not values:
        return GAP
    low, high = (f"{scale * value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} .. {high}"


def _command(row: Row, method: str) -> str:
    script = {"ensemble-4": "ensemble.py", "last-layer": "last_layer.py"}.get(method, "run.py")
    options = "" if script != "run.py" else f" --methods {method}"
    return f"`python experiments/{script} {row.data} {row.model} --epochs {row.epochs}{options}`"


def _frozen_lines(frozen: Path) -> list[list[str]]:
    if not frozen.exists():
        return []
    splits = json.loads(frozen.read_text())["splits"]
    name = f"ImageNet, ResNet-50 frozen, {len(splits)} splits of 2,500 + 2,500"
    lines = []
    for key, title in FROZEN_TITLES.items():
        means = {k: statistics.fmean(split[key][k] for split in splits) for k in splits[0][key]}
        lines.append([name if not lines else "", title, f"{100 * means['accuracy']:.2f}",
                      f"{100 * means['ece']:.2f} (mean floor {100 * means['ece_floor']:.2f})", f"{means['nll']:.4f}",
                      f"{means['brier']:.4f}", "", FROZEN_COMMAND])  # fmt: skip
    return lines


def frozen_table(frozen: Path = FROZEN) -> Table:
    """A trained ImageNet network, frozen: what calibration after training does with 2,500 images."""
    data = json.loads(frozen.read_text())
    splits, lines, records = data["splits"], [], []
    for key, title in FROZEN_TITLES.items():
        cells = []
        for k, scale, digits in (
            ("accuracy", 100, 2),
            ("ece", 100, 2),
            ("ece_floor", 100, 2),
            ("nll", 1, 4),
            ("brier", 1, 4),
        ):
            values = [split[key][k] for split in splits]
            cells.append(
                f"{scale * statistics.fmean(values):.{digits}f} ± {scale * statistics.stdev(values):.{digits}f}"
            )
            records += [
                {"split": split["seed"], "method": key, "number": k, "value": f"{split[key][k]:.6g}"}
                for split in splits
            ]
        lines.append([title, *cells])
    wins = {k: sum(s["fit_head"][k] < s["temperature"][k] for s in splits) for k in ("ece", "nll", "brier")}
    notes = [
        f"Mean and standard deviation over {len(splits)} random splits of 5,000 validation images; the splits share "
        "images, so the deviation is no error bar. Floor: the mean ECE of a perfectly calibrated model.",
        f"`fit_head` is below temperature scaling in NLL in {wins['nll']}, in Brier score in {wins['brier']} and in "
        f"ECE in {wins['ece']} of {len(splits)} splits.",
        "*The paper retrains ImageNet networks for 100 epochs and calibrates on 25,000 images (1.13 for ResNet-50): "
        "another experiment, not run here.*",
    ]
    head = ["frozen ResNet-50", "accuracy", "ECE", "floor", "NLL", "Brier"]
    return Table("imagenet", "ImageNet, ResNet-50, frozen", head, lines, notes, records)


def targets(rows: Rows) -> Table:
    """What was aimed at, what came out, and whether it was met; on every row there is."""
    lines: list[list[str]] = []
    for row in sorted(rows, key=paper_order):
        runs = rows[row].get("cross-entropy", [])
        if numbers(runs, "auto", "ece") is not None:
            lines += [[title_of(row.data, row.model), *line] for line in _targets_of(row, runs)]
    head = ["row", "target", "measured", "met"]
    notes = [
        "Auto head unless said otherwise; means over seeds where there are several.",
        "A target that one seed meets or misses by less than the width of the band is not settled.",
    ]
    return Table("targets", "Targets", head, lines, notes)


def _targets_of(row: Row, runs: Sequence[Run]) -> list[list[str]]:
    def mean(key: str, output: str = "auto", when: str = "before") -> float:
        found = numbers(runs, output, key, when)
        assert found is not None
        return found.mean

    def line(target: str, measured: str, met: bool) -> list[str]:
        return [target, measured, "yes" if met else "**no**"]

    accuracy, before = mean("accuracy"), mean("accuracy", "main")
    ece, high, rival = mean("ece"), mean("ece_floor_high"), mean("ece", "main", "after")
    lines = [line("accuracy at most 0.1 below the main head's", f"{100 * accuracy:.2f} against {100 * before:.2f}",
                  accuracy >= before - 0.001)]  # fmt: skip
    if row.data == "cifar10":
        lines.append(line("ECE not above the band of a perfect model",
                          f"{100 * ece:.2f}, band up to {100 * high:.2f}", ece <= high))  # fmt: skip
    else:
        hard = " (half of which lies below the band of a perfect model)" * (rival / 2 < mean("ece_floor_low"))
        measured = f"{100 * ece:.2f} against {100 * rival:.2f}{hard}"
        lines.append(line("ECE at most half of temperature scaling's", measured, ece <= rival / 2))
    for key in ("nll", "brier"):
        ours, theirs = mean(key), mean(key, "main", "after")
        lines.append(line(f"{ {'nll': 'NLL', 'brier': 'Brier score'}[key]} not worse than temperature scaling's",
                          f"{ours:.4f} against {theirs:.4f}", ours <= theirs))  # fmt: skip
    return lines + _shift_targets(runs)


def _shift_targets(runs: Sequence[Run]) -> list[list[str]]:
    found = shift_summary(runs)
    if not found:
        return []
    n, below = len(found["heads"]), sum(one < found["temperature"] / 2 for one in found["heads"])
    measured = (
        f"{between(found['heads'], 100, 1)} against {100 * found['temperature']:.1f}: {below} of {n} heads"
    )
    clean = f"{between(found['clean'], 100, 2)}: {found['inside']} of {n} heads"
    return [
        ["perturbed heads: mean ECE over the 12 families they never saw below half of temperature scaling's", measured,
         _share(below, n)],
        ["perturbed heads: clean ECE not above the band", clean, _share(found["inside"], n)],
    ]  # fmt: skip


def _share(n_met: int, n: int) -> str:
    return "yes" if n_met == n else "in part" if n_met else "**no**"


def runs_table(runs: Sequence[Run]) -> Table:
    """The certificate of every committed run."""
    lines = []
    for run in runs:
        environment: dict[str, Any] = run.results["environment"]
        seconds = run.results.get("train_seconds")
        lines.append([f"`{run.name}`", str(run.row.epochs), str(run.seed), environment["device"],
                      f"{seconds:.0f}" if seconds else "", environment["commit"][:7], environment["torch"],
                      environment["time"][:10], environment.get("note", "")])  # fmt: skip
    head = ["run", "epochs", "seed", "device", "seconds of training", "commit", "torch", "date", "note"]
    return Table("runs", "Committed runs", head, lines)
