"""How calibration heads learn: SGD at a rate of their own, clipped gradients, steps left out where the loss is
broken.

Everything stays on the device: the network's next step need not wait for the heads'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead.calibration_head import HeadBank
from doublehead.torch_tools import AsyncFlags, average_over_processes, same_on_all_processes

MOMENTUM = 0.9
WORSE_THAN_GUESSING = 10  # times: the averages of its BatchNorm are not there yet; such batches teach nothing
IGNORED = -100  # stands for labels that are no class


class HeadTraining:
    """Trains the heads of a bank, one `step` per calibration batch.

    Each head moves as it would alone under SGD with Nesterov momentum, at its own peak rate `spec.lr` times the
    shape of the schedule of `follow`, the network's optimizer. The gradient of each head is clipped to a 2-norm of
    `clip`: its usual size is below 1, but in the first steps a deep network in evaluation mode gives features of
    any size. `clip=math.inf` is the paper's method to the letter. A head whose loss or gradient is not finite is
    left out of a step.
    """

    def __init__(
        self,
        bank: HeadBank,
        *,
        follow: torch.optim.Optimizer | None = None,
        weight_decay: float = 5e-5,
        clip: float = 1.0,
    ) -> None:
        self.bank, self.weight_decay, self.clip = bank, weight_decay, clip
        self.schedule = ScheduleShape(follow)
        device = bank.order.device
        beta0, lr = ([getattr(spec, name) for spec in bank.specs] for name in ("beta0", "lr"))
        self.beta0 = torch.tensor(beta0, device=device, dtype=torch.float32)  # (H,)
        self.lr = torch.tensor(lr, device=device, dtype=torch.float32)  # (H,) peak rates
        blind = [-1 if spec.fold is None else spec.fold for spec in bank.specs]
        self.blind = torch.tensor(blind, device=device)[:, None]  # (H, 1) the fold that each head never sees
        self._stacks = [list(stack.parameters()) for stack in bank.stacks]
        self._sizes = [[p[0].numel() for p in parameters] for parameters in self._stacks]
        self._rows = [_rows(numbers) for numbers in bank.members]  # the heads of each stack
        shapes = [(len(some), sum(sizes)) for some, sizes in zip(bank.members, self._sizes)]
        self.velocity = [torch.zeros(shape, device=device) for shape in shapes]
        self._gradients = [torch.zeros(shape, device=device) for shape in shapes]  # kept: new memory is slow
        self.grad_norms: Tensor | None = None  # (H,) of the last step, before clipping
        self.beta: Tensor | None = None  # (H,) of the last step
        self.skipped = self.skipped_in_a_row = 0  # steps in which no head had a finite loss
        self._flags = AsyncFlags()
        same_on_all_processes(bank)

    def step(
        self,
        main: Tensor,
        features: Tensor,
        labels: Tensor,
        folds: Tensor,
        progress: float,
        counts: Tensor | None = None,
    ) -> Tensor:
        """One step of every head on a batch, at `progress` of the epoch; the heads' losses (H,).

        Labels are classes (B,) or rows of probabilities (B, K); `counts` are sample weights (B,).
        """
        n_classes = main.shape[-1]
        if labels.ndim == 1:
            valid = labels == labels.clamp(0, n_classes - 1)
            labels = torch.where(valid, labels, IGNORED)
        else:
            valid = (labels >= 0).all(1)  # no nan
            labels = labels.float().where(valid[:, None], 0.0)
        sees = ((folds != self.blind) & valid).float()  # (H, B)
        sees = sees if counts is None else sees * (counts / counts.mean()).float()
        n_seen = average_over_processes(
            sees.sum(1, keepdim=True)
        )  # so that several processes do what one would
        weights = sees / n_seen.clamp(min=1.0)  # (H, B)
        own = average_over_processes(F.cross_entropy(main.float(), labels, ignore_index=IGNORED))
        sane = own < WORSE_THAN_GUESSING * math.log(n_classes)
        self.bank.follow(main, features, sane)
        beta = anneal(self.beta0, progress)  # (H,)
        with torch.enable_grad():
            scaled = (beta[:, None, None] * self.bank(main, features)).flatten(0, 1)  # (H * B, K)
            wanted = torch.cat([labels] * len(beta))
            nlls = F.cross_entropy(scaled, wanted, reduction="none", ignore_index=IGNORED)
            parameters = [p for stack in self._stacks for p in stack]
            found = iter(torch.autograd.grad(nlls, parameters, weights.flatten()))
        losses = average_over_processes((nlls.detach().view_as(weights) * weights).sum(1))  # (H,)
        for stack, flat in zip(self._stacks, self._gradients):
            torch.cat([next(found).flatten(1) for _ in stack], 1, out=flat)
            average_over_processes(flat)
        norms = self.bank.in_order([torch.linalg.vector_norm(one, dim=1) for one in self._gradients])
        fine = torch.isfinite(losses + norms)  # neither is negative
        self._move(fine & sane, (self.clip / norms).clamp(max=1.0))
        self.grad_norms, self.beta = norms, beta
        self._flags.send(fine.any())
        return losses

    def count_skipped(self, wait: bool = False) -> None:
        """Bring `skipped` and `skipped_in_a_row` up to date with the steps whose result has arrived."""
        for fine in self._flags.arrived(wait):
            self.skipped += not fine
            self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1

    @torch.no_grad()
    def _move(self, fine: Tensor, shrink: Tensor) -> None:
        """Nesterov SGD for the heads that are fine, (H,), with gradients times `shrink`, (H,)."""
        moves = fine.float()  # 0 for a head that is not fine: no gradient, momentum 1 and rate 0
        rate, momentum, broken = moves * self.lr * self.schedule.now(), 1 - (1 - MOMENTUM) * moves, ~fine
        for parameters, sizes, rows, gradient, velocity in zip(
            self._stacks, self._sizes, self._rows, self._gradients, self.velocity
        ):
            own = moves[rows, None]
            gradient.mul_(shrink[rows, None]).masked_fill_(broken[rows, None], 0.0)
            parts = gradient.split(sizes, 1)
            for parameter, part in zip(parameters, parts):
                part.addcmul_(parameter.flatten(1), own, value=self.weight_decay)
            velocity.mul_(momentum[rows, None]).add_(gradient)
            gradient.add_(velocity, alpha=MOMENTUM).mul_(rate[rows, None])
            for parameter, part in zip(parameters, parts):
                parameter.sub_(part.view_as(parameter))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on: weights, moments, velocities, schedule, counts."""
        self.count_skipped(wait=True)
        return {
            "bank": self.bank.state_dict(),
            "velocity": self.velocity,
            "schedule": self.schedule.peak,
            "skipped": [self.skipped, self.skipped_in_a_row],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""
        self.bank.load_state_dict(state["bank"])
        for velocity, saved in zip(self.velocity, state["velocity"], strict=True):
            velocity.copy_(saved)
        self.schedule.peak = state["schedule"]
        self.skipped, self.skipped_in_a_row = state["skipped"]


class ScheduleShape:
    """The shape of an optimizer's schedule: its rate now as a share of its peak, in 0..1; always 1 without one.

    The peak is the one that a scheduler noted in the optimizer (`max_lr` of OneCycleLR, or `initial_lr`), or a higher
    rate seen since.

    >>> optimizer = torch.optim.Adam([torch.zeros(1)], lr=2e-5)
    >>> shape = ScheduleShape(optimizer)
    >>> optimizer.param_groups[0]["lr"] = 1e-5
    >>> round(shape.now(), 6)
    0.5
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"follow must be the network's optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        keys = ("max_lr", "initial_lr", "lr")
        groups = optimizer.param_groups if optimizer is not None else []
        noted = [float(next(group[key] for key in keys if key in group)) for group in groups]
        self.peak = max(noted, default=1.0)

    def now(self) -> float:
        """The share of the peak at present."""
        if self.optimizer is None:
            return 1.0
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        self.peak = max(self.peak, rate)
        return rate / self.peak if rate else 0.0


B0 = TypeVar("B0", float, Tensor)


def anneal(beta0: B0, progress: float) -> B0:
    """beta at `progress` of the epoch, 0..1: from beta0 straight to 1 (the paper's Eq. 5).

    beta0 > 1 makes a head less confident, beta0 < 1 more; beta0 = 1 switches annealing off.

    >>> [round(anneal(1.2, progress), 6) for progress in (0.0, 0.5, 1.0)]
    [1.2, 1.1, 1.0]
    """
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress must lie in 0..1, the share of the epoch that is over, got {progress}")
    return 1 + (beta0 - 1) * (1 - progress)


def _rows(numbers: list[int]) -> slice | list[int]:
    """Some of the heads as an index: a slice where that is possible, which copies nothing."""
    within = range(numbers[0], numbers[-1] + 1)
    return slice(within.start, within.stop) if numbers == list(within) else numbers
