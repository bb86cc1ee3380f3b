"""Fit a temperature beside the peers: the same arrays, one process, one thread; time and the NLL reached.

    python benchmarks/temperature_speed.py            # the peers that are installed
    python benchmarks/temperature_speed.py --save     # also writes benchmarks/results/temperature_speed.json

Every candidate starts from the same float32 logits (netcal, which wants probabilities, from their softmax in
float64, made beforehand) and ends with a temperature; checks of the input are part of the time. Seconds are CPU
seconds of this process; candidates take turns and the fastest round of each counts. `above` is how far the mean NLL
at a candidate's temperature lies above the lowest one, that of a golden-section search in float64; it cannot be
told from 0 below about 1e-15.
"""

# ruff: noqa: E402 (the number of threads is set before numpy and torch are loaded)
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"

import argparse
import json
import logging
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from doublehead.calibrators import Temperature
from doublehead.predictions import Predictions
from doublehead.system import require

Candidate = Callable[[], float]  # a temperature
RESULTS = Path(__file__).parent / "results" / "temperature_speed.json"
SHARED = Path(__file__).parents[2] / "shared" / "data"
PACKAGES = {  # what is imported -> what is installed
    "sklearn.calibration": "scikit-learn",
    "probmetrics.calibrators": "probmetrics",
    "netcal.scaling": "netcal",
    "torch_uncertainty.post_processing": "torch-uncertainty",
}


def make_logits(rows: int = 10_000, classes: int = 100) -> tuple[Tensor, Tensor]:
    """Logits twice too large for their labels, which are drawn from the softmax of half of them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator) * 2
    favourite = torch.randint(classes, (rows,), generator=generator)
    logits[torch.arange(rows), favourite] += 4 + 16 * torch.rand(rows, generator=generator)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=generator)[:, 0]
    return logits, labels


def arrays() -> dict[str, tuple[Tensor, Tensor]]:
    """Drawn and real logits; the real ones only where they lie beside the project."""
    logits, labels = make_logits()
    found = {"drawn, 10,000 x 100": (logits, labels), "drawn, 10,000 x 100, times 20": (20 * logits, labels)}
    path = SHARED / "logits" / "resnet110_c10.npz"
    if path.exists():
        with np.load(path) as real:
            both = torch.from_numpy(real["val_logits"]), torch.from_numpy(real["val_labels"]).long()
        found["ResNet-110 on CIFAR-10, 5,000 x 10"] = both
    path = SHARED / "imagenet" / "resnet50_val5k.npz"
    if path.exists():
        with np.load(path) as real:
            both = torch.from_numpy(real["logits"]).float(), torch.from_numpy(real["labels"]).long()
        found["ResNet-50 on ImageNet, 5,000 x 1,000"] = both
    return found


def peers() -> dict[str, Any]:
    """The peers that can be imported; the reason is printed for each that cannot."""
    found = {}
    for module, package in PACKAGES.items():
        try:
            require("torchvision", extra="models")
            found[package] = import_module(module)
        except Exception as error:  # peers fail in many ways
            print(f"skipped {package}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def candidates(found: dict[str, Any], logits: Tensor, labels: Tensor) -> dict[str, Candidate]:
    z, y = logits.numpy(), labels.numpy()
    probs = logits.double().softmax(1).numpy()  # netcal fails silently on float32

    def sklearn() -> float:
        return 1 / float(found["scikit-learn"]._TemperatureScaling().fit(z, y).beta_)

    def probmetrics(**options: Any) -> float:
        distributions = import_module("probmetrics.distributions")
        peer = found["probmetrics"].TemperatureScalingCalibrator(**options)
        peer.fit_torch(distributions.CategoricalLogits(logits), labels)
        return 1 / float(peer.invtemp_)

    def netcal() -> float:
        return 1 / float(found["netcal"].TemperatureScaling().fit(probs, y).temperature[0])

    def torch_uncertainty() -> float:
        peer = found["torch-uncertainty"].TemperatureScaler(None)
        rows = torch.utils.data.TensorDataset(logits, labels)
        peer.fit(torch.utils.data.DataLoader(rows, batch_size=2000), progress=False)
        return float(peer.temperature[0])

    ours = {"doublehead": lambda: float(Temperature().fit(Predictions(logits, labels)).temperature_)}
    theirs: dict[str, tuple[str, Candidate]] = {
        "scikit-learn": ("scikit-learn", sklearn),
        "probmetrics": ("probmetrics", probmetrics),
        "probmetrics, L-BFGS as in gpleiss": (
            "probmetrics",
            lambda: probmetrics(opt="lbfgs", lr=0.01, max_iter=50, use_inv_temp=False),
        ),
        "netcal": ("netcal", netcal),
        "torch-uncertainty": ("torch-uncertainty", torch_uncertainty),
    }
    return ours | {name: call for name, (package, call) in theirs.items() if package in found}


def mean_nll(logits: Tensor, labels: Tensor, inverse: float) -> float:
    return float(cross_entropy(logits.double() * inverse, labels))


def lowest_nll(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """The optimal temperature and its NLL, by a golden-section search over log(1 / T) in float64."""
    ratio, low, high = (math.sqrt(5) - 1) / 2, -12.0, 12.0
    while high - low > 1e-7:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if mean_nll(logits, labels, math.exp(left)) < mean_nll(logits, labels, math.exp(right)):
            high = right
        else:
            low = left
    inverse = math.exp((low + high) / 2)
    return 1 / inverse, mean_nll(logits, labels, inverse)


def measure(logits: Tensor, labels: Tensor, found: dict[str, Any], rounds: int) -> dict[str, Any]:
    optimum, lowest = lowest_nll(logits, labels)
    work: dict[str, Any] = {"optimal_temperature": optimum, "lowest_nll": lowest, "results": {}}
    for _ in range(rounds):
        for name, candidate in candidates(found, logits, labels).items():
            row = work["results"].setdefault(name, {"seconds": math.inf})
            if "error" in row:
                continue
            start = time.process_time()
            try:
                temperature = candidate()
            except Exception as error:  # a peer that fails is a result too
                row.update(seconds=None, error=f"{type(error).__name__}: {error}")
                continue
            row["seconds"] = min(row["seconds"], time.process_time() - start)
            row["temperature"] = temperature
            row["above"] = mean_nll(logits, labels, 1 / temperature) - lowest
    for row in work["results"].values():
        if row["seconds"] is not None:
            row["ratio"] = row["seconds"] / work["results"]["doublehead"]["seconds"]
    return work


def show(name: str, work: dict[str, Any]) -> None:
    print(f"\n{name}: T = {work['optimal_temperature']:.6f}, NLL {work['lowest_nll']:.6f}")
    print(f"  {'':36s}{'ms':>9s}{'ratio':>8s}{'T':>14s}{'above':>10s}")
    for peer, row in sorted(work["results"].items(), key=lambda item: item[1]["seconds"] or math.inf):
        if row["seconds"] is None:
            print(f"  {peer:36s}  failed: {row['error'][:80]}")
            continue
        numbers = (
            f"{1e3 * row['seconds']:9.1f}{row['ratio']:8.1f}{row['temperature']:14.6f}{row['above']:10.1e}"
        )
        print(f"  {peer:36s}{numbers}")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    found = peers()
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rounds": arguments.rounds,
        "python": platform.python_version(),
        "device": f"{cpu_name()}, 1 thread",
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ["torch", "numpy", *found]},
        "works": {},
    }
    for name, (logits, labels) in arrays().items():
        record["works"][name] = measure(logits, labels, found, arguments.rounds)
        show(name, record["works"][name])
    if arguments.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
