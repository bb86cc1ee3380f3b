"""Train a committed run again, or a run that differs from it, and keep what the tables need (a GPU for images).

    python experiments/run.py cifar10-resnet50-cross_entropy-e80-s1 --seeds 3 4 --root data
    python experiments/run.py cifar10-resnet50-focal-e80-s0 --change '{"model": "densenet121"}' --root data

The settings are those of the certificate experiments/runs/NAME.json. The run is trained in the folder runs; a finished
run is not trained again, and a stopped one continues. Arrays and certificate go to experiments/logits and
experiments/runs; `make results` makes numbers, tables and figures from these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import HERE, Scores, Split, Splits, StoredRun, arguments, store
from torch import Tensor

from doublehead import Predictions
from doublehead.calibration_head import feature_numbers
from doublehead.calibrators.head_stages import class_distances, fit_opinions
from doublehead.data import Images
from doublehead.network import Readings, flip
from doublehead.saving import under
from doublehead.system import require
from doublehead.training.config import Config
from doublehead.training.loop import make_fabric, set_up, train
from doublehead.training.run import Run
from doublehead.training.run_folder import RunFolder

CERTIFIED = ("config", "environment", "sizes", "train_seconds", "train_accuracy")
CURVES = ("accuracy", "ece", "nll", "mean_entropy")  # over the epochs, of the network and these heads
HEADS = ("double-head", "annealing-double-head")
GRADIENTS = ("mlp-0.6", "mlp-1.5")  # heads of the paper's figure
FOLDS = 5  # of distances to class means


def config_like(name: str, change: Mapping[str, Any]) -> Config:
    """The settings of a committed run, with changes."""
    settings = StoredRun(name).certificate["config"] | {"predict_train": True} | change
    return Config.from_json(json.dumps(settings))


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
    calib, test = both = [_readings(run, split) for split in Splits._fields]
    parts = [Split(one.labels, one.logits) for one in both]
    if run.config.loss != "cross_entropy":
        return Splits(*parts)
    if calib.features.shape[1]:
        spaces = distances(calib.features, calib.labels, test.features, run.reader.n_classes)
        for i, (one, (sphere, projected)) in enumerate(zip(both, spaces)):
            numbers = feature_numbers(one.features)
            parts[i] = parts[i]._replace(sphere=sphere, projected=projected, numbers=numbers)
    if "auto" in run.companions:
        double = run.companions["auto"]
        double.bank.cpu()
        opinions = double.opinion(calib), double.answer(test.logits, test.features)
        parts = [part._replace(opinion=opinion) for part, opinion in zip(parts, opinions)]
    if isinstance(run.inputs.splits.train, Images) and run.config.data != "svhn":  # not of digits
        mirrored = [_readings(run, split, mirror=True).logits for split in Splits._fields]
        parts = [part._replace(flip=logits) for part, logits in zip(parts, mirrored)]
    return Splits(*parts)


def _readings(run: Run, split: str, mirror: bool = False) -> Readings:
    batches: Any = run.inputs.whole(getattr(run.inputs.splits, split))
    with run.fabric.autocast():
        found = run.reader.read(((flip(x), y) for x, y in batches) if mirror else batches)
    return Readings(*(None if part is None else part.cpu() for part in found))  # type: ignore[arg-type]


def distances(calib: Tensor, labels: Tensor, test: Tensor, n_classes: int) -> tuple[list[Tensor], ...]:
    """`class_distances` of calibration features (N, F), each to means that it is no part of, and of test features."""
    folds = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) % FOLDS
    means, made = fit_opinions(calib, labels, folds, n_classes, None, seed=0)
    return made, class_distances(test, means)


def certificate_of(folder: RunFolder) -> dict[str, Any]:
    """What is known of a run besides its logits: how it was made, and what figures need of its epochs."""
    results, heads = folder.results, folder.config.heads
    found = {key: results[key] for key in CERTIFIED}
    found["environment"].pop("command")
    tested = [line for line in folder.lines() if "test" in line]
    found["epochs"] = {"epoch": [line["epoch"] + 1 for line in tested]}
    for output in ("main", *(name for name in HEADS if name in heads)):
        numbers = [line["test"][output] for line in tested]
        found["epochs"][output] = {key: [round(one[key], 5) for one in numbers] for key in CURVES}
    found["entropy"] = {name: tested[-1]["test"][name]["mean_entropy"] for name in heads}
    found["shift"] = {}
    for shift, outputs in results["shift"].items():
        found["shift"][shift] = {output: numbers["auroc"] for output, numbers in outputs.items()}
    if folder.config.record_gradients:
        with np.load(folder.path / "gradients.npz") as file:
            norms = zip(file["heads"].tolist(), file["norms"].round(4).transpose(2, 0, 1))  # (epochs, 6) each
        found["gradients"] = {name: rows.tolist() for name, rows in norms if name in GRADIENTS}
    return found


def keep(folder: RunFolder, root: str | None, accelerator: str, to: Path = HERE) -> StoredRun:
    """Store a finished run."""
    run, saved = StoredRun(folder.config.name, to), folder.path / "predictions"
    heads = {name: Scores.of(Predictions.load(saved / f"test-{name}.npz")) for name in folder.config.heads}
    store(run, splits_of(reopened(folder, root, accelerator)), heads, certificate_of(folder))
    return run


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("name", help="the committed run whose settings are used")
    parser.add_argument("--change", type=json.loads, default={}, help="settings that differ, as JSON")
    parser.add_argument("--seeds", type=int, nargs="+", help="that run's unless given")
    parser.add_argument("--root", help="the folder of data sets")
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    for seed in options.seeds or [StoredRun(options.name).config.seed]:
        config, where = config_like(options.name, options.change | {"seed": seed}), options.accelerator
        folder = RunFolder(Path("runs") / config.folder_name)
        train(config, folder, root=options.root, accelerator=where, checkpoint_seconds=120, report=print)
        size = keep(folder, options.root, where).file.stat().st_size / 1e6
        print(f"{config.name}: {folder.results['train_seconds']:.0f} s, {size:.2f} MB", flush=True)
