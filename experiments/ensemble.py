"""A deep ensemble from runs that are trained already: the mean of the probabilities of several seeds.

    python experiments/ensemble.py cifar10 resnet50 --epochs 30 --seeds 0 1 2 3 --output runs

Needs the run folders that experiments/run.py left in --output (their predictions, no GPU). It costs as many training
runs as it has members, and as many networks when it answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from committed import RESULTS, write_small
from rows import row

from doublehead import Predictions
from doublehead.training.evaluation import final_numbers
from doublehead.training.run_folder import environment

# What may differ between members: the seed, and what rides beside the network without touching it.
FREE = {"seed", "heads", "auto", "guards", "hold_back", "every", "every_of", "augment_of", "record_gradients", "shift",
        "evaluate_every", "predict_train"}  # fmt: skip


def mean_of(members: Sequence[Predictions]) -> Predictions:
    """Predictions whose probabilities are the mean of the members'.

    >>> one, two = Predictions([[0.0, 0.0]], [0]), Predictions.from_probs([[0.9, 0.1]], [0])
    >>> [round(p, 3) for p in mean_of([one, two]).probs[0].tolist()]
    [0.7, 0.3]
    """
    for member in members[1:]:
        if not torch.equal(member.labels, members[0].labels):
            raise ValueError("members must have predicted the same samples in the same order")
    probs = torch.stack([member.probs.double() for member in members]).mean(0)
    return Predictions.from_probs(probs, members[0].labels)


def ensemble(folders: Sequence[Path]) -> dict[str, Any]:
    """The numbers of an ensemble of the networks in these run folders, in the form of a run's results."""
    found = [json.loads((folder / "results.json").read_text()) for folder in folders]
    test, calib = (
        mean_of([Predictions.load(folder / f"predictions/{split}-main.npz") for folder in folders])
        for split in ("test", "calib")
    )
    config = found[0]["config"]
    keys = {key for one in found for key in one["config"] if not key.startswith("calib_")} - FREE
    differ = sorted(key for key in keys if len({str(one["config"].get(key)) for one in found}) > 1)
    if differ:
        raise SystemExit(f"the networks must differ in their seed alone, these differ in {', '.join(differ)}")
    return {
        "kind": f"ensemble-{len(folders)}",
        "config": config,
        "members": [folder.name for folder in folders],
        "environment": environment(torch.device("cpu")),
        "sizes": found[0]["sizes"],
        "train_seconds": None,  # the members' own, which their runs state
        "selection": None,
        "outputs": final_numbers({"main": test}, {"main": calib}),
        "shift": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    members = [
        row(options.data, options.model, options.epochs, seed)["cross-entropy"] for seed in options.seeds
    ]
    results = ensemble([options.output / member.name for member in members])
    name = members[0].name.replace("cross_entropy", results["kind"])
    write_small(results, options.results / name / "results.json")
    numbers = results["outputs"]["main"]
    print(
        f"{name}: accuracy {100 * numbers['before']['accuracy']:.2f}, ECE {100 * numbers['before']['ece']:.2f}"
    )


if __name__ == "__main__":
    main()
