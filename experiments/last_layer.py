"""Last-layer retraining: freeze a trained network, give it a fresh head and train that on the training data again.

    python experiments/last_layer.py cifar10 resnet50 --epochs 30 --seeds 0 --root data --output runs

The two-stage training (TST) of Jordahn and Olmos, "Decoupling Feature Extraction and Classification Layers for
Calibrated Neural Networks" (ICML 2024): 40 further epochs of a head with one hidden layer, here with Adam at 1e-4 and
half as many units as features. Unlike a calibration head it learns from the data that the network has learned from.
Needs the run folders that experiments/run.py left in --output; `run.py --bare` trains them with nothing beside.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from committed import RESULTS, write_small
from doublehead.plumbing import unpack
from rows import row
from torch import nn

from doublehead import Alternation, Annealing, DoubleHead, Predictions
from doublehead.models import build
from doublehead.optional import require
from doublehead.training.evaluation import final_numbers
from doublehead.training.inputs import Inputs, load_inputs
from doublehead.training.run_folder import RunFolder, environment

EPOCHS, LR = 40, 1e-4


def retrain(
    folder: RunFolder, device: torch.device, root: str | None, epochs: int = EPOCHS
) -> dict[str, Any]:
    """The numbers of a finished run's network with its last layer trained anew, in the form of a run's results."""
    config = folder.config
    inputs = load_inputs(config, device, None, root)
    model = frozen(folder, inputs, device)
    # A head that learns from training batches after every one of them, without annealing: the same mechanism.
    adam = torch.optim.Adam
    second = Alternation(
        model, inputs.train, every=1, annealing=Annealing(1.0), lr=LR, optimizer=adam, clip=math.inf
    )
    began = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16-mixed"):
        for _ in range(epochs * len(inputs.train)):
            second.step(1.0)
        predictions = {split: predict(model, inputs, split) for split in ("test", "calib")}
    return {
        "kind": "last-layer",
        "config": folder.results["config"],
        "members": [folder.path.name],
        "settings": {"epochs": epochs, "lr": LR, "optimizer": "adam", "hidden": model.head.hidden},
        "environment": environment(device),
        "sizes": list(inputs.splits.sizes),
        "train_seconds": round(time.perf_counter() - began, 2),
        "selection": None,
        "outputs": final_numbers({"main": predictions["test"]}, {"main": predictions["calib"]}),
        "shift": {},
    }


def frozen(folder: RunFolder, inputs: Inputs, device: torch.device) -> DoubleHead:
    """The trained network of a run with a fresh head beside it."""
    net = trained(folder, inputs, device).requires_grad_(False)
    return DoubleHead(net, inputs.n_classes, kind="mlp", seed=folder.config.seed)


def trained(folder: RunFolder, inputs: Inputs, device: torch.device) -> nn.Module:
    """The network of a finished run."""
    net = build(folder.config.model, inputs.n_classes, **inputs.model_options)
    weights = require("safetensors.torch", extra="train").load_file(folder.path / "model.safetensors")
    net.load_state_dict({k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")})
    return net.to(device).to(memory_format=inputs.memory_format).eval()


@torch.no_grad()
def predict(model: DoubleHead, inputs: Inputs, split: str) -> Predictions:
    """The new head's predictions on a split."""
    rows = []
    for batch in inputs.make_eval(getattr(inputs.splits, split)):
        args, kwargs, labels = unpack(batch, next(model.parameters()).device)
        rows.append((model.eval()(*args, **kwargs).float(), labels))
    logits, labels = (torch.cat(part) for part in zip(*rows))
    return Predictions(logits, labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--epochs", type=int, help="of the run, not of the retraining")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--root")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for seed in options.seeds:
        config = row(options.data, options.model, options.epochs, seed)["cross-entropy"]
        results = retrain(RunFolder(options.output / config.name), device, options.root)
        name = config.name.replace("cross_entropy", "last_layer")
        write_small(results, options.results / name / "results.json")
        numbers = results["outputs"]["main"]["before"]
        print(f"{name}: accuracy {100 * numbers['accuracy']:.2f}, ECE {100 * numbers['ece']:.2f}", flush=True)


if __name__ == "__main__":
    main()
