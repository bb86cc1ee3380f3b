"""The heads' optimizer: SGD that can leave out a step, or one head of a stack, without asking the device first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HeadSGD(torch.optim.Optimizer):
    """SGD with Nesterov momentum for one head, or for stacks of heads that each have their own learning rate.

    A group of stacked parameters (h, ...) states `rows`, the numbers of its h heads, and `scale`, (h,), which
    multiplies `lr`. Each head moves exactly as it would alone under torch.optim.SGD. `step(fine, shrink)` takes, per
    head, whether to move at all and a factor for the gradient; both stay on the device, so nothing waits.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 5e-5) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rows": None, "scale": None}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, fine: Tensor, shrink: Tensor) -> None:  # type: ignore[override]
        """Move the heads that are `fine`, () or (H,) bool, along their gradient times `shrink`, () or (H,)."""
        shrink = torch.where(fine, shrink, 0.0)  # a gradient that is not finite has no size to shrink by
        for group in self.param_groups:
            rows = group["rows"]
            own = (fine, shrink) if rows is None else (fine[rows], shrink[rows])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, own, group)

    def _move(
        self, parameter: Tensor, gradient: Tensor, own: tuple[Tensor, Tensor], group: dict[str, Any]
    ) -> None:
        shape = [-1, *[1] * (parameter.ndim - 1)] if group["rows"] is not None else []
        fine, shrink = (values.view(shape) for values in own)
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity, momentum = state["velocity"], group["momentum"]
        # Where a head is not fine: no gradient, a momentum of 1 and a rate of 0, so that nothing of it changes.
        gradient = torch.where(fine, gradient, 0.0).mul_(shrink)
        gradient.add_(parameter, alpha=group["weight_decay"]).mul_(fine)
        velocity.mul_(torch.where(fine, momentum, 1.0)).add_(gradient)
        rate = group["lr"] * fine
        if group["scale"] is not None:
            rate = rate * group["scale"].to(parameter).view(shape)
        parameter.addcmul_(gradient.add_(velocity, alpha=momentum), rate.to(parameter), value=-1)
