"""What the committed result files hold: runs by data set, network, epochs and method, with seeds gathered.

experiments/results/<run>/results.json   numbers of every output, config, certificate
                          metrics.jsonl  a line per epoch      gradients.npz  norms of the heads' gradients
                          bins.json      bins of runs whose results.json does not have them yet
experiments/results/post_hoc.json        calibrators fitted to the logits of runs when they were trained
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from seen import parts

from doublehead.bins import UNIT, Bins
from doublehead.training.methods import METHODS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SCALED = "+T"  # at the end of an output's name: after temperature scaling
FITTED = "fit-head"  # the output of a head that post_hoc.py fitted to a run's logits after training


class Spread(NamedTuple):
    """A number over seeds: mean, sample standard deviation (nan for one seed) and how many seeds there are."""

    mean: float
    sd: float
    n: int


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and spread of what several seeds measured; None where there is nothing.

    >>> spread([1.0, 3.0]).mean, round(spread([1.0, 3.0]).sd, 4), spread([])
    (2.0, 1.4142, None)
    """
    if not values:
        return None
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), sd, len(values))


class Row(NamedTuple):
    """Runs that may be compared: one data set, network and number of epochs."""

    data: str
    model: str
    epochs: int


@dataclass(frozen=True)
class Run:
    """One committed run, or what was made from the predictions of several (`kind` says what)."""

    path: Path
    results: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Run:
        """The run in a folder of experiments/results."""
        return cls(path, json.loads((path / "results.json").read_text()))

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        config: dict[str, Any] = self.results["config"]
        return config

    @property
    def row(self) -> Row:
        """Which runs this one may be compared with."""
        return Row(self.config["data"], self.config["model"], self.config["epochs"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def method(self) -> str:
        """The name of the method by its loss, or the `kind` of what was made afterwards."""
        return str(self.results.get("kind") or method_of(self.config))

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, none where there is no such file."""
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        """Per head the norms of its gradient, (epochs, 6): first, 5th, 10th, last 10th, last 5th, last step."""
        file = self.path / "gradients.npz"
        if not file.exists():
            return {}
        with np.load(file, allow_pickle=False) as arrays:
            norms = arrays["norms"]  # (epochs, 6, H)
            return {str(name): norms[:, :, i] for i, name in enumerate(arrays["heads"])}

    def bins(self, output: str, when: str = "before") -> Bins | None:
        """The 15 top-label bins of an output as trained ("before") or after temperature scaling; None: not recorded."""
        output, when = _where(output, when)
        recorded = self.results["outputs"].get(output, {}).get("bins")
        file = self.path / "bins.json"
        if recorded is None and file.exists():
            recorded = json.loads(file.read_text()).get(output)
        return bins_of(recorded[when]) if recorded and when in recorded else None

    def has(self, output: str) -> bool:
        """Whether the run has an output, or all parts of a composed one."""
        return all(part.removesuffix(SCALED) in self.results["outputs"] for part in parts(output))

    def number(self, output: str, key: str, when: str = "before") -> float | None:
        """A number of an output on the test split, of a composed one the mean over its parts; None: not in this run.

        With "+T" at its end: after temperature scaling, whatever `when` says.
        """
        if not self.has(output):
            return None
        found = []
        for part in parts(output):
            name, at = _where(part, when)
            one = self.results["outputs"][name]
            found.append(one[at][key] if at else one[key])
        return _mean(found)

    def shifted(self, shift: str, output: str, key: str) -> float | None:
        """A number of an output (with "+T" at its end: after temperature scaling) on a shifted test set.

        Of a composed output it is that of the part which never saw the family, or the mean where there are several.
        """
        measured = self.results["shift"].get(shift, {})
        return _mean([measured.get(part, {}).get(key) for part in parts(output, shift)])


def _where(output: str, when: str) -> tuple[str, str]:
    """Where the numbers of an output stand: those of "main+T" are "main"'s after temperature scaling."""
    return output.removesuffix(SCALED), "after" if when and output.endswith(SCALED) else when


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, None where a value is missing."""
    found = [float(value) for value in values if value is not None]
    return statistics.fmean(found) if len(found) == len(values) else None


def method_of(config: dict[str, Any]) -> str:
    """The name in METHODS of the loss that a run was trained with.

    >>> method_of({"loss": "brier", "loss_options": {}, "mixup": 0.0})
    'brier'
    """
    asked = (config["loss"], dict(config["loss_options"]), config["mixup"])
    for name, method in METHODS.items():
        if (
            not method.heads
            and not method.auto
            and asked == (method.loss, dict(method.loss_options), method.mixup)
        ):
            return name
    return "-".join([config["loss"], *(f"{key}{value:g}" for key, value in config["loss_options"].items())])


def read_runs(folder: Path = RESULTS) -> list[Run]:
    """All committed runs, by name; those to whose logits a head was fitted later have it among their outputs."""
    runs = {path.parent.name: Run.read(path.parent) for path in sorted(folder.glob("*/results.json"))}
    file = folder / "post_hoc.json"
    for network in json.loads(file.read_text()).values() if file.exists() else ():
        heads = [one for one in network["numbers"] if one["calibrator"] == "head"]
        for name, head in zip(network["sources"], heads):
            if name in runs:
                band = {"ece_floor_low": head["low"], "ece_floor_high": head["high"]}
                runs[name].results["outputs"][FITTED] = {"before": {**head, **band}}
    return list(runs.values())


def rows_of(runs: Iterable[Run]) -> dict[Row, dict[str, list[Run]]]:
    """Runs by row and method, each a list over seeds in order."""
    rows: dict[Row, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        rows.setdefault(run.row, {}).setdefault(run.method, []).append(run)
    return rows


def having(runs: Iterable[Run], *outputs: str) -> list[Run]:
    """The runs that have all of these outputs; whatever is compared should be compared on these."""
    return [run for run in runs if all(run.has(output) for output in outputs)]


def numbers(runs: Sequence[Run], output: str, key: str, when: str = "before") -> Spread | None:
    """A number of an output over the runs (seeds) that have it."""
    values = [run.number(output, key, when) for run in runs]
    return spread([value for value in values if value is not None])


def mean_shift(runs: Sequence[Run], output: str, sets: Sequence[str], key: str = "ece") -> Spread | None:
    """The mean of a number over shifted sets, over the runs that were evaluated on all of them."""
    means = []
    for run in runs:
        values = [run.shifted(name, output, key) for name in sets]
        if values and None not in values:
            means.append(statistics.fmean(value for value in values if value is not None))
    return spread(means)


def bins_of(recorded: dict[str, Sequence[float]]) -> Bins:
    """Bins from counts, sums of confidences and sums of right answers as a results file holds them."""
    units = [round(value * UNIT) for value in recorded["conf_sums"]]
    return Bins.from_state(torch.tensor([list(recorded["counts"]), units, list(recorded["correct_sums"])]))


def small(value: Any) -> Any:
    """The same numbers with 6 significant digits, which is far below the spread over seeds."""
    if isinstance(value, bool) or not isinstance(value, (float, dict, list, tuple)):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: small(part) for key, part in value.items()}
    return [small(part) for part in value]


def write_small(results: dict[str, Any], file: Path) -> None:
    """Write results rounded and without a blank."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(small(results), separators=(",", ":")) + "\n")
