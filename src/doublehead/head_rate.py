"""A calibration head's learning rate: a number, or the shape of the network's schedule at a height of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


class HeadRate:
    """What `now()` gives: `lr`, or, where that is an optimizer, a rate that goes up and down with its.

    Then it is `scale` times the optimizer's rate if that is given, else such that it is `peak` where the schedule has
    its peak: the one that a scheduler noted in the optimizer, or a higher one that comes unannounced.

    >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=2e-5)
    >>> rate = HeadRate(optimizer, peak=0.1)
    >>> optimizer.param_groups[0]["lr"] = 1e-5
    >>> round(rate.now(), 6)
    0.05
    """

    def __init__(
        self, lr: float | torch.optim.Optimizer | None, *, peak: float, scale: float | None = None
    ) -> None:
        peak = _number(peak, "peak_lr")
        self._lr: Any = peak if lr is None else lr
        self.peak = math.inf if scale is not None else peak
        if isinstance(self._lr, torch.optim.Optimizer):
            highest = peak_of(self._lr)
            usual = peak / highest if highest else math.inf
        else:
            self._lr, usual = _number(self._lr, "lr", ", an optimizer or None"), 1.0
        self.scale = usual if scale is None else _number(scale, "lr_scale")

    @property
    def follows(self) -> bool:
        """Whether the rate changes with an optimizer's."""
        return isinstance(self._lr, torch.optim.Optimizer)

    def now(self) -> float:
        """The rate at present; one of the optimizer above the known peak is the new peak."""
        if not isinstance(self._lr, torch.optim.Optimizer):
            return float(self.scale * self._lr)
        rate = rate_of(self._lr)
        if rate * self.scale > self.peak:
            self.scale = self.peak / rate
        return rate * self.scale if rate else 0.0

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to go on at the same rate."""
        return {"lr_scale": self.scale, "peak_lr": self.peak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` tells; an older run at its rate, whatever that was."""
        self.scale, self.peak = state.get("lr_scale", self.scale), state.get("peak_lr", math.inf)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """An optimizer's learning rate at present: the highest of its groups'."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def peak_of(optimizer: torch.optim.Optimizer) -> float:
    """The highest learning rate that an optimizer's schedule makes known.

    A scheduler notes it as `max_lr` (OneCycleLR) or `initial_lr`; without one it is the present rate.

    >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=2e-5)
    >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01)
    >>> round(rate_of(optimizer), 9), peak_of(optimizer)
    (2e-07, 2e-05)
    """
    return max(
        float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups
    )


def _number(value: Any, name: str, or_else: str = "") -> float:
    """A learning rate, or a factor for one; an error for what is none."""
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        got = value if isinstance(value, (int, float)) else type(value).__name__
        raise ValueError(f"{name} must be a finite number from 0 on{or_else}, got {got}")
    return rate
