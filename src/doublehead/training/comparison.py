"""Several methods side by side: train what is missing, then one table in which every row had the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    Methods with one loss share one training run: cross entropy and all heads come from the same network. `started` is
    told each run's config, methods, number and how many there are; further `options` go to `train`.
    """
    runs = runs_for(config, methods)
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, (asked, names) in enumerate(runs):
        if started:
            started(asked, names, number, len(runs))
        run = RunFolder(Path(folder) / asked.name)
        results = train(asked, run, splits, **options)
        for name in names:
            rows[name] = method_rows(name, results, run.path)
    return [row for name in methods for row in rows[name]]


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
