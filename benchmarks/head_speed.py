"""Fit the staged head beside temperature scaling and the structured matrix scaling of probmetrics.

    python benchmarks/head_speed.py            # one thread; CPU seconds
    python benchmarks/head_speed.py --save     # also writes benchmarks/results/head_speed.json

The logits of 10 and 100 classes are those of stored networks, the others are drawn. All candidates, folds and checks of
the input are part of the head's time. Fits take turns and the fastest round of each counts. `nll` is on the data that
was fitted to, so it compares solvers, not methods.
"""

from __future__ import annotations

import records  # isort: skip
import warnings
from importlib import import_module
from typing import Any

import torch

from doublehead import metrics
from doublehead.calibrators import Head, Temperature
from doublehead.predictions import Predictions


def drawn(n: int, k: int) -> Predictions:
    """Overconfident logits, right in about three of four cases, with errors that differ by class."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(n, k, generator=generator)
    favourite = torch.randint(k, (n,), generator=generator)
    logits[torch.arange(n), favourite] += 8 + 12 * torch.rand(n, generator=generator)
    slopes = 0.7 + 0.1 * torch.rand(k, generator=generator)
    truth = logits * slopes + 0.3 * torch.randn(k, generator=generator)
    return Predictions(logits, torch.multinomial(truth.softmax(1), 1, generator=generator)[:, 0])


def works() -> dict[str, tuple[Predictions, float]]:
    """Predictions, and how many CPU seconds the head may take."""
    runs = (records.stored_run(f"{data}-resnet50-cross_entropy-e80-s0") for data in ("cifar10", "cifar100"))
    few, many = (run.calib.predictions for run in runs)
    return {
        "5,000 x 10": (few, 1.0),
        "5,000 x 100": (many, 2.0),
        "25,000 x 1,000": (drawn(25_000, 1000), 20.0),
    }


def structured_matrix(p: Predictions) -> Predictions:
    """`sms` of probmetrics."""
    distributions = import_module("probmetrics.distributions")
    peer = import_module("probmetrics.calibrators").get_calibrator("sms")
    logits = distributions.CategoricalLogits(p.logits)
    peer.fit_torch(logits, p.labels)
    return Predictions(peer.predict_proba_torch(logits).get_logits().float(), p.labels)


def measure(p: Predictions, rounds: int) -> dict[str, dict[str, Any]]:
    fits = {
        "temperature": lambda: Temperature().fit(p).calibrate(p),
        "staged head": lambda: Head().fit(p).calibrate(p),
        "probmetrics sms": lambda: structured_matrix(p),
    }
    return {
        name: {"error": row["error"]}
        if "error" in row
        else {"seconds": round(row["cpu"], 3), "nll": round(float(metrics.nll(row["value"])), 5)}
        for name, row in records.take_turns(fits, rounds).items()
    }


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record: dict[str, Any] = {**records.about(["probmetrics"]), "rounds": options.rounds, "works": {}}
    for name, (p, goal) in works().items():
        found = measure(p, options.rounds)
        record["works"][name] = {"goal": goal, "results": found}
        for method, row in found.items():
            print(f"{name:16s}{method:18s}{row}", flush=True)
    if options.save:
        records.save("head_speed", record)


if __name__ == "__main__":
    main()
