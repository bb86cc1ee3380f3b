"""Follow the shape of the main learning-rate schedule at a height of one's own."""

from __future__ import annotations

from typing import Any


def follow(optimizer: Any, lr: float) -> float:
    """The factor that takes the main optimizer's learning rate to `lr` at the peak of its schedule.

    A scheduler notes its peak as `initial_lr`; without one, the present rate is the peak. A head learns by SGD at 0.03
    to 0.3, whatever the network's optimizer, so the rates themselves cannot be shared.

    >>> import torch
    >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=2e-5)
    >>> round(follow(optimizer, 0.1) * 2e-5, 6)
    0.1
    """
    first = optimizer.param_groups[0]
    peak = float(first.get("initial_lr", first["lr"]))
    if peak <= 0:
        raise ValueError(f"the main optimizer must have a positive learning rate at its peak, got {peak}")
    return lr / peak
