"""Methods by name: each is a loss for the network, heads trained beside it, or both. Several in one table."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from doublehead.calibration_head import PAPER, HeadSpec
from doublehead.data.splits import Splits
from doublehead.training.config import Config
from doublehead.training.loop import train
from doublehead.training.run_folder import RunFolder

SAMPLE = HeadSpec(kind="temperature", reads="features", lr=0.01, beta0=1.2)
BETAS = (0.1, 0.6, 0.8, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)  # of a sweep over beta0
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


@dataclass(frozen=True)
class Method:
    """What to train, and the output that is the method's: "main", a head's name, "auto" or "guarded"."""

    title: str
    loss: str = "cross_entropy"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    mixup: float = 0.0
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)
    auto: bool = False
    guards: tuple[str, ...] = ()
    output: str = "main"

    def apply(self, config: Config) -> Config:
        """The config with this method in it; heads and guards that are there already stay."""
        return replace(
            config,
            loss=self.loss,
            loss_options=dict(self.loss_options),
            mixup=self.mixup,
            heads={**config.heads, **self.heads},
            auto=config.auto or self.auto,
            guards=tuple(dict.fromkeys((*config.guards, *self.guards))),
        )


def _head(title: str, name: str, spec: HeadSpec) -> Method:
    return Method(title, heads={name: spec}, output=name)


METHODS: dict[str, Method] = {
    "cross-entropy": Method("Cross entropy"),
    "label-smoothing": Method("Label smoothing", "label_smoothing"),
    "brier": Method("Brier", "brier"),
    "focal": Method("Focal", "focal"),
    "flsd-53": Method("FLSD-53", "flsd53"),
    "adafocal": Method("AdaFocal", "adafocal"),
    "mmce": Method("MMCE", "mmce"),
    "mmce-published": Method("MMCE as published", "mmce_published"),
    "entropy-penalty": Method("Entropy penalty", "entropy_penalty"),
    "soft-ece": Method("Soft-binned ECE", "soft_ece"),
    "avuc": Method("AvUC", "avuc"),
    "mse": Method("Squared error on logits", "mse_logits"),
    "mixup": Method("Mixup", mixup=0.2),
    "double-head": _head("Double head", "double-head", replace(PAPER, beta0=1.0)),
    "annealing-double-head": _head("Annealing double head", "annealing-double-head", PAPER),
    "sample-temperature": _head("Sample temperature head", "sample-temperature", SAMPLE),
    "auto": Method("Staged head, second opinion", auto=True, output="auto"),
    "guarded": Method("Staged head, shift guard", auto=True, guards=("shifts",), output="guarded"),
    "sweep": Method(
        "Sweep over beta0",
        heads={
            f"{name}-{beta0:g}": replace(spec, beta0=beta0)
            for name, spec in (("mlp", PAPER), ("temperature", SAMPLE))
            for beta0 in BETAS
        },
    ),
}


def method(name: str) -> Method:
    """The method called `name`, or an error that lists all of them.

    >>> method("brier").loss
    'brier'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}{hint}")
    return METHODS[name]


def runs_for(config: Config, names: Sequence[str]) -> list[tuple[Config, list[str]]]:
    """The fewest training runs that have the outputs of all these methods: methods with one loss share a run.

    >>> [names for _, names in runs_for(Config(), ["cross-entropy", "brier", "double-head"])]
    [['cross-entropy', 'double-head'], ['brier']]
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        asked = method(name)
        key = (asked.loss, tuple(sorted(asked.loss_options.items())), asked.mixup)
        groups.setdefault(key, []).append(name)
    runs = []
    for group in groups.values():
        made = config
        for name in group:
            made = method(name).apply(made)
        runs.append((made, group))
    return runs


def compare(
    config: Config,
    methods: Sequence[str],
    folder: str | Path,
    splits: Splits | None = None,
    *,
    started: Callable[[Config, list[str], int, int], None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train all `methods` under `folder` and return the rows of their table.

    Methods with one loss share one training run: cross entropy and all heads come from the same network. A finished
    run that has all heads asked for, and perhaps more, is not trained again. `started` gets each run's config,
    methods, number and the number of runs; further `options` go to `train`.
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
    """A finished run in `folder` with the settings of `asked` and all of its heads and guards, perhaps more."""
    for path in sorted(folder.glob(f"{glob.escape(asked.name)}-*")):
        run = RunFolder(path)
        try:
            config = run.config if run.finished else None
        except (ValueError, TypeError, OSError):  # written by another version, or no run at all
            continue
        if config is not None and _contains(config, asked):
            return run
    return None


def _contains(config: Config, asked: Config) -> bool:
    same = replace(config, heads=asked.heads, auto=asked.auto, guards=asked.guards) == asked
    more = asked.heads.items() <= config.heads.items() and set(asked.guards) <= set(config.guards)
    return same and more and config.auto >= asked.auto


def method_rows(name: str, results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """One method's rows from its run's results: as trained and, unless it is a head, after temperature scaling."""
    asked = method(name)
    outputs = [asked.output] if asked.output != "main" or not asked.heads else list(asked.heads)
    rows = []
    for output in outputs:
        numbers = results["outputs"][output]
        title = asked.title if output == asked.output else output
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
