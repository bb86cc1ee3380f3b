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
from doublehead.torch_tools import AsyncFlags, average_over_processes, same_on_all_processes, without_autocast

MOMENTUM = 0.9
WORSE_THAN_GUESSING = 10  # times: the averages of its BatchNorm are not there yet; such batches teach nothing
IGNORED = -100  # stands for labels that are no class


class HeadTraining:
    """Trains the heads of a bank, one `step` per calibration batch.

    Each head moves as it would alone under SGD with Nesterov momentum, at its own peak rate `spec.lr` times the
    shape of the schedule of `follow`, the network's optimizer. The gradient of each head is clipped to a 2-norm of
    `clip`: its usual size is below 1, but in the first steps a deep network in evaluation mode gives features of
    any size. `clip=math.inf` is the paper's method to the letter. A head whose loss or gradient is not finite is
    left out of a step. The gradients are written by hand, in `CalibrationHead.gradients`.
    """

    def __init__(
        self,
        bank: HeadBank,
        *,
        follow: torch.optim.Optimizer | None = None,
        weight_decay: float = 5e-5,
        clip: float = 1.0,
    ) -> None:
        self.bank, self.clip = bank, clip
        self.schedule = ScheduleShape(follow)
        device = bank.order.device
        beta0, lr = ([getattr(spec, name) for spec in bank.specs] for name in ("beta0", "lr"))
        self.beta0 = torch.tensor(beta0, device=device, dtype=torch.float32)  # (H,)
        self.lr = torch.tensor(lr, device=device, dtype=torch.float32)  # (H,) peak rates
        blind = [-1 if spec.fold is None else spec.fold for spec in bank.specs]
        self.blind = torch.tensor(blind, device=device)[:, None]  # (H, 1) the fold that each head never sees
        self._stacks: list[Any] = list(bank.stacks)
        self._rows = [_rows(numbers) for numbers in bank.members]  # the heads of each stack
        self._parameters = [list(stack.parameters()) for stack in self._stacks]
        sizes = [[p[0].numel() for p in parameters] for parameters in self._parameters]
        self.velocity = [
            torch.zeros(len(heads), sum(n), device=device, dtype=torch.float32)
            for heads, n in zip(bank.members, sizes)
        ]
        self._gradients = [
            torch.zeros_like(velocity) for velocity in self.velocity
        ]  # kept: new memory is slow
        self._parts = [  # of the gradients, in the shapes of the parameters
            [part.view(p.shape) for part, p in zip(flat.split(n, 1), parameters)]
            for flat, n, parameters in zip(self._gradients, sizes, self._parameters)
        ]
        self._classes = torch.arange(self._stacks[0].n_classes, device=device)[:, None]  # (K, 1)
        # Rate, momentum and weight decay of each head, (3, H), where it does not move, and what is added where it does.
        zeros = torch.zeros_like(self.lr)
        self._idle = torch.stack([zeros, zeros + 1, zeros])
        self._moving = torch.stack([self.lr, zeros + MOMENTUM - 1, zeros + weight_decay])
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
        with torch.inference_mode(), without_autocast(main.device.type):  # no_grad is a little slower
            losses = self._step(main.float(), features, labels, folds, anneal(self.beta0, progress), counts)
        return losses.clone()  # as an ordinary tensor

    def _step(
        self,
        main: Tensor,
        features: Tensor,
        labels: Tensor,
        folds: Tensor,
        beta: Tensor,
        counts: Tensor | None,
    ) -> Tensor:
        targets, valid = _targets(labels, self._classes)  # (K, B), (B,)
        sees = ((folds != self.blind) & valid).float()  # (H, B)
        sees = sees if counts is None else sees * (counts / counts.mean()).float()
        n_seen = average_over_processes(sees.sum(1, keepdim=True))  # several processes do what one would
        weights = sees.div_(n_seen.clamp_(min=1.0))  # (H, B)
        known = labels.where(valid, IGNORED) if labels.ndim == 1 else targets.T
        own = average_over_processes(F.cross_entropy(main, known, ignore_index=IGNORED))
        sane = own < WORSE_THAN_GUESSING * math.log(main.shape[-1])
        self.bank.follow(main, features, sane)
        losses = []
        for stack, rows, flat, parts in zip(self._stacks, self._rows, self._gradients, self._parts):
            passed = stack.run(main, features)
            nlls, slopes = _cross_entropy(passed.logits * beta[rows, None, None], targets)
            losses.append((nlls * weights[rows]).sum(1))
            slopes.mul_((weights[rows] * beta[rows, None])[:, None])
            stack.gradients(passed, slopes, parts)
            average_over_processes(flat)
        loss = average_over_processes(self.bank.in_order(losses))  # (H,)
        norms = self.bank.in_order([torch.linalg.vector_norm(flat, dim=1) for flat in self._gradients])
        fine = loss + norms < math.inf  # neither is negative
        self._move((fine & sane).float(), norms)
        self.grad_norms, self.beta = norms, beta
        self._flags.send(fine.any())
        return loss

    def count_skipped(self, wait: bool = False) -> None:
        """Bring `skipped` and `skipped_in_a_row` up to date with the steps whose result has arrived."""
        for fine in self._flags.arrived(wait):
            self.skipped += not fine
            self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1

    def _move(self, moves: Tensor, norms: Tensor) -> None:
        """Nesterov SGD for the heads that move, (H,) ones and zeros, whose gradients have these norms, (H,)."""
        shrink = (self.clip / norms).clamp_(max=1.0).mul_(moves)  # (H,), no number where a norm is none
        rates, share = torch.addcmul(self._idle, self._moving, moves), self.schedule.now()  # (3, H)
        for parameters, rows, gradient, parts, velocity in zip(
            self._parameters, self._rows, self._gradients, self._parts, self.velocity
        ):
            rate, momentum, decay = rates[:, rows, None]
            gradient.mul_(shrink[rows, None]).nan_to_num_(0.0, 0.0, 0.0)
            for parameter, part in zip(parameters, parts):
                part.addcmul_(parameter, decay.view(-1, *[1] * (part.ndim - 1)))
            torch.addcmul(gradient, velocity, momentum, out=velocity)
            gradient.add_(velocity, alpha=MOMENTUM).mul_(rate)
            for parameter, part in zip(parameters, parts):
                parameter.sub_(part, alpha=share)

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
    return beta0 * (1 - progress) + progress


def _targets(labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (B,) or (B, K) as probabilities (K, B), 0 where a label is no class, and which are classes, (B,)."""
    if labels.ndim == 1:
        one_hot = labels == classes
        return one_hot.float(), one_hot.any(0)
    valid = (labels >= 0).all(1)  # no nan
    return labels.float().T.where(valid, 0.0), valid


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """NLLs (H, B) of logits (H, B, K) for targets (K, B), and their slopes by the logits, (H, K, B)."""
    log_probs = logits.mT.log_softmax(1)  # not over the last dimension: that is slow on a CPU for few classes
    return -(log_probs * targets).sum(1), log_probs.exp_().sub_(targets)


def _rows(numbers: list[int]) -> slice | list[int]:
    """Some of the heads as an index: a slice where that is possible, which copies nothing."""
    within = range(numbers[0], numbers[-1] + 1)
    return slice(within.start, within.stop) if numbers == list(within) else numbers
