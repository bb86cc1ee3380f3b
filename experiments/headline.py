"""The headline table for the README, the targets that were set and whether they were met, and the certificates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from committed import FITTED, RESULTS, Row, Run, Spread, having, mean_shift, numbers, spread
from guards import answers
from paper import TABLE_1
from seen import FAMILY_UNSEEN, GUARD
from shift import perturbed_heads, sets_of, shift_summary, title_of_output
from tables import (
    AUTO,
    BAND_NOTE,
    GAP,
    PAPER_NOTE,
    PAPER_SOURCES,
    RIVALS,
    Rows,
    Source,
    Table,
    auto_note,
    ece_cell,
    paper_order,
    row_title,
    seeds_said,
    shown,
    title_of,
)

from doublehead.data import FAMILIES

FROZEN = RESULTS / "imagenet_frozen.json"
FROZEN_TITLES = {"raw": "as trained", "temperature": "temperature scaling", "fit_head": "`fit_head` (ours)"}
FROZEN_COMMAND = "`python experiments/imagenet_frozen.py FILE.npz`"
FOLDERS_NOTE = (
    "`post_hoc.py`, `ensemble.py` and `last_layer.py` read the run folders that `run.py` leaves in `runs`. Where these "
    "are gone, `run.py` with the seeds named (an ensemble: `--seeds 0 1 2 3`) and `--methods cross-entropy --bare "
    "--results experiments/members` trains the networks alone; the same seed does not always give the same network."
)
GUARD_NOTE = (
    "Guarded: a shift guard round the auto head. Family unseen: each family of corruption is measured by a guard that "
    "never saw it; clean numbers are means over these three guards. That is the number to read. The guard that saw all "
    "families in training is shown beside. Where a line is of fewer seeds than temperature scaling's, the section on "
    "the guard compares them on the same seeds."
)


def headline(rows: Rows, frozen: Path = FROZEN) -> Table:
    """Ours against temperature scaling, the paper's head and the rivals, with the command that makes each line."""
    lines: list[list[str]] = []
    for row in sorted(rows, key=paper_order):
        lines += _row_lines(row, rows[row])
    lines += frozen_lines(frozen)
    head = ["", "method", "accuracy", "ECE", "NLL", "Brier", "ECE corrupted", "made by"]
    notes = [
        BAND_NOTE,
        PAPER_NOTE,
        "Percent but for NLL and Brier. Corrupted: mean ECE over 13 families of CIFAR-10-C in five severities.",
        "Every method had the same epochs and the same calibration data. Perturbed heads are shown as the range over "
        "all that were trained, since none was chosen.",
        auto_note(rows),
        FOLDERS_NOTE,
        *([GUARD_NOTE] if any("Guarded" in line[1] for line in lines) else []),
    ]
    return Table("headline", "Ours, the paper's head and the rivals", head, lines, notes)


def _row_lines(row: Row, methods: Mapping[str, list[Run]]) -> list[list[str]]:
    """Our lines of a row, then the paper's; the first one carries the row's name."""
    seeds = max(map(len, methods.values()))
    name = f"{title_of(row.data, row.model)}, {row.epochs} epochs, {seeds_said(seeds)}"
    lines = _head_lines(row, methods.get("cross-entropy", []), seeds)
    rivals = rival_lines(methods, (*PAPER_SOURCES[1:4], *RIVALS), seeds)
    lines += [[*line, _command(row, method, methods[method])] for method, line in rivals.items()]
    published = TABLE_1.get((row.data, row.model))
    if published:
        after, annealed = published.cell("cross-entropy").after, published.annealing
        lines += [["*paper: cross entropy + temperature*", "", f"*{after:.2f}*", "", "", "", ""],
                  ["*paper: annealing double head*", "", f"*{annealed:.2f}*", "", "", "", ""]]  # fmt: skip
    return [[name if i == 0 else "", *line] for i, line in enumerate(lines)]


def _head_lines(row: Row, runs: Sequence[Run], seeds: int) -> list[list[str]]:
    """Cross entropy and what rides on it."""
    head = PAPER_SOURCES[5]
    fitted = line_of("Head fitted after training (ours: `fit_head`)", runs, FITTED, "before", seeds)
    lines = [
        line_of("Cross entropy", runs, "main", "before", seeds),
        line_of("Cross entropy + temperature scaling", runs, "main", "after", seeds),
        line_of(f"Paper's head: {head.title.lower()}", runs, head.output, "before", seeds),
        line_of(AUTO.title, runs, AUTO.output, "before", seeds),
        perturbed_line(runs),
        *(
            line_of(f"{title_of_output(guard)} (ours)", runs, guard, "before", seeds)
            for guard in (FAMILY_UNSEEN, GUARD)
        ),
    ]
    made = [[*line, _command(row, "cross-entropy", runs)] for line in lines if line]
    place = 1 + next((i for i, line in enumerate(made) if line[0].startswith(AUTO.title)), len(made))
    return [*made[:place], *([[*fitted, _fitting(row, runs)]] if fitted else []), *made[place:]]


