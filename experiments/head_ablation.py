"""What each choice behind `fit_head` is worth, on calibration data alone: no test sample has a part in it.

    python experiments/head_ablation.py "CIFAR-10, ResNet-50" runs/cifar10-resnet50-cross_entropy-e30-s{0,1,2}

Sources are those of post_hoc.py. Each variant changes one thing. Its number is the NLL on folds that were held back
from the head, less that of the scalar temperature on the same folds. The two lines on the curve hold back folds from
everything, the choice of the head included. The numbers go into experiments/results/head_ablation.json, in place of
those the network has there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from committed import RESULTS
from constants import constants
from doublehead.training.finish import as_plain
from post_hoc import cross_fitted, pairs
from tables import Table

from doublehead import (
    HeadCalibrator,
    HeadSpec,
    Predictions,
    Readings,
    calibrators,
    fit_head_on,
    last_map,
    metrics,
)
from doublehead.integrations import fit_head as fitting
from doublehead.training.run_folder import environment

NAME = "head_ablation.json"
USED = fitting.CANDIDATES


class Variant(NamedTuple):
    """Other candidates, or other constants of `doublehead.integrations.fit_head`."""

    candidates: tuple[HeadSpec, ...] = USED
    constants: Mapping[str, float] = {}


def _with(**settings: Any) -> tuple[HeadSpec, ...]:
    """The candidates in use with these settings in all of them."""
    return tuple(dict.fromkeys(replace(spec, **settings) for spec in USED))


def _only(name: str, value: Any) -> tuple[HeadSpec, ...]:
    return tuple(spec for spec in USED if getattr(spec, name) == value)


VARIANTS = {
    "as it is": Variant(),
    "linear heads alone": Variant(_only("hidden", 0)),
    "16 hidden units alone": Variant(_only("hidden", 16)),
    "64 hidden units alone": Variant(_with(hidden=64)),
    "no annealing (beta0 1 alone)": Variant(_only("beta0", 1.0)),
    "the paper's beta0 (1.2 alone)": Variant(_with(beta0=1.2)),
    "reads the logits": Variant(_with(reads="logits")),
    "reads statistics and logits": Variant(_with(reads=("statistics", "logits"))),
    "a third of the learning rate": Variant(_with(lr=1 / 3)),
    "three times the learning rate": Variant(_with(lr=3.0)),
    "no early stop: 20 passes": Variant(constants={"LEAST": -math.inf}),
    "the best head even within a standard error": Variant(),
}
CURVE, NO_CURVE = "as it is, a curve included", "without the curve"


def measure(calib: Predictions) -> list[dict[str, Any]]:
    """Every variant on one network's calibration data, by how much its NLL is above the scalar temperature's."""
    readings = Readings(calib.logits.new_empty(len(calib), 0), calib.logits, calib.labels)
    lines = []
    for name, (candidates, values) in VARIANTS.items():
        began = time.perf_counter()
        with constants(fitting, values), constants(last_map, {"ENOUGH": math.inf}):
            choice = fit_head_on(readings, candidates=candidates).choice
        nll = min(choice.nlls) if name.startswith("the best head") else choice.nll
        lines.append(_line(name, nll - choice.nll_of_temperature, began))
    scalar = float(metrics.nll(cross_fitted(calibrators.Temperature(), calib)))
    for name, values in ((CURVE, {}), (NO_CURVE, {"ENOUGH": math.inf})):
        began = time.perf_counter()
        with constants(last_map, values):
            nll = float(metrics.nll(cross_fitted(HeadCalibrator(), calib)))
        lines.append(_line(name, nll - scalar, began))
    return lines


def _line(name: str, behind: float, began: float) -> dict[str, Any]:
    return {"variant": name, "behind": behind, "seconds": round(time.perf_counter() - began, 2)}


def read_ablation(results: Path = RESULTS) -> dict[str, Any]:
    """What was measured, by network; nothing where there is no file."""
    file = results / NAME
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def ablation_table(results: Path = RESULTS) -> Table | None:
    """Means over networks of one kind, each network's the mean of its seeds; None where nothing was measured."""
    networks = read_ablation(results)
    if not networks:
        return None
    kinds: dict[str, list[str]] = {}
    for network in networks:
        kinds.setdefault(kind_of(network), []).append(network)
    lines = []
    for name in (*VARIANTS, CURVE, NO_CURVE):
        behind = {network: mean_of(one, name) for network, one in networks.items()}
        means = [f"{fmean(behind[network] for network in some):+.4f}" for some in kinds.values()]
        below = sum(round(one, 4) < 0 for one in behind.values())
        lines.append([name, *means, f"{max(behind.values()):+.4f}", f"{below} of {len(behind)}"])
    head = ["variant", *(f"{kind}: {len(some)}" for kind, some in kinds.items()), "worst network", "below"]
    notes = [
        "Held-back NLL less that of the scalar temperature on the same folds of the calibration data: negative is "
        "better. Means over the networks of a column, whose number stands beside its name; the last column counts "
        "networks below the temperature in the fourth digit. In use: linear heads and 16 hidden units, beta0 1 and "
        "1.1, statistics of the logits, Adam at 0.01, an early stop, and the scalar temperature unless a head is "
        "better by a standard error.",
        "The last two lines hold back folds from everything, the choice included: their numbers are a little higher.",
        "A network counts with the mean of its seeds or splits.",
    ]
    return Table("head-ablation", "What each choice behind fit_head is worth", head, lines, notes)


