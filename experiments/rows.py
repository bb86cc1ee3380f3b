"""The rows of the paper's tables: which runs fill them. Each is a small difference from a recipe."""

from __future__ import annotations

from dataclasses import replace

from doublehead.head_bank import HeadSpec
from doublehead.training.config import RECIPES, Config
from doublehead.training.methods import METHODS, PAPER, SAMPLE

BETAS = (0.1, 0.6, 0.8, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)
STATISTICS = HeadSpec(kind="temperature", reads="statistics", hidden=16, lr=0.3)
BOTH = HeadSpec(kind="temperature", reads=("statistics", "features"), hidden=32, lr=0.1)

# Every head below rides on the one cross-entropy run of its row.
HEADS: dict[str, HeadSpec] = {
    "double-head": PAPER,
    "annealing-double-head": replace(PAPER, beta0=1.2),
    **{f"mlp-{b:g}": replace(PAPER, beta0=b, lr=0.3) for b in BETAS},
    **{f"temperature-{b:g}": replace(SAMPLE, beta0=b) for b in (1.0, 1.1, 1.2, 1.35)},
    **{f"statistics-{b:g}": replace(STATISTICS, beta0=b) for b in (1.0, 1.1, 1.2)},
    **{f"both-{b:g}": replace(BOTH, beta0=b) for b in (1.0, 1.1, 1.2)},
}
# ... and these with half of each calibration batch perturbed: the answer to distribution shift.
PERTURBED: dict[str, HeadSpec] = {
    "mlp@noise+broad-1.2": replace(PAPER, beta0=1.2, lr=0.3),
    **{f"temperature@noise+broad-{b:g}": replace(SAMPLE, beta0=b) for b in (1.0, 1.1)},
    **{f"temperature-fast@noise+broad-{b:g}": replace(SAMPLE, beta0=b, lr=0.3) for b in (1.0, 1.1)},
    **{f"both@noise+broad-{b:g}": replace(BOTH, beta0=b) for b in (1.0, 1.1)},
}
BASELINES = ("mmce", "brier", "focal")


def image_row(data: str, model: str, epochs: int, seed: int) -> dict[str, Config]:
    """The runs of one image row: cross entropy with all heads, and each baseline; all for the same epochs."""
    base = replace(
        RECIPES[data],
        model=model,
        epochs=epochs,
        seed=seed,
        precision="bf16-mixed",
        compile=True,
        schedule="cosine",
    )
    perturbed = dict(PERTURBED) if data.startswith("cifar") else {}
    cross_entropy = replace(
        base,
        heads={**HEADS, **perturbed},
        augment_of={name: name.split("@")[1].rsplit("-", 1)[0] for name in perturbed},
        auto=True,
        record_gradients=True,
        shift=("cifar10c", "svhn") if data == "cifar10" else ("cifar10c",),
    )
    shift = ("gaussian_noise:5", "svhn") if data == "cifar10" else ("gaussian_noise:5",)
    return {
        "cross-entropy": cross_entropy,
        **{name: replace(METHODS[name].apply(base), shift=shift) for name in BASELINES},
    }


def text_row(data: str, seed: int, epochs: int = 50) -> dict[str, Config]:
    """The runs of one text row."""
    base = replace(RECIPES[data], epochs=epochs, seed=seed)
    return {
        "cross-entropy": replace(base, heads=HEADS, auto=True),
        **{name: METHODS[name].apply(base) for name in BASELINES},
    }
