"""Calibrators fitted after training, side by side on the logits of real networks.

    python experiments/post_hoc.py "CIFAR-10, ResNet-50" runs/cifar10-resnet50-cross_entropy-e30-s{0,1,2}
    python experiments/post_hoc.py "CIFAR-10, ResNet-110 (published logits)" resnet110_c10.npz
    python experiments/post_hoc.py "ImageNet, frozen ResNet-50" resnet50_val5k.npz --calibrators none temperature spline

A source is a run folder, a file with `val_logits`, `val_labels`, `test_logits` and `test_labels`, or one with `logits`
and `labels` alone, five samples a class, which is split five times as `imagenet_frozen.py` does. Each calibrator is
cross-fitted on the calibration data (five folds: what may choose among calibrators) and fitted to all of it for the
test data. The numbers go into experiments/results/post_hoc.json, in place of those the network has there.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from committed import RESULTS
from doublehead.training.finish import as_plain
from imagenet_frozen import split
from tables import BAND_NOTE, Table

from doublehead import Predictions, Summary, calibrators, metrics
from doublehead.calibrators import CALIBRATORS
from doublehead.training.run_folder import environment

NAME = "post_hoc.json"
PUBLISHED = {"CIFAR-10, ResNet-110 (published logits)": "CIFAR-10", "ImageNet, frozen ResNet-50": "ImageNet"}
PEERS_FILE = Path(__file__).resolve().parents[1] / "benchmarks/results/calibrators_beside_peers.json"
FOLDS, SPLITS = 5, 5
TEST = {"accuracy": "accuracy", "ece": "ece", "low": "ece_floor_low", "high": "ece_floor_high",
        "nll": "nll", "brier": "brier"}  # fmt: skip
Found = Mapping[str, Any]


def pairs(source: Path) -> Iterator[tuple[Predictions, Predictions]]:
    """Calibration and test predictions of a source; several where it has to be split."""
    if source.is_dir():
        calib, test = (
            Predictions.load(source / f"predictions/{part}-main.npz") for part in ("calib", "test")
        )
        yield calib, test
        return
    with np.load(source) as file:
        data = {name: torch.from_numpy(file[name]) for name in file.files if name != "features"}
    data = {name: part.flatten().long() if "labels" in name else part.float() for name, part in data.items()}
    if "val_logits" in data:
        yield (Predictions(data["val_logits"], data["val_labels"]),
               Predictions(data["test_logits"], data["test_labels"]))  # fmt: skip
        return
    everything = Predictions(data["logits"], data["labels"])
    for seed in range(SPLITS):
        calib_rows, test_rows = (torch.from_numpy(rows) for rows in split(everything.labels.numpy(), seed))
        yield everything[calib_rows], everything[test_rows]


def cross_fitted(calibrator: calibrators.Calibrator, calib: Predictions) -> Predictions:
    """Predictions of every sample by a calibrator that was fitted to the other folds."""
    order = torch.randperm(len(calib), generator=torch.Generator().manual_seed(0))
    folds = order.chunk(FOLDS)
    made = []
    for number, fold in enumerate(folds):
        rest = torch.cat([other for place, other in enumerate(folds) if place != number])
        made.append(calibrator.fresh().fit(calib[rest]).calibrate(calib[fold]).logits)
    return Predictions(torch.cat(made), calib.labels[order])


def measure(name: str, calib: Predictions, test: Predictions) -> dict[str, Any]:
    """The numbers of one calibrator on one pair."""
    calibrator = CALIBRATORS[name]()
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", calibrators.NotConverged)
        crossed = cross_fitted(calibrator, calib)
        numbers = Summary.of(calibrator.fit(calib).calibrate(test)).values
    return {
        "calibrator": name,
        "cv_ece": float(metrics.ece(crossed)),
        "cv_nll": float(metrics.nll(crossed)),
        **{key: numbers[number] for key, number in TEST.items()},
        "seconds": round(time.perf_counter() - began, 2),
    }


def read_networks(results: Path = RESULTS) -> dict[str, Found]:
    """What was measured, by network; nothing where there is no file."""
    file = results / NAME
    found: dict[str, Found] = json.loads(file.read_text()) if file.exists() else {}
    return found


def post_hoc_table(results: Path = RESULTS) -> Table | None:
    """All calibrators on all networks; None where nothing was measured."""
    networks = read_networks(results)
    if not networks:
        return None
    head = [
        "network",
        "calibrator",
        "cross-fitted on calibration data: NLL",
        "ECE",
        "test: NLL",
        "ECE",
        "Brier",
        "accuracy",
    ]
    lines = [line for name, one in networks.items() for line in _lines(name, one)]
    sizes = ", ".join(f"{one['calib']:,} and {one['test']:,} ({name})" for name, one in networks.items())
    notes = [
        BAND_NOTE,
        "Percent but for NLL and Brier; means over seeds or splits where a network has several. Italic: below "
        "temperature scaling's NLL. The first two columns of numbers saw no test data: a choice may rest on them.",
        f"Samples to calibrate and to test on: {sizes}.",
        "`head` is `HeadCalibrator`: what `fit_head` does by default. What was trained again for this is not the "
        "network of the other tables.",
    ]
    return Table("post-hoc", "Calibrators fitted after training", head, lines, notes)


def two_networks(results: Path = RESULTS) -> Table:
    """NLL and ECE of all calibrators on the two networks that others have published, for the guide."""
    networks = read_networks(results)
    found = [networks[name] for name in PUBLISHED if name in networks]
    names = list(dict.fromkeys(name for one in found for name in _calibrators(one)))
    best = [min(_mean(one, name, "nll") for name in _calibrators(one)) for one in found]
    lines = []
    for name in names:
        cells = []
        for one, lowest in zip(found, best):
            if name not in _calibrators(one):
                cells += ["-", "-"]
                continue
            nll, ece = _mean(one, name, "nll"), 100 * _mean(one, name, "ece")
            bold = "**" if nll == lowest else ""
            cells += [f"{bold}{nll:.4f}{bold}", f"{ece:.2f}"]
        lines.append([name, *cells])
    titles = [PUBLISHED[name] for name in PUBLISHED if name in networks]
    head = ["", *(f"{title}: {what}" for title in titles for what in ("NLL", "ECE"))]
    return Table("two-networks", "", head, lines or [["not run"]])


def beside_peers(file: Path = PEERS_FILE) -> Table:
    """NLL and ECE of our calibrators and a peer's on the same networks, for the guide; bold: the lowest NLL."""
    networks: dict[str, Found] = json.loads(file.read_text()) if file.exists() else {}
    names = list(dict.fromkeys(run["method"] for one in networks.values() for run in one["numbers"]))
    lines = []
    for network, one in networks.items():
        found = {name: [run for run in one["numbers"] if run["method"] == name] for name in names}
        nlls = {name: fmean(run["nll"] for run in runs) for name, runs in found.items()}
        eces = {name: 100 * fmean(run["ece"] for run in runs) for name, runs in found.items()}
        low = min(nlls.values())
        cells = [f"**{nlls[name]:.4f}**" if nlls[name] == low else f"{nlls[name]:.4f}" for name in names]
        lines.append([network, *(f"{cell} / {eces[name]:.2f}" for cell, name in zip(cells, names))])
    return Table("beside-peers", "", ["NLL / ECE", *names], lines or [["not run"]])


