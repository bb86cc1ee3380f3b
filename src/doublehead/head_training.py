"""How calibration heads learn: SGD at a rate of their own, clipped gradients, steps left out where the loss is
broken.

Everything stays on the device: the network's next step need not wait for the heads'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from doublehead.calibration_head import HeadBank
from doublehead.torch_tools import AsyncFlags, average_over_processes, same_on_all_processes

MOMENTUM = 0.9
WORSE_THAN_GUESSING = (
    10  # times: a network whose BatchNorm averages are not there yet; such batches teach nothing
)


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
        self.velocity = [torch.zeros_like(p) for p in bank.parameters()]
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
            valid = (labels >= 0) & (labels < n_classes)
            labels = labels.clamp(0, n_classes - 1)
        else:
            valid = (labels >= 0).all(1)  # no nan
        sees = ((folds != self.blind) & valid).float()  # (H, B)
        sees = sees if counts is None else sees * (counts / counts.mean())
        n_seen = average_over_processes(
            sees.sum(1, keepdim=True)
        )  # so that several processes do what one would
        weights = sees / n_seen.clamp(min=1.0)
        own = average_over_processes((nll(main.float(), labels) * valid).mean())
        sane = own < WORSE_THAN_GUESSING * math.log(n_classes)
        self.bank.follow(main, features, sane)
        beta = anneal(self.beta0, progress)  # (H,)
        with torch.enable_grad():
            losses = (nll(beta[:, None, None] * self.bank(main, features), labels) * weights).sum(-1)  # (H,)
            losses.sum().backward()
        losses = average_over_processes(losses.detach())
        for parameter in self.bank.parameters():
            assert parameter.grad is not None
            average_over_processes(parameter.grad)
        norms = self._norms()
        fine = torch.isfinite(losses) & torch.isfinite(norms)
        self._move(fine & sane, (self.clip / norms).clamp(max=1.0))
        self.bank.zero_grad(set_to_none=True)
        self.grad_norms, self.beta = norms, beta
        self._flags.send(fine.any())
        return losses

    def count_skipped(self, wait: bool = False) -> None:
        """Bring `skipped` and `skipped_in_a_row` up to date with the steps whose result has arrived."""
        for fine in self._flags.arrived(wait):
            self.skipped += not fine
            self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1

    def _stacks(self) -> Iterator[tuple[list[torch.nn.Parameter], Tensor]]:
        for stack, numbers in zip(self.bank.stacks, self.bank.members):
            yield list(stack.parameters()), torch.tensor(numbers, device=self.lr.device)

    def _norms(self) -> Tensor:
        """(H,) the 2-norm of each head's gradient."""
        squares = [
            sum(p.grad.flatten(1).square().sum(1) for p in parameters if p.grad is not None)
            for parameters, _ in self._stacks()
        ]
        return torch.cat(squares)[self.bank.order].sqrt()  # type: ignore[arg-type]

    @torch.no_grad()
    def _move(self, fine: Tensor, shrink: Tensor) -> None:
        """Nesterov SGD for the heads that are fine, (H,), with gradients times `shrink`, (H,)."""
        shrink = torch.where(fine, shrink, 0.0)  # a gradient that is not finite has no size to shrink by
        rate = self.lr * self.schedule.now() * fine
        velocities = iter(self.velocity)
        for parameters, rows in self._stacks():
            for parameter in parameters:
                velocity, shape = next(velocities), [-1, *[1] * (parameter.ndim - 1)]
                own_fine, own_shrink, own_rate = (value[rows].view(shape) for value in (fine, shrink, rate))
                # A head that is not fine: no gradient, momentum 1 and rate 0, so nothing of it changes.
                gradient = torch.where(own_fine, parameter.grad, 0.0).mul_(own_shrink)  # type: ignore[arg-type]
                gradient.add_(parameter, alpha=self.weight_decay).mul_(own_fine)
                velocity.mul_(torch.where(own_fine, MOMENTUM, 1.0)).add_(gradient)
                parameter.addcmul_(gradient.add_(velocity, alpha=MOMENTUM), own_rate, value=-1)

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


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of each sample for logits (..., B, K) and labels (B,) or probabilities (B, K)."""
    if labels.ndim == 2:
        return -(labels * logits.log_softmax(-1)).sum(-1)
    at_labels = logits.gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1) - at_labels
