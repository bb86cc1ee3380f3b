"""Train the runs of a row and keep what the tables need (a GPU for images).

    python experiments/run.py cifar10 resnet50 --seeds 0 1 2 --root data
    python experiments/run.py cifar100 --methods brier focal --root data
    python experiments/run.py sst-fine --accelerator cpu --root data

A finished run is not trained again, and a stopped one continues. It is trained in the folder runs.
Arrays and certificate go to experiments/logits and experiments/runs; `make results` makes numbers, tables and figures
from these.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import HERE, Scores, Split, Splits, StoredRun, arguments, store
from torch import Tensor

from doublehead import PAPER, HeadSpec, Predictions
from doublehead.calibration_head import feature_numbers
from doublehead.calibrators.head_stages import class_distances, fit_opinions
from doublehead.data import Images
from doublehead.network import Readings, flip
from doublehead.saving import under
from doublehead.system import require
from doublehead.training.config import BETAS, METHODS, RECIPES, TUNED, Config
from doublehead.training.loop import make_fabric, set_up, train
from doublehead.training.run import Run
from doublehead.training.run_folder import RunFolder

CERTIFIED = ("config", "environment", "sizes", "train_seconds", "train_accuracy")
CURVES = ("accuracy", "ece", "nll", "mean_entropy")  # over the epochs
GRADIENTS = ("mlp-0.6", "mlp-1.5")  # heads of the paper's figure
# --- recipes: each run is a small difference from a recipe of the package
IMAGES = ("cifar10", "cifar100", "svhn")
EPOCHS = {"svhn": 40}  # of images otherwise 80
PERIODS = (20, 30, 40, 50, 70)  # of Table 3; k = 10 is the default
REFERENCE = ("cifar10", "resnet50", 0)  # data, network and seed of the paper's figures
HEADS: dict[str, HeadSpec] = {"double-head": replace(PAPER, beta0=1.0), "annealing-double-head": PAPER}
SHIFTED = ("resnet101", "wide_resnet28_10")  # networks of the paper's Table 2, on CIFAR-10
SHIFTS = ("gaussian_noise:5", "svhn")
PERTURBED = {f"annealing-double-head-{name}": name for name in ("noise", "broad")}  # heads and their g
# Coarser and shorter than the recipe of the package, a seventh of its cost: these runs were made on a CPU.
NEWS: dict[str, Any] = {
    "model_options": {**TUNED, "word_dropout": 0.4, "stride": 5}, "epochs": 20, "max_words": 200,
}  # fmt: skip
# The pretrained transformer is tuned for few epochs. Whole sentences of SST alone: phrases cost ten times as much.
MINILM: dict[str, Any] = {
    "model_options": {}, "optimizer": "adam", "lr": 1e-4, "weight_decay": 0.0, "warmup": 0.1, "batch_size": 32,
    "epochs": 2, "phrases": False, "precision": "bf16-mixed",
}  # fmt: skip
MINILM_NEWS: dict[str, Any] = {**MINILM, "lr": 1.5e-4, "epochs": 5, "max_words": 256}
SLOW = replace(PAPER, lr=0.03)  # steadier in a sweep
FOLDS = 5  # of distances to class means


def recipe(
    data: str,
    model: str | None = None,
    seed: int = 0,
    method: str = "cross-entropy",
    epochs: int | None = None,
) -> Config:
    """The run of a data set, network, seed and training loss; heads are trained beside cross entropy alone."""
    base = replace(RECIPES[data], seed=seed)
    base = replace(base, model=model or base.model, epochs=epochs or EPOCHS.get(data, base.epochs))
    if data.startswith("20newsgroups"):
        base = replace(base, **NEWS)
    if model == "minilm":
        base = replace(base, **(MINILM_NEWS if data.startswith("20newsgroups") else MINILM))
    if data in IMAGES:
        base = replace(base, precision="bf16-mixed", compile=True)
    shifted = data == "cifar10" and model in SHIFTED
    if shifted:
        base = replace(base, shift=SHIFTS)
    if method != "cross-entropy":
        return replace(METHODS[method].apply(base), evaluate_every=base.epochs)
    if shifted:
        heads = HEADS | dict.fromkeys(PERTURBED, PAPER)
        return replace(base, heads=heads, augment_of=PERTURBED, auto=True, evaluate_every=base.epochs)
    if (base.data, base.model, base.seed) != REFERENCE:
        return replace(base, heads=HEADS, auto=True, evaluate_every=base.epochs)
    sweep = {f"mlp-{beta0:g}": replace(SLOW, beta0=beta0) for beta0 in BETAS}
    every_of = {f"annealing-double-head-k{k}": k for k in PERIODS}
    heads = HEADS | sweep | dict.fromkeys(every_of, PAPER)
    return replace(base, heads=heads, every_of=every_of, auto=True, record_gradients=True, evaluate_every=1)


# --- what is kept of a finished run


def reopened(folder: RunFolder, root: str | None, accelerator: str = "auto") -> Run:
    """A finished run with its weights, to predict with."""
    fabric = make_fabric(folder.config, accelerator=accelerator, devices=1)
    run = set_up(folder.config, fabric, None, root)
    weights = require("safetensors.torch", extra="train").load_file(folder.path / "model.safetensors")
    run.net.load_state_dict(under(weights, "model."))
    for group in run.config.head_groups():
        run.companions[group].bank.load_state_dict(under(weights, f"{group}."))
    if "auto" in run.companions:  # the five heads of the second opinion are one stack
        run.companions["auto"].bank.stacks[0].load_state_dict(under(weights, "auto.opinion."))
    return run


@torch.no_grad()
def splits_of(run: Run) -> Splits:
    """Everything to store of the calibration and the test split: of other losses the logits alone."""
    calib, test = (_readings(run, split) for split in ("calib", "test"))
    parts = [Split(one.labels, one.logits) for one in (calib, test)]
    if run.config.loss != "cross_entropy":
        return Splits(*parts)
    if calib.features.shape[1]:
        spaces = distances(calib.features, calib.labels, test.features, run.reader.n_classes)
        for i, (one, (sphere, projected)) in enumerate(zip((calib, test), spaces)):
            numbers = feature_numbers(one.features)
            parts[i] = parts[i]._replace(sphere=sphere, projected=projected, numbers=numbers)
    if "auto" in run.companions:
        double = run.companions["auto"]
        double.bank.cpu()
        opinions = double.opinion(calib), double.answer(test.logits, test.features)
        parts = [part._replace(opinion=opinion) for part, opinion in zip(parts, opinions)]
    images = isinstance(run.inputs.splits.train, Images)
    if images and run.config.data != "svhn":  # digits have no mirror view
        mirrored = [_readings(run, split, mirror=True).logits for split in ("calib", "test")]
        parts = [part._replace(flip=logits) for part, logits in zip(parts, mirrored)]
    return Splits(*parts)


def _readings(run: Run, split: str, mirror: bool = False) -> Readings:
    batches: Any = run.inputs.whole(getattr(run.inputs.splits, split))
    with run.fabric.autocast():
        found = run.reader.read(((flip(x), y) for x, y in batches) if mirror else batches)
    return Readings(*(None if part is None else part.cpu() for part in found))  # type: ignore[arg-type]


def distances(
    calib: Tensor, labels: Tensor, test: Tensor, n_classes: int
) -> tuple[list[Tensor], list[Tensor]]:
    """`class_distances` of calibration features (N, F), each to means that it is no part of, and of test features."""
    folds = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) % FOLDS
    means, made = fit_opinions(calib, labels, folds, n_classes, None, seed=0)
    return made, class_distances(test, means)


def certificate_of(folder: RunFolder) -> dict[str, Any]:
    """What is known of a run besides its logits: how it was made, and what figures need of its epochs."""
    found = {key: folder.results[key] for key in CERTIFIED}
    found["environment"] = {key: value for key, value in found["environment"].items() if key != "command"}
    tested = [line for line in folder.lines() if "test" in line]
    found["epochs"] = {"epoch": [line["epoch"] + 1 for line in tested]}
    for output in ("main", *(name for name in HEADS if name in folder.config.heads)):
        numbers = [line["test"][output] for line in tested]
        found["epochs"][output] = {key: [round(one[key], 5) for one in numbers] for key in CURVES}
    found["entropy"] = {name: tested[-1]["test"][name]["mean_entropy"] for name in folder.config.heads}
    found["shift"] = {
        shift: {output: numbers["auroc"] for output, numbers in outputs.items()}
        for shift, outputs in folder.results["shift"].items()
    }
    if folder.config.record_gradients:
        with np.load(folder.path / "gradients.npz") as file:
            norms = dict(zip(file["heads"].tolist(), file["norms"].round(4).transpose(2, 0, 1)))
        found["gradients"] = {
            name: norms[name].tolist() for name in GRADIENTS if name in norms
        }  # (epochs, 6)
    return found


def keep(folder: RunFolder, root: str | None, accelerator: str, to: Path = HERE) -> StoredRun:
    """Store a finished run."""
    saved = {name: folder.path / f"predictions/test-{name}.npz" for name in folder.config.heads}
    heads = {name: Scores.of(Predictions.load(file)) for name, file in saved.items()}
    run = StoredRun(folder.config.name, to)
    store(run, splits_of(reopened(folder, root, accelerator)), heads, certificate_of(folder))
    return run


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("data")
    parser.add_argument("model", nargs="?", help="the recipe's unless given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=["cross-entropy"], help="training losses")
    parser.add_argument("--epochs", type=int, help="the recipe's unless given")
    parser.add_argument("--root", help="the folder of data sets")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; no run starts later")
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    began, chosen = time.perf_counter(), product(options.seeds, options.methods)
    for config in [recipe(options.data, options.model, seed, name, options.epochs) for seed, name in chosen]:
        if time.perf_counter() - began > options.budget:
            print(f"out of time before {config.name}", flush=True)
            break
        folder, where = RunFolder(Path("runs") / config.folder_name), options.accelerator
        train(config, folder, root=options.root, accelerator=where, checkpoint_seconds=120, report=print)
        size = keep(folder, options.root, where).file.stat().st_size / 1e6
        print(f"{config.name}: {folder.results['train_seconds']:.0f} s, {size:.2f} MB", flush=True)
