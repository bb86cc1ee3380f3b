"""Time the metrics beside the peers: the same arrays, one process, one thread; ratios are what counts.

    python benchmarks/metrics_speed.py            # the peers that are installed, about two minutes
    python benchmarks/metrics_speed.py --slow     # also those that take more than half a minute each
    python benchmarks/metrics_speed.py --save     # writes benchmarks/results/metrics_speed.json

Every candidate starts from the same tensor of logits or probabilities and ends with a number; checks of the input
are part of the time. Seconds are CPU seconds of this process, so that waiting for other work on the machine does
not count; candidates take turns, round after round, and the fastest round of each counts. A candidate that takes
over five seconds runs once.
"""

# ruff: noqa: E402 (the number of threads is set before numpy and torch are loaded)
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"

import argparse
import json
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

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.optional import require
from doublehead.predictions import Predictions

Candidate = Callable[[], Any]
RESULTS = Path(__file__).parent / "results" / "metrics_speed.json"
PACKAGES = {  # what is imported -> what is installed
    "torchmetrics": "torchmetrics",
    "sklearn": "scikit-learn",
    "netcal": "netcal",
    "probmetrics": "probmetrics",
    "torch_uncertainty": "torch-uncertainty",
    "pycalib": "pycalib",
    "calibration": "uncertainty-calibration",
}
SLOW = {"torch_uncertainty class by class", "calibration"}  # over half a minute each in class-wise ECE