def _lines(network: str, one: Found) -> list[list[str]]:
    lines = []
    for name in _calibrators(one):
        nlls = []
        for key in ("cv_nll", "nll"):
            nll, scalar = (round(_mean(one, which, key), 4) for which in (name, "temperature"))
            nlls.append(f"*{nll:.4f}*" if nll < scalar else f"{nll:.4f}")
        ece, low, high, crossed, accuracy = (
            100 * _mean(one, name, key) for key in ("ece", "low", "high", "cv_ece", "accuracy")
        )
        shown = f"{ece:.2f}" if ece > high else f"**{ece:.2f}**"
        lines.append([network if not lines else "", name, nlls[0], f"{crossed:.2f}", nlls[1],
                      f"{shown} ({low:.2f} to {high:.2f})", f"{_mean(one, name, 'brier'):.4f}",
                      f"{accuracy:.2f}"])  # fmt: skip
    return lines


def post_hoc_text(results: Path = RESULTS) -> str:
    """On how many networks each calibrator beats the scalar temperature, and is inside the band, in two sentences."""
    networks = read_networks(results)
    better, inside = Counter[str](), Counter[str]()
    for one in networks.values():
        for name in _calibrators(one):
            nll, scalar = (round(_mean(one, which, "cv_nll"), 4) for which in (name, "temperature"))
            better[name] += nll < scalar
            inside[name] += _mean(one, name, "ece") <= _mean(one, name, "high")

    def counted(counts: Counter[str]) -> str:
        tried = {name: sum(name in _calibrators(one) for one in networks.values()) for name in counts}
        found = sorted(
            (name for name in counts if counts[name]), key=lambda name: -counts[name] / tried[name]
        )
        return ", ".join(f"{name} on {counts[name]} of {tried[name]}" for name in found) or "none"

    return (
        f"Cross-fitted on calibration data, below the scalar temperature's NLL: {counted(better)} networks. "
        f"ECE on test data not above the band: {counted(inside)}."
    )


def _calibrators(one: Found) -> list[str]:
    return list(dict.fromkeys(run["calibrator"] for run in one["numbers"]))


def _mean(one: Found, calibrator: str, key: str) -> float:
    return fmean(run[key] for run in one["numbers"] if run["calibrator"] == calibrator)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="what the table shall call it")
    parser.add_argument("sources", type=Path, nargs="+", help="run folders or files, one a seed")
    parser.add_argument("--calibrators", nargs="+", choices=[*CALIBRATORS], help="all that fit unless given")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[tuple[Predictions, Predictions]] = [
        pair for source in options.sources for pair in pairs(source)
    ]
    names: Sequence[str] = [
        name
        for name, one in CALIBRATORS.items()
        if name in ("temperature", *(options.calibrators or CALIBRATORS))  # all are compared with it
        and (not one.binary_only or found[0][0].n_classes == 2)
    ]
    numbers = []
    for name in names:
        numbers += [measure(name, *pair) for pair in found]
        last = numbers[-len(found) :]
        print(
            f"{name:22s} NLL {fmean(n['nll'] for n in last):.4f} ECE {100 * fmean(n['ece'] for n in last):.2f}",
            flush=True,
        )
    networks = read_networks(options.results)
    networks[options.network] = as_plain({
        "environment": environment(torch.device("cpu")),
        "sources": [source.name for source in options.sources],
        "calib": len(found[0][0]),
        "test": len(found[0][1]),
        "numbers": numbers,
    })  # fmt: skip
    (options.results / NAME).write_text(
        json.dumps(networks, separators=(",", ":")).replace('{"calibrator"', '\n{"calibrator"') + "\n"
    )


if __name__ == "__main__":
    main()
