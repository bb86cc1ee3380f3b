"""The rows of the tables: which runs fill them, each a small difference from a recipe of the package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from doublehead import PAPER, HeadSpec
from doublehead.training.config import RECIPES, TUNED, Config
from doublehead.training.methods import BETAS, METHODS

IMAGES = ("cifar10", "cifar100", "svhn")
LOSSES = ("mmce", "brier", "focal", "flsd-53", "label-smoothing", "mixup")  # besides cross entropy
EPOCHS = {"svhn": 40}  # of images otherwise 80
NETWORKS = ("resnet50", "densenet121", "wide_resnet28_10", "resnet101")
PERIODS = (20, 30, 40, 50, 70)  # of Table 3; k = 10 is the default
REFERENCE = ("cifar10", "resnet50", 0)  # data, network and seed of the paper's figures
HEADS: dict[str, HeadSpec] = {"double-head": replace(PAPER, beta0=1.0), "annealing-double-head": PAPER}
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
SLOW = replace(PAPER, lr=0.03)  # steadier in sweeps and under perturbation
GUARDS = ("shifts", "shifts-noises", "shifts-blurs", "shifts-colours", "shifts-digital")


def recipe(data: str, model: str | None = None, seed: int = 0, method: str = "cross-entropy") -> Config:
    """The run of a data set, network, seed and training loss; heads are trained beside cross entropy alone."""
    base = replace(RECIPES[data], seed=seed)
    base = replace(base, model=model or base.model, epochs=EPOCHS.get(data, base.epochs))
    if data.startswith("20newsgroups"):
        base = replace(base, **NEWS)
    if model == "minilm":
        base = replace(base, **(MINILM_NEWS if data.startswith("20newsgroups") else MINILM))
    if data in IMAGES:
        base = replace(base, precision="bf16-mixed", compile=True)
    if method != "cross-entropy":
        return replace(METHODS[method].apply(base), evaluate_every=base.epochs, shift=few_shifts(data))
    return with_heads(base)


def with_heads(base: Config) -> Config:
    """The cross-entropy run of a row and everything that is trained beside it."""
    full = (base.data, base.model, base.seed) == REFERENCE
    heads, guarded = dict(HEADS), base.data in ("cifar10", "cifar100")
    if full:
        heads |= {f"mlp-{beta0:g}": replace(SLOW, beta0=beta0) for beta0 in BETAS}
        heads |= {f"annealing-double-head-k{k}": PAPER for k in PERIODS}
    if guarded and base.seed == 0:
        heads |= {f"mlp@{name}": SLOW for name in ("noise", "noise+broad")}
    return replace(
        base,
        heads=heads,
        augment_of={name: name.split("@")[1] for name in heads if "@" in name},
        every_of={name: int(name.rpartition("-k")[2]) for name in heads if "-k" in name},
        auto=True,
        guards=GUARDS if guarded else (),
        record_gradients=full,
        evaluate_every=1 if full else base.epochs,
        shift=("cifar10c", *few_shifts(base.data)[1:]) if guarded else few_shifts(base.data),
    )


def few_shifts(data: str) -> tuple[str, ...]:
    """The shifted sets of the paper's Table 2, and unknown classes."""
    return {
        "cifar10": ("gaussian_noise:5", "svhn", "cifar100"),
        "cifar100": ("gaussian_noise:5", "svhn"),
        "svhn": ("gaussian_noise:5",),
    }.get(data, ())