def make_logits(rows: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits like those of an ImageNet network: confidences over all of 0..1, three in four right."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator) * 2
    favourite = torch.randint(classes, (rows,), generator=generator)
    logits[torch.arange(rows), favourite] += 2 + 14 * torch.rand(rows, generator=generator)
    other = torch.randint(classes, (rows,), generator=generator)
    labels = torch.where(torch.rand(rows, generator=generator) < 0.75, logits.argmax(1), other)
    return logits, labels


def installed() -> dict[str, Any]:
    """The peers that can be imported; the reason is printed for each that cannot."""
    peers = {}
    for module, package in PACKAGES.items():
        try:
            peers[module] = require(module, extra="dev")
        except Exception as error:  # peers fail in many ways
            print(f"skipped {package}: {type(error).__name__}: {error}", file=sys.stderr)
    return peers


def sklearn_ece(confidence: np.ndarray, correct: np.ndarray, strategy: str) -> float:
    """ECE from scikit-learn's reliability curve, the counts taken with numpy (it has no ECE of its own)."""
    curve = import_module("sklearn.calibration").calibration_curve
    share, mean = curve(correct, confidence, n_bins=15, strategy=strategy)
    edges = (
        np.linspace(0, 1, 16)
        if strategy == "uniform"
        else np.percentile(confidence, np.linspace(0, 1, 16) * 100)
    )
    counts = np.histogram(confidence, edges)[0]
    return float((np.abs(share - mean) * counts[counts > 0]).sum() / len(correct))


def top_of(probs: torch.Tensor, labels: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    confidence, predicted = probs.max(1)
    return confidence.numpy(), (predicted == labels).numpy()


def top_from_logits(
    peers: dict[str, Any], logits: torch.Tensor, labels: torch.Tensor
) -> dict[str, Candidate]:
    from_probs = top_from_probs(peers, logits, labels, prepare=lambda scores: scores.softmax(1))
    candidates = {"doublehead": lambda: metrics.ece(Predictions(logits, labels)), **from_probs}
    if "probmetrics" in peers:
        metric = import_module("probmetrics.metrics").CalibrationError(15, "l1")
        candidates["probmetrics"] = lambda: metric.compute_from_labels_logits(labels, logits)
    return candidates


def top_from_probs(
    peers: dict[str, Any],
    scores: torch.Tensor,
    labels: torch.Tensor,
    prepare: Callable[..., torch.Tensor] | None = None,
) -> dict[str, Candidate]:
    probs, k = prepare or (lambda scores: scores), scores.shape[1]
    found: dict[str, Candidate] = {}
    if prepare is None:
        found["doublehead"] = lambda: metrics.ece(Predictions.from_probs(scores, labels))
    if "torchmetrics" in peers:
        error = import_module("torchmetrics.functional.classification").multiclass_calibration_error
        found["torchmetrics"] = lambda: error(scores, labels, k, n_bins=15)  # takes logits or probs
    if "sklearn" in peers:
        found["sklearn"] = lambda: sklearn_ece(*top_of(probs(scores), labels), "uniform")
    if "netcal" in peers:
        netcal = import_module("netcal.metrics").ECE
        found["netcal"] = lambda: netcal(15).measure(probs(scores).numpy(), labels.numpy())
    if "torch_uncertainty" in peers:
        tu = import_module("torch_uncertainty.metrics.classification").CalibrationError
        found["torch_uncertainty"] = lambda: tu("multiclass", num_bins=15, num_classes=k)(
            probs(scores), labels
        )
    if "calibration" in peers:
        uc = peers["calibration"]
        found["calibration"] = lambda: uc.get_ece(probs(scores).numpy(), labels.numpy(), num_bins=15)
    if "probmetrics" in peers and prepare is None:
        metric = import_module("probmetrics.metrics").CalibrationError(15, "l1")
        found["probmetrics"] = lambda: metric.compute_from_labels_probs(labels, scores)
    return found


def classwise(peers: dict[str, Any], probs: torch.Tensor, labels: torch.Tensor) -> dict[str, Candidate]:
    k, array, truth = probs.shape[1], probs.numpy(), labels.numpy()
    found: dict[str, Candidate] = {
        "doublehead": lambda: metrics.ece(Predictions.from_probs(probs, labels), components="classwise")
    }
    if "pycalib" in peers:
        error = import_module("pycalib.metrics").classwise_ECE
        found["pycalib"] = lambda: error(truth, array, bins=15)
    if "netcal" in peers:
        netcal = import_module("netcal.metrics").ECE
        found["netcal class by class"] = lambda: np.mean(
            [netcal(15).measure(array[:, i], (truth == i).astype(int)) for i in range(k)]
        )
    if "calibration" in peers:
        uc = peers["calibration"]
        found["calibration"] = lambda: uc.get_ece(array, truth, num_bins=15, mode="marginal")
    if "torch_uncertainty" in peers:
        tu = import_module("torch_uncertainty.metrics.classification").ClasswiseCalibrationError
        found["torch_uncertainty class by class"] = lambda: tu(k, num_bins=15)(probs, labels)
    return found


def pooled(peers: dict[str, Any], probs: torch.Tensor, labels: torch.Tensor) -> dict[str, Candidate]:
    def flat_labels() -> torch.Tensor:
        return torch.nn.functional.one_hot(labels, probs.shape[1]).flatten()

    found: dict[str, Candidate] = {
        "doublehead": lambda: metrics.ece(
            Predictions.from_probs(probs, labels), components="all", divide_by="entries"
        )
    }
    if "torchmetrics" in peers:
        error = import_module("torchmetrics.functional.classification").binary_calibration_error
        found["torchmetrics"] = lambda: error(probs.flatten(), flat_labels(), n_bins=15)
    if "sklearn" in peers:
        found["sklearn"] = lambda: sklearn_ece(probs.flatten().numpy(), flat_labels().numpy(), "uniform")
    return found


def adaptive(peers: dict[str, Any], probs: torch.Tensor, labels: torch.Tensor) -> dict[str, Candidate]:
    k = probs.shape[1]
    found: dict[str, Candidate] = {
        "doublehead": lambda: metrics.adaptive_ece(Predictions.from_probs(probs, labels))
    }
    if "sklearn" in peers:
        found["sklearn"] = lambda: sklearn_ece(*top_of(probs, labels), "quantile")
    if "torch_uncertainty" in peers:
        tu = import_module("torch_uncertainty.metrics.classification").AdaptiveCalibrationError
        found["torch_uncertainty"] = lambda: tu("multiclass", num_bins=15, num_classes=k)(probs, labels)
    if "calibration" in peers:
        uc = peers["calibration"]
        found["calibration"] = lambda: uc.get_ece_em(probs.numpy(), labels.numpy(), num_bins=15)
    return found


def measure(candidates: dict[str, Candidate], rounds: int) -> dict[str, dict[str, Any]]:
    """The fastest of some rounds of each candidate, in which all take turns, and the number it gave."""
    results: dict[str, dict[str, Any]] = {}
    for round_ in range(rounds + 1):
        for name, candidate in candidates.items():
            row = results.setdefault(name, {"seconds": float("inf")})
            if "error" in row or (round_ and row["seconds"] > 5):
                continue
            start = time.process_time()
            try:
                value = candidate()
            except Exception as error:  # a peer that fails is a result too
                row.update(seconds=None, error=f"{type(error).__name__}: {error}")
                continue
            row["seconds"] = min(row["seconds"], time.process_time() - start)
            row["value"] = float(value)
    return results


def streaming_state(peers: dict[str, Any], logits: torch.Tensor, labels: torch.Tensor) -> dict[str, int]:
    """Bytes kept after 100 batches of 512."""
    bins = Bins.zeros(15)
    for batch in list(zip(logits.split(512), labels.split(512)))[:100]:
        bins += Bins.top(Predictions(*batch))
    kept = {"doublehead": bins.state().numel() * 8}
    if "torchmetrics" in peers:
        metric = import_module("torchmetrics.classification").MulticlassCalibrationError(logits.shape[1])
        for batch in list(zip(logits.split(512), labels.split(512)))[:100]:
            metric.update(*batch)
        kept["torchmetrics"] = sum(
            t.numel() * t.element_size() for t in metric.confidences + metric.accuracies
        )
    return kept


def show(work: str, results: dict[str, dict[str, Any]]) -> None:
    ours = results["doublehead"]
    print(f"\n{work}")
    for name, row in sorted(results.items(), key=lambda item: item[1]["seconds"] or float("inf")):
        if row["seconds"] is None:
            print(f"  {name:34s} failed: {row['error'][:90]}")
            continue
        row["ratio"] = row["seconds"] / ours["seconds"]
        off = abs(row["value"] - ours["value"])
        print(
            f"  {name:34s}{1e3 * row['seconds']:12.1f} ms  x{row['ratio']:8.1f}   {row['value']:.6f} (off by {off:.1e})"
        )


def certificate(arguments: argparse.Namespace, peers: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": arguments.rows,
        "classes": arguments.classes,
        "rounds": arguments.rounds,
        "seconds": "CPU seconds of one thread, the fastest round",
        "python": platform.python_version(),
        "device": f"{cpu_name()}, 1 thread",
        "load": os.getloadavg()[0],
        "note": "the machine was shared while this ran: compare within this run, not between runs",
        "versions": {
            name: version(name) for name in ["torch", "numpy", *(PACKAGES[module] for module in peers)]
        },
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--slow", action="store_true", help="also run the peers that take over half a minute each"
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    peers = installed()
    logits, labels = make_logits(arguments.rows, arguments.classes)
    probs = logits.softmax(1)
    works = {
        "top-label ECE from logits": top_from_logits(peers, logits, labels),
        "top-label ECE from probabilities": top_from_probs(peers, probs, labels),
        "class-wise ECE from probabilities": classwise(peers, probs, labels),
        "all-component ECE from probabilities": pooled(peers, probs, labels),
        "adaptive (equal-mass) ECE from probabilities": adaptive(peers, probs, labels),
    }
    if not arguments.slow:
        works["class-wise ECE from probabilities"] = {
            name: candidate
            for name, candidate in works["class-wise ECE from probabilities"].items()
            if name not in SLOW
        }
    record: dict[str, Any] = {**certificate(arguments, peers), "works": {}}
    for work, candidates in works.items():
        record["works"][work] = measure(candidates, arguments.rounds)
        show(work, record["works"][work])
    record["streaming_state_bytes"] = streaming_state(peers, logits, labels)
    print(f"\nbytes kept after 100 batches: {record['streaming_state_bytes']}")
    if arguments.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
