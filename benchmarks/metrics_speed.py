"""Time the metrics beside the peers under several settings: instruction sets, threads, types of the input.

    python benchmarks/metrics_speed.py                      # all settings, about half an hour
    python benchmarks/metrics_speed.py --save               # and writes results/metrics_speed_<maker of the CPU>.json
    python benchmarks/metrics_speed.py --sets native --threads 1 --types float32 --slow

Each setting runs in a process of its own. In it every candidate starts from the same tensor of logits or
probabilities and ends with a number; checks of the input are part of the time. Candidates take turns, round after
round. Both times of a candidate, CPU seconds of the process (all threads) and wall seconds, are those of its fastest
round. A candidate that takes over a second runs in three rounds.

The table at the end holds, for each peer, the lowest ratio of any setting. On a machine that does other work as well,
wall times are too long where two threads wait for each other: read the CPU times there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.predictions import Predictions
from doublehead.score_arrays import in_threads

Candidate = Callable[[], Any]
INSTRUCTION_SETS = {  # the environment that holds torch to a set of instructions
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "native": {},
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
PACKAGES = {  # what is imported -> what is installed
    "torchmetrics": "torchmetrics",
    "sklearn": "scikit-learn",
    "netcal": "netcal",
    "probmetrics": "probmetrics",
    "torch_uncertainty": "torch-uncertainty",
    "pycalib": "pycalib",
    "calibration": "uncertainty-calibration",
}
READ_ONCE = "reading the array once"
SLOW = {"torch_uncertainty class by class", "calibration", "netcal class by class"}  # in class-wise ECE


def make_logits(rows: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits like those of an ImageNet network: confidences over all of 0..1, three in four right."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator) * 2
    favourite = torch.randint(classes, (rows,), generator=generator)
    logits[torch.arange(rows), favourite] += 2 + 14 * torch.rand(rows, generator=generator)
    other = torch.randint(classes, (rows,), generator=generator)
    labels = torch.where(torch.rand(rows, generator=generator) < 0.75, logits.argmax(1), other)
    return logits, labels


def sklearn_ece(confidence: np.ndarray, correct: np.ndarray, strategy: str) -> float:
    """ECE from scikit-learn's reliability curve, the counts taken with numpy (it has no ECE of its own)."""
    curve = import_module("sklearn.calibration").calibration_curve
    share, mean = curve(correct, confidence, n_bins=15, strategy=strategy)
    edges = np.linspace(0, 1, 16)
    edges = edges if strategy == "uniform" else np.percentile(confidence, 100 * edges)
    counts = np.histogram(confidence, edges)[0]
    return float((np.abs(share - mean) * counts[counts > 0]).sum() / len(correct))


def read_once(scores: torch.Tensor) -> float:
    """Add up the array as float64, whatever its type: nothing that looks at every entry takes less time."""
    array = scores.view(torch.float64).numpy()
    return sum(in_threads(lambda rows: float(np.einsum("nk->", array[rows])), scores.shape, scores.device))


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
        found[READ_ONCE] = lambda: read_once(scores)
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
        how = {"num_bins": 15, "num_classes": k}
        found["torch_uncertainty"] = lambda: tu("multiclass", **how)(probs(scores), labels)
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

    ours = lambda: metrics.ece(Predictions.from_probs(probs, labels), components="all")  # noqa: E731
    found: dict[str, Candidate] = {"doublehead": lambda: ours() / probs.shape[1]}
    if "torchmetrics" in peers:
        error = import_module("torchmetrics.functional.classification").binary_calibration_error
        found["torchmetrics"] = lambda: error(probs.flatten(), flat_labels(), n_bins=15)
    if "sklearn" in peers:
        found["sklearn"] = lambda: sklearn_ece(probs.flatten().numpy(), flat_labels().numpy(), "uniform")
    return found


def adaptive(peers: dict[str, Any], probs: torch.Tensor, labels: torch.Tensor) -> dict[str, Candidate]:
    k = probs.shape[1]
    ours = lambda: metrics.adaptive_ece(Predictions.from_probs(probs, labels))  # noqa: E731
    found: dict[str, Candidate] = {"doublehead": ours}
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
    """`records.take_turns`, and the ratios to our own times."""
    results = records.take_turns(candidates, rounds, slow=1)
    ours = results["doublehead"]
    for row in results.values():
        if "error" not in row:
            row["value"] = float(row["value"])
            row["cpu_ratio"], row["wall_ratio"] = row["cpu"] / ours["cpu"], row["wall"] / ours["wall"]
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
        kept["torchmetrics"] = sum(t.nbytes for t in metric.confidences + metric.accuracies)
    return kept