def rival_lines(
    methods: Mapping[str, list[Run]], sources: Sequence[Source], seeds: int
) -> dict[str, list[str]]:
    """The lines of other losses and methods after temperature scaling, by method; an ensemble is one of many seeds."""
    lines = {}
    for source in sources:
        of = 1 if "ensemble" in source.method else seeds
        line = line_of(f"{source.title} + temperature", methods.get(source.method, []), "main", "after", of)
        lines |= {source.method: line} if line else {}
    return lines


def line_of(title: str, runs: Sequence[Run], output: str, when: str, seeds: int) -> list[str]:
    """Title, accuracy, ECE with its band, NLL, Brier score, mean ECE on corrupted images; nothing where not run.

    The title tells the number of seeds where it is not the row's, `seeds`.
    """
    ece = numbers(runs, output, "ece", when)
    if ece is None:
        return []
    shifted = mean_shift(runs, output + ("+T" if when == "after" else ""), sets_of(FAMILIES))
    scores = [shown(numbers(runs, output, key, when), scale=1, digits=4) for key in ("nll", "brier")]
    return [
        title if ece.n == seeds else f"{title} ({seeds_said(ece.n)})",
        shown(numbers(runs, output, "accuracy", when)),
        ece_cell(runs, output, when),
        *scores,
        shown(shifted, digits=1, of=ece.n) if shifted else "",
    ]


def perturbed_line(runs: Sequence[Run], title: str = "Perturbed heads (ours; {n} of them)") -> list[str]:
    """One line for all perturbed heads: the range of each number, since none was chosen."""
    heads = [source.output for source in perturbed_heads(runs)]
    if not heads:
        return []
    fewer = len(having(runs, *heads)) < len(runs)
    name = title.format(n=len(heads)) + " (not on all seeds)" * fewer
    return range_line(name, [(runs, head, "before") for head in heads])


def range_line(title: str, members: Sequence[tuple[Sequence[Run], str, str]]) -> list[str]:
    """A line like `line_of`'s with the smallest and the largest of each number over (runs, output, when)."""

    def means(key: str) -> list[float]:
        found = [numbers(runs, output, key, when) for runs, output, when in members]
        return [one.mean for one in found if one]

    shifted = [
        mean_shift(runs, output + ("+T" if when == "after" else ""), sets_of(FAMILIES))
        for runs, output, when in members
    ]
    corrupted = [one.mean for one in shifted if one]
    low, high = min(means("ece_floor_low")), max(means("ece_floor_high"))
    return [
        title,
        between(means("accuracy"), 100, 2),
        f"{between(means('ece'), 100, 2)} ({100 * low:.2f} to {100 * high:.2f})",
        *(between(means(key), 1, 3) for key in ("nll", "brier")),
        between(corrupted, 100, 1) if corrupted else "",
    ]


