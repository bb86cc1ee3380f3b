"""A trained ImageNet ResNet-50, frozen: raw, temperature scaling, and the head of `fit_head`, over several splits.

Run: python experiments/imagenet_frozen.py path/to/resnet50_val5k.npz [n_splits]
The file holds `features`, `logits` and `labels` of 5,000 validation images, five a class. Each split takes two or three
images of each class to calibrate and tests on the others: 2,500 each. Writes experiments/results/imagenet_frozen.json.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from doublehead.integrations.fit_head import fit_head_on

from doublehead import Predictions, Readings, Summary, __version__, calibrators

HERE = Path(__file__).parent
SHOWN = ("accuracy", "ece", "ece_floor", "nll", "brier")


def split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to calibrate on and rows to test on: half of the classes give two images to the first, half give three."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")].reshape(-1, 5)  # (1000, 5), each class shuffled
    three = draw.permutation(len(order)) % 2 == 0
    calib = np.concatenate([order[:, :2].ravel(), order[three, 2]])
    test = np.concatenate([order[:, 3:].ravel(), order[~three, 2]])
    return calib, test


def one_split(
    features: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, seed: int
) -> dict[str, object]:
    calib, test = split(labels.numpy(), seed)
    val, rest = Predictions(logits[calib], labels[calib]), Predictions(logits[test], labels[test])
    temperature = calibrators.Temperature().fit(val)
    started = time.perf_counter()
    head = fit_head_on(Readings(features[calib], val.logits, val.labels))
    seconds = time.perf_counter() - started
    with torch.no_grad():
        calibrated = Predictions(head(features[test], rest.logits), rest.labels)
    rows = {"raw": rest, "temperature": temperature.calibrate(rest), "fit_head": calibrated}
    result: dict[str, object] = {
        name: {key: Summary.of(p).values[key] for key in SHOWN} for name, p in rows.items()
    }
    return {"seed": seed, "seconds": round(seconds, 2), "chosen": str(head.choice), **result}


def main(path: str, n_splits: int = 10) -> None:
    torch.set_num_threads(1)
    data = np.load(path)
    features, logits = (torch.from_numpy(data[name]).float() for name in ("features", "logits"))
    labels = torch.from_numpy(data["labels"]).long()
    splits = [one_split(features, logits, labels, seed) for seed in range(n_splits)]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE
    )
    certificate = {
        "what": "ImageNet ResNet-50, frozen; 2,500 images calibrate, 2,500 test; splits inside each class",
        "commit": commit.stdout.strip(),
        "versions": {
            "doublehead": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": f"{platform.machine()} CPU, 1 thread",
        "splits": splits,
        "mean": {name: mean_of(splits, name) for name in ("raw", "temperature", "fit_head")},
        "splits_where_fit_head_has_lower_nll": sum(
            run["fit_head"]["nll"] < run["temperature"]["nll"]
            for run in splits  # type: ignore[index]
        ),
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/imagenet_frozen.json").write_text(json.dumps(certificate, indent=1) + "\n")
    for name, row in certificate["mean"].items():  # type: ignore[attr-defined]
        print(f"{name:12s}", "  ".join(f"{key} {value:.4f}" for key, value in row.items()))


def mean_of(splits: list[dict[str, object]], name: str) -> dict[str, float]:
    return {key: float(np.mean([run[name][key] for run in splits])) for key in SHOWN}  # type: ignore[index]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