def show(work: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{work}")
    for name, row in results.items():
        if "error" in row:
            print(f"  {name:34s} failed: {row['error'][:90]}")
            continue
        off = abs(row["value"] - results["doublehead"]["value"])
        print(
            f"  {name:34s} CPU {1e3 * row['cpu']:8.1f} ms x{row['cpu_ratio']:6.2f}   "
            f"wall {1e3 * row['wall']:8.1f} ms x{row['wall_ratio']:6.2f}   {row['value']:.6f} (off by {off:.1e})",
            flush=True,
        )


def run_setting(arguments: argparse.Namespace) -> dict[str, Any]:
    """All works under the setting that the parent process put into the environment."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads[0])
    wanted = {m: name for m, name in PACKAGES.items() if not arguments.peers or name in arguments.peers}
    found = records.installed(wanted)
    peers = {module: found[name] for module, name in wanted.items() if name in found}
    logits, labels = make_logits(arguments.rows, arguments.classes)
    dtype = getattr(torch, arguments.types[0])
    logits, probs = logits.to(dtype), logits.softmax(1).to(dtype)
    works = {
        "top-label ECE from logits": top_from_logits(peers, logits, labels),
        "top-label ECE from probabilities": top_from_probs(peers, probs, labels),
        "adaptive (equal-mass) ECE from probabilities": adaptive(peers, probs, labels),
        "class-wise ECE from probabilities": classwise(peers, probs, labels),
        "all-component ECE from probabilities": pooled(peers, probs, labels),
    }
    measured = {}
    for work, candidates in works.items():
        skip = SLOW if work.startswith("class-wise") and not arguments.slow else set()
        wanted = {name: candidate for name, candidate in candidates.items() if name not in skip}
        measured[work] = measure(wanted, arguments.rounds)
        show(work, measured[work])
    return {
        "set": arguments.sets[0],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": arguments.threads[0],
        "type": arguments.types[0],
        "works": measured,
        "about": records.about(found, f"{os.cpu_count()} cores"),
        "streaming_state_bytes": streaming_state(peers, logits, labels),
    }


def run_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each setting in a process of its own."""
    for set_, threads, type_ in product(arguments.sets, arguments.threads, arguments.types):
        print(f"\n== instructions {set_}, threads {threads}, {type_}", flush=True)
        one = vars(arguments) | {"sets": [set_], "threads": [threads], "types": [type_]}
        environment = os.environ | INSTRUCTION_SETS[set_] | dict.fromkeys(THREAD_VARIABLES, str(threads))
        command = [sys.executable, __file__, "--inner", json.dumps(one)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        shown, _, result = done.stdout.rpartition("\n#")
        print(shown, flush=True)
        yield json.loads(result)


def lowest(settings: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """For each work and peer the lowest ratio of any setting, by CPU and by wall time, and where that was."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for setting in settings:
        where = f"{setting['set']}, {setting['threads']} thread(s), {setting['type']}"
        for work, rows in setting["works"].items():
            for name, row in rows.items():
                entry = found.setdefault(work, {}).setdefault(name, {})
                for kind in ("cpu", "wall"):
                    ratio = row.get(f"{kind}_ratio", float("inf"))
                    if ratio < entry.get(f"{kind}_ratio", float("inf")):
                        entry.update({f"{kind}_ratio": ratio, f"{kind}_setting": where})
    return {work: {n: e for n, e in rows.items() if e and n != "doublehead"} for work, rows in found.items()}


def commit() -> str:
    """The commit of the working tree, marked where there are changes beside it; empty outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sets", nargs="+", choices=INSTRUCTION_SETS, default=list(INSTRUCTION_SETS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--types", nargs="+", default=["float32", "float64", "float16"])
    parser.add_argument("--peers", nargs="*", default=[], help="the packages to run, all if none is named")
    parser.add_argument("--slow", action="store_true", help="also run peers that take over five seconds each")
    parser.add_argument("--inner", help=argparse.SUPPRESS)  # the arguments of one setting as JSON
    arguments = parser.parse_args()
    if arguments.inner:
        setting = argparse.Namespace(**json.loads(arguments.inner))
        print(f"\n#{json.dumps(run_setting(setting))}")
        return
    measured_at, settings = commit(), []
    for setting in run_all(arguments):
        settings.append(setting)
        if arguments.save:  # a run that is stopped leaves what it has measured
            write(arguments, settings, measured_at)
    print("\nlowest ratio of any setting")
    for work, rows in lowest(settings).items():
        for name, row in rows.items():
            print(
                f"  {work:46s}{name:24s} CPU x{row['cpu_ratio']:7.2f} ({row['cpu_setting']})   "
                f"wall x{row['wall_ratio']:7.2f} ({row['wall_setting']})"
            )


def write(arguments: argparse.Namespace, settings: list[dict[str, Any]], measured_at: str) -> None:
    loads = [{**setting, "load": setting["about"]["load"]} for setting in settings]
    record = {
        **{key: value for key, value in settings[-1]["about"].items() if key != "load"},
        "commit": measured_at,
        "rows": arguments.rows,
        "classes": arguments.classes,
        "rounds": arguments.rounds,
        "seconds": "cpu: of all threads of the process; wall: passed; each the fastest round",
        "note": "compare within a setting, not between them: `load` is the machine's at each",
        "lowest": lowest(settings),
        "settings": [{k: v for k, v in setting.items() if k != "about"} for setting in loads],
    }
    maker = re.match(r"\w+", record["device"])[0].lower()  # amd, intel
    records.save(f"metrics_speed_{maker}", record)


if __name__ == "__main__":
    main()
