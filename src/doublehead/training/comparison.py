"""Several methods side by side: train what is missing, then one table in which every row had the same data."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from doublehead.data.splits import Splits
from doublehead.training.config import Config
from doublehead.training.loop import train
from doublehead.training.methods import method, runs_for
from doublehead.training.run_folder import RunFolder

NUMBERS = (
    "accuracy",
    "ece",
    "ece_floor",
    "ece_floor_low",
    "ece_floor_high",
    "ece_all",
    "nll",
    "brier",
    "mean_entropy",
)


def compare(
    config: Config,
    methods: Sequence[str],
    folder: str | Path,
    splits: Splits | None = None,
    *,
    started: Callable[[Config, list[str], int, int], None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train (or find trained) all `methods` under `folder` and return the rows of their table.

    Methods with one loss share one training run: cross entropy and all heads come from the same network. A finished
    run that holds all heads asked for, and perhaps more, is not trained again. `started` is told each run's
    config, methods, number and how many there are; further `options` go to `train`.
    """
    runs = runs_for(config, methods)
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, (asked, names) in enumerate(runs):
        if started:
            started(asked, names, number, len(runs))
        run = find_finished(asked, Path(folder)) or RunFolder(Path(folder) / asked.folder_name)
        results = train(run.config if run.finished else asked, run, splits, **options)
        for name in names:
            rows[name] = method_rows(name, results, run.path)
    return [row for name in dict.fromkeys(methods) for row in rows[name]]


def find_finished(asked: Config, folder: Path) -> RunFolder | None:
    """A finished run in `folder` that answers for `asked`: the same but for heads and guards, which may be more."""
    for path in sorted(folder.glob(f"{glob.escape(asked.name)}-*")):
        run = RunFolder(path)
        try:
            config = run.config if run.finished else None
        except (ValueError, TypeError, OSError):  # written by another version, or no run at all
            continue
        if config is not None and _answers_for(config, asked):
            return run
    return None


def _answers_for(config: Config, asked: Config) -> bool:
    same = replace(config, heads=asked.heads, auto=asked.auto, guards=asked.guards) == asked
    more = asked.heads.items() <= config.heads.items() and set(asked.guards) <= set(config.guards)
    return same and more and config.auto >= asked.auto


def method_rows(name: str, results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """One method's rows from its run's results: as trained and, unless it is a head, after temperature scaling."""
    asked = method(name)
    answers = [asked.answers] if asked.answers != "main" or not asked.heads else list(asked.heads)
    rows = []
    for output in answers:
        numbers = results["outputs"][output]
        title = asked.title if output == asked.answers else output
        rows.append(_row(title, output, "", numbers["before"], results, folder))
        if output == "main":
            rows.append(_row(f"{title} + temperature", output, "+T", numbers["after"], results, folder))
            rows[-1]["temperature"] = numbers["temperature"]
    return rows


def _row(
    title: str,
    output: str,
    suffix: str,
    numbers: Mapping[str, float],
    results: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    row: dict[str, Any] = {"method": title, **{key: numbers[key] for key in NUMBERS}}
    for shifted, by_output in results["shift"].items():
        row[f"auroc {shifted}"] = by_output[output + suffix]["auroc"]
        if "ece" in by_output[output + suffix]:
            row[f"ece {shifted}"] = by_output[output + suffix]["ece"]
    row["predictions"] = str(folder / "predictions" / f"test-{output}.npz")
    return row