def ablation_text(results: Path = RESULTS) -> str:
    """What a change costs or brings, by kind of network, in a few sentences."""
    networks = read_ablation(results)
    if not networks:
        return ""

    def costs(name: str, usual: str = "as it is") -> str:
        """How much NLL a variant costs against what is in use, kind by kind."""
        by_kind: dict[str, list[float]] = {}
        for network, one in networks.items():
            by_kind.setdefault(kind_of(network), []).append(mean_of(one, name) - mean_of(one, usual))
        return ", ".join(f"{fmean(some):+.4f} ({kind})" for kind, some in by_kind.items())

    paper, none = costs("the paper's beta0 (1.2 alone)"), costs("no annealing (beta0 1 alone)")
    late, straight = costs("no early stop: 20 passes"), costs(NO_CURVE, CURVE)
    small, more = costs("16 hidden units alone"), costs("reads statistics and logits")
    return (
        f"Against what is in use, in NLL (positive: worse): the paper's beta0 {paper}; no annealing {none}; no early "
        f"stop {late}; no curve {straight}; 16 hidden units alone, the head of `DoubleHead(network)` and so of "
        f"`refit`, {small}. Reading the logits too: {more}."
    )


def kind_of(network: str) -> str:
    """The column of a network.

    >>> kind_of("CIFAR-100, ResNet-50"), kind_of("SST fine, TreeLSTM")
    ('CIFAR-100', 'texts')
    """
    data = network.split(",", maxsplit=1)[0]
    return "texts" if data.startswith(("SST", "20 Newsgroups")) else data


def mean_of(one: Mapping[str, Any], variant: str) -> float:
    """A variant's number on a network, over its seeds."""
    return fmean(line["behind"] for line in one["numbers"] if line["variant"] == variant)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="what the table shall call it")
    parser.add_argument("sources", type=Path, nargs="+", help="run folders or files, one a seed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Sequence[Predictions] = [calib for source in options.sources for calib, _ in pairs(source)]
    numbers = [line for calib in found for line in measure(calib)]
    networks = read_ablation(options.results)
    networks[options.network] = as_plain({
        "environment": environment(torch.device("cpu")),
        "sources": [source.name for source in options.sources],
        "calib": len(found[0]),
        "numbers": numbers,
    })  # fmt: skip
    packed = json.dumps(networks, separators=(",", ":")).replace('{"variant"', '\n{"variant"')
    (options.results / NAME).write_text(packed + "\n")
    for name in (*VARIANTS, CURVE, NO_CURVE):
        print(f"{name:45s} {mean_of(networks[options.network], name):+.4f}", flush=True)


if __name__ == "__main__":
    main()
