"""Fit a temperature beside the peers: the same arrays, one process, one thread; time and the NLL reached.

    python benchmarks/temperature_speed.py            # the peers that are installed
    python benchmarks/temperature_speed.py --save     # also writes benchmarks/results/temperature_speed.json

Every candidate starts from the same float32 logits (netcal, which wants probabilities, from their softmax in
float64, made beforehand) and ends with a temperature; checks of the input are part of the time. Seconds are CPU
seconds of this process; candidates take turns and the fastest round of each counts. `above` is how far the mean NLL
at a candidate's temperature lies above the lowest one, that of a golden-section search in float64; it cannot be
distinguished from 0 below about 1e-15.
"""

from __future__ import annotations

import records  # isort: skip
import logging
import math
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import definitions as by
import numpy as np
import torch
from torch import Tensor

from doublehead.calibrators import Temperature
from doublehead.predictions import Predictions

Candidate = Callable[[], float]  # a temperature
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
    for title, file, prefix in (
        ("ResNet-110 on CIFAR-10, 5,000 x 10", "logits/resnet110_c10.npz", "val_"),
        ("ResNet-50 on ImageNet, 5,000 x 1,000", "imagenet/resnet50_val5k.npz", ""),
    ):
        if (SHARED / file).exists():
            with np.load(SHARED / file) as real:
                logits, labels = (torch.from_numpy(real[f"{prefix}{name}"]) for name in ("logits", "labels"))
            found[title] = logits.float(), labels.long()
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

    as_gpleiss = {"opt": "lbfgs", "lr": 0.01, "max_iter": 50, "use_inv_temp": False}
    ours = {"doublehead": lambda: float(Temperature().fit(Predictions(logits, labels)).temperature_)}
    theirs: dict[str, Candidate] = {
        "scikit-learn": sklearn,
        "probmetrics": probmetrics,
        "probmetrics, L-BFGS as in gpleiss": lambda: probmetrics(**as_gpleiss),
        "netcal": netcal,
        "torch-uncertainty": torch_uncertainty,
    }
    return ours | {name: call for name, call in theirs.items() if name.partition(",")[0] in found}


def measure(logits: Tensor, labels: Tensor, found: dict[str, Any], rounds: int) -> dict[str, Any]:
    optimum = by.golden_temperature(logits, labels, within=1e-7)
    lowest = by.nll_at(optimum, logits, labels)
    rows = records.take_turns(candidates(found, logits, labels), rounds)
    for row in rows.values():
        row["seconds"] = row.pop("cpu")
        if "error" not in row:
            row["temperature"] = row.pop("value")
            row["above"] = by.nll_at(row["temperature"], logits, labels) - lowest
            row["ratio"] = row["seconds"] / rows["doublehead"]["seconds"]
    return {"optimal_temperature": optimum, "lowest_nll": lowest, "results": rows}


def show(name: str, work: dict[str, Any]) -> None:
    print(f"\n{name}: T = {work['optimal_temperature']:.6f}, NLL {work['lowest_nll']:.6f}")
    print(f"  {'':36s}{'ms':>9s}{'ratio':>8s}{'T':>14s}{'above':>10s}")
    for peer, row in sorted(work["results"].items(), key=lambda item: item[1]["seconds"] or math.inf):
        if row["seconds"] is None:
            print(f"  {peer:36s}  failed: {row['error'][:80]}")
            continue
        speed, fit = f"{1e3 * row['seconds']:9.1f}{row['ratio']:8.1f}", f"{row['temperature']:14.6f}"
        print(f"  {peer:36s}{speed}{fit}{row['above']:10.1e}")


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    found = records.installed(PACKAGES)
    record: dict[str, Any] = {**records.about(found), "rounds": arguments.rounds, "works": {}}
    for name, (logits, labels) in arrays().items():
        record["works"][name] = measure(logits, labels, found, arguments.rounds)
        show(name, record["works"][name])
    if arguments.save:
        records.save("temperature_speed", record)


if __name__ == "__main__":
    main()