def between(values: Sequence[float], scale: float, digits: int) -> str:
    """The smallest and the largest of some numbers; one where they print the same."""
    if not values:
        return GAP
    low, high = (f"{scale * value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} .. {high}"


def _command(row: Row, method: str, runs: Sequence[Run]) -> str:
    """What makes a line; seed 0 is the scripts' own choice, and 0 to 3 that of an ensemble."""
    script = {"ensemble-4": "ensemble.py", "last-layer": "last_layer.py"}.get(method, "run.py")
    seeds = [run.seed for run in runs]
    options = f" --seeds {' '.join(map(str, seeds))}" if seeds != [0] else ""
    if script == "run.py":
        on_cpu = any("CPU" in run.results["environment"]["device"] for run in runs)
        options += f" --methods {method}" + " --accelerator cpu" * on_cpu
    return f"`python experiments/{script} {row.data} {row.model} --epochs {row.epochs}{options}`"


def _fitting(row: Row, runs: Sequence[Run]) -> str:
    """What fits a head to the logits of finished runs."""
    folders = " ".join(f"runs/{run.name}" for run in having(runs, FITTED))
    return f'`python experiments/post_hoc.py "{title_of(row.data, row.model)}" {folders}`'


def frozen_lines(frozen: Path) -> list[list[str]]:
    """The lines of a trained network that was calibrated afterwards, means over splits."""
    if not frozen.exists():
        return []
    splits = json.loads(frozen.read_text())["splits"]
    name = f"ImageNet, ResNet-50 frozen, {len(splits)} splits of 2,500 + 2,500"
    lines = []
    for key, title in FROZEN_TITLES.items():
        of = {k: spread([split[key][k] for split in splits]) for k in splits[0][key]}
        scores = [shown(of[k], scale=1, digits=4) for k in ("nll", "brier")]
        ece = f"{shown(of['ece'])} (mean floor {100 * of['ece_floor'].mean:.2f})"
        first = name if not lines else ""
        lines.append([first, title, shown(of["accuracy"]), ece, *scores, "", FROZEN_COMMAND])
    return lines


def frozen_table(frozen: Path = FROZEN) -> Table:
    """A trained ImageNet network, frozen: what calibration after training does with 2,500 images."""
    splits = json.loads(frozen.read_text())["splits"] if frozen.exists() else []
    head = ["frozen ResNet-50", "accuracy", "ECE", "floor", "NLL", "Brier"]
    if not splits:
        return Table("imagenet", "ImageNet, ResNet-50, frozen", head, [[GAP] * len(head)])
    lines, records = [], []
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
    return Table("imagenet", "ImageNet, ResNet-50, frozen", head, lines, notes, records)


def targets(rows: Rows) -> Table:
    """What was aimed at, what came out, and whether it was met; on every row there is."""
    lines: list[list[str]] = []
    for row in sorted(rows, key=paper_order):
        runs = rows[row].get("cross-entropy", [])
        made: list[list[str]] = []
        if having(runs, AUTO.output):
            for output in (AUTO.output, FITTED):
                answer = partial(_targets_of, row, output)
                made += _by_seed(answer, having(runs, output)) if having(runs, output) else []
            made += [[*line[:2], "", line[2]] for line in _shift_targets(runs)]
            made += _by_seed(_guard_targets, runs)
            lines += [[row_title(row, rows), *line] for line in made]
    head = ["row", "target", "measured", "seeds that meet it", "met"]
    notes = [
        "The auto head unless said otherwise; fitted: the head of `fit_head`, fitted to the logits after training. "
        "Measured and met are means over the seeds that have that head, where there are several.",
        "That auto and the guard need a last temperature, and that the paper's head belongs among auto's candidates, "
        "was learned from test numbers of earlier runs. That a curve may follow was decided on calibration data, when "
        "test numbers of three networks had been seen.",
        "A target that one seed meets or misses by less than the width of the band is not settled.",
    ]
    return Table("targets", "Targets", head, lines, notes)


def _by_seed(answer: Callable[[Sequence[Run]], list[list[str]]], runs: Sequence[Run]) -> list[list[str]]:
    """Targets (target, measured, met) with a column before the last: on how many seeds each is met by itself."""
    alone = [{line[0]: line[-1] for line in answer([run])} for run in runs]
    lines = []
    for target, measured, met in answer(runs):
        found = [one[target] for one in alone if target in one]
        lines.append([target, measured, f"{found.count('yes')} of {len(found)}", met])
    return lines


def _targets_of(row: Row, output: str, runs: Sequence[Run]) -> list[list[str]]:
    def of(key: str, output: str = output, when: str = "before") -> Spread:
        found = numbers(runs, output, key, when)
        assert found is not None
        return found

    def line(target: str, measured: str, met: bool) -> list[str]:
        return ["fitted: " * (output == FITTED) + target, measured, "yes" if met else "**no**"]

    accuracy, before = of("accuracy"), of("accuracy", "main")
    ece, high, rival = of("ece"), of("ece_floor_high"), of("ece", "main", "after")
    lines = [line("accuracy at most 0.1 below the main head's", f"{shown(accuracy)} against {shown(before)}",
                  accuracy.mean >= before.mean - 0.001)]  # fmt: skip
    if row.data == "cifar10":
        lines.append(line("ECE not above the band of a perfect model",
                          f"{shown(ece)}, band up to {100 * high.mean:.2f}", ece.mean <= high.mean))  # fmt: skip
    else:
        below = rival.mean / 2 < of("ece_floor_low").mean
        hard = " (half of which lies below the band of a perfect model)" * below
        measured = f"{shown(ece)} against {shown(rival)}{hard}"
        lines.append(line("ECE at most half of temperature scaling's", measured, ece.mean <= rival.mean / 2))
    for key in ("nll", "brier"):
        ours, theirs = of(key), of(key, "main", "after")
        measured = " against ".join(shown(one, scale=1, digits=4) for one in (ours, theirs))
        lines.append(line(f"{ {'nll': 'NLL', 'brier': 'Brier score'}[key]} not worse than temperature scaling's",
                          measured, ours.mean <= theirs.mean))  # fmt: skip
    return lines


def _shift_targets(runs: Sequence[Run]) -> list[list[str]]:
    found = shift_summary(runs)
    if not found:
        return []
    n, below = len(found["heads"]), found["below"]
    measured = (
        f"{between(found['heads'], 100, 1)} against {100 * found['temperature']:.1f}: {below} of {n} heads"
    )
    clean = f"{between(found['clean'], 100, 2)}: {found['inside']} of {n} heads"
    return [
        ["perturbed heads: mean ECE over the 12 families they never saw below half of temperature scaling's", measured,
         _share(below, n)],
        ["perturbed heads: clean ECE not above the band", clean, _share(found["inside"], n)],
    ]  # fmt: skip


def _guard_targets(runs: Sequence[Run]) -> list[list[str]]:
    return [[one.target, one.measured, "yes" if one.met else "**no**"] for one in answers(runs)]


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
