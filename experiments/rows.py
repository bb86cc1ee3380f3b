"""The rows of the paper's tables: which runs fill them. Each is a small difference from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from doublehead.head_bank import HeadSpec

from doublehead.training.config import RECIPES, Config
from doublehead.training.methods import BETAS, METHODS, PAPER, SAMPLE

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
# ... and these with other calibration periods k, for Table 3; k = 10 is everyone's.
PERIODS = (20, 30, 40, 50, 70)
PERIODIC: dict[str, HeadSpec] = {
    f"{name}-k{k}": HEADS[name] for name in ("annealing-double-head", "temperature-1.2") for k in PERIODS
}

# Guards of the first two rows: the default, and the same with families of corruption left out, to be looked at there.
GUARDS = (
    "shifts", "shifts-1", "shifts-2", "shifts-3", "shifts-noises", "shifts-blurs", "shifts-colours", "shifts-digital",
)  # fmt: skip
MORE_GUARDS = ("noise+broad",)
FEWER = (  # heads of further seeds and other image networks: what the tables compare, without the sweeps
    "double-head", "annealing-double-head", "temperature-1", "temperature-1.2", "statistics-1.1", "both-1.1",
    "both@noise+broad-1",
)  # fmt: skip

BASELINES = ("mmce", "brier", "focal")
RIVALS = ("label-smoothing", "mixup", "flsd-53", "adafocal", "mmce-published")
TEXT = ("20newsgroups", "20newsgroups-bydate", "sst-binary", "sst-fine")
EPOCHS = {"imagenet": 100, **dict.fromkeys(TEXT, 50)}  # 30 for other images


def row(data: str, model: str | None = None, epochs: int | None = None, seed: int = 0) -> dict[str, Config]:
    """All runs of a row by method, all for the same epochs: cross entropy with every head, baselines, rivals."""
    base = replace(RECIPES[data], epochs=epochs or EPOCHS.get(data, 30), seed=seed)
    base = replace(base, model=model or base.model)
    if data not in TEXT:
        base = replace(base, precision="bf16-mixed", compile=True, schedule="cosine")
    losses = [
        name for name in (*BASELINES, *RIVALS) if name != "mixup" or data not in TEXT
    ]  # words do not mix
    return {
        "cross-entropy": with_heads(base),
        **{name: without_heads(METHODS[name].apply(base)) for name in losses},
    }


def with_heads(base: Config) -> Config:
    """The cross-entropy run of a row and everything that rides on it."""
    heads, images = dict(HEADS), base.data in ("cifar10", "cifar100", "svhn")
    shifted = base.data in ("cifar10", "cifar100")
    full = base.seed == 0 and (not images or base.model == "resnet50")  # the run that figures are drawn from
    guards = GUARDS + (MORE_GUARDS if full else ()) if shifted else ()
    if shifted:
        heads |= PERTURBED
    if (base.data, base.model) == ("cifar10", "resnet50"):
        heads |= PERIODIC
    if images and not full:
        heads = {name: heads[name] for name in FEWER if name in heads}
    every = "cifar10c" if base.data in ("cifar10", "cifar100") else "gaussian_noise:5"
    return replace(
        base,
        heads=heads,
        augment_of={name: name.split("@")[1].rpartition("-")[0] for name in heads if "@" in name},
        every_of={name: int(name.rpartition("-k")[2]) for name in heads if name in PERIODIC},
        auto=True,
        guards=guards,
        record_gradients=images and full,
        evaluate_every=1 if full else base.epochs,
        shift=(every, *few_shifts(base.data)[1:]) if images else (),
    )


def without_heads(config: Config) -> Config:
    """A baseline or rival of a row."""
    evaluate_every = 1 if config.seed == 0 else config.epochs
    return replace(config, shift=few_shifts(config.data), evaluate_every=evaluate_every)


def few_shifts(data: str) -> tuple[str, ...]:
    """The shifted sets of the paper's Table 2."""
    return {
        "cifar10": ("gaussian_noise:5", "svhn"),
        "cifar100": ("gaussian_noise:5",),
        "svhn": ("gaussian_noise:5",),
    }.get(data, ())


def methods_of(asked: Sequence[str]) -> list[str]:
    """Names of methods, with "baselines", "rivals" and "all" spelled out; the paper's four where nothing is asked.

    >>> methods_of(["cross-entropy", "baselines"])
    ['cross-entropy', 'mmce', 'brier', 'focal']
    """
    groups = {"baselines": BASELINES, "rivals": RIVALS, "all": ("cross-entropy", *BASELINES, *RIVALS)}
    spelled = [name for one in asked or ("cross-entropy", "baselines") for name in groups.get(one, (one,))]
    unknown = sorted(set(spelled) - set(groups["all"]))
    if unknown:
        raise ValueError(
            f"methods must be among {', '.join((*groups['all'], *groups))}, got {', '.join(unknown)}"
        )
    return list(dict.fromkeys(spelled))
