"""The methods under study: each is a loss for the network, heads that ride along, or both."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from doublehead.head_bank import HeadSpec
from doublehead.losses import LOSSES, mixed, mixup
from doublehead.training.config import ADAPTIVE, Config

PAPER = HeadSpec(kind="mlp", reads="features")
SAMPLE = HeadSpec(kind="temperature", reads="features", lr=0.1)
BETAS = (0.1, 0.6, 0.8, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)  # of a sweep over beta0


@dataclass(frozen=True)
class Method:
    """What to train and which of its outputs answers: "main", the name of a head, "auto" or "guarded"."""

    title: str
    loss: str = "cross_entropy"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    mixup: float = 0.0
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)
    auto: bool = False
    guards: tuple[str, ...] = ()
    answers: str = "main"

    def apply(self, config: Config) -> Config:
        """The config with this method in it; heads and guards that are there already stay."""
        return replace(
            config,
            loss=self.loss,
            loss_options=dict(self.loss_options),
            mixup=self.mixup,
            heads={**config.heads, **self.heads},
            auto=config.auto or self.auto,
            guards=tuple(dict.fromkeys((*config.guards, *self.guards))),
        )


def _head(title: str, name: str, spec: HeadSpec) -> Method:
    return Method(title, heads={name: spec}, answers=name)


METHODS: dict[str, Method] = {
    "cross-entropy": Method("Cross entropy"),
    "label-smoothing": Method("Label smoothing", "label_smoothing"),
    "brier": Method("Brier", "brier"),
    "focal": Method("Focal", "focal"),
    "flsd-53": Method("FLSD-53", "flsd53"),
    "adafocal": Method("AdaFocal", "adafocal"),
    "mmce": Method("MMCE", "mmce"),
    "mmce-published": Method("MMCE as published", "mmce_published"),
    "entropy-penalty": Method("Entropy penalty", "entropy_penalty"),
    "soft-ece": Method("Soft-binned ECE", "soft_ece"),
    "avuc": Method("AvUC", "avuc"),
    "mse": Method("Squared error on logits", "mse_logits"),
    "mixup": Method("Mixup", mixup=0.2),
    "double-head": _head("Double head", "double-head", PAPER),
    "annealing-double-head": _head(
        "Annealing double head", "annealing-double-head", replace(PAPER, beta0=1.2)
    ),
    "sample-temperature": _head("Sample temperature head", "sample-temperature", replace(SAMPLE, beta0=1.2)),
    "auto": Method("Auto head", auto=True, answers="auto"),
    "guarded": Method("Guarded auto head", auto=True, guards=("shifts",), answers="guarded"),
    "sweep": Method(
        "Sweep over beta0",
        heads={
            f"{name}-{beta0:g}": replace(spec, beta0=beta0)
            for name, spec in (("mlp", PAPER), ("temperature", SAMPLE))
            for beta0 in BETAS
        },
    ),
}


def method(name: str) -> Method:
    """The method called `name`, or an error that lists what there is.

    >>> method("brier").loss
    'brier'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}{hint}")
    return METHODS[name]


def make_loss(config: Config) -> Callable[..., Tensor]:
    """The loss per example: a function, or a module that wants `update(calib)` after each epoch."""
    if config.loss in ADAPTIVE:
        return ADAPTIVE[config.loss](**config.loss_options)  # type: ignore[arg-type]
    return partial(LOSSES[config.loss], **config.loss_options)


def objective(
    config: Config, loss: Callable[..., Tensor]
) -> tuple[Callable[..., tuple[Any, Any]], Callable[[Tensor, Any], Tensor]]:
    """What to do with a batch before the network sees it, and the loss per example of what comes out."""
    if config.mixup:
        return partial(mixup, alpha=config.mixup), partial(mixed, loss)
    return lambda x, y: (x, y), loss


def runs_for(config: Config, names: Sequence[str]) -> list[tuple[Config, list[str]]]:
    """The fewest training runs that answer for all these methods: those with one loss share one run.

    >>> [names for _, names in runs_for(Config(), ["cross-entropy", "brier", "double-head"])]
    [['cross-entropy', 'double-head'], ['brier']]
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        asked = method(name)
        key = (asked.loss, tuple(sorted(asked.loss_options.items())), asked.mixup)
        groups.setdefault(key, []).append(name)
    runs = []
    for group in groups.values():
        made = config
        for name in group:
            made = method(name).apply(made)
        runs.append((made, group))
    return runs
