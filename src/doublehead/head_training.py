"""How calibration heads learn: SGD at a rate of their own, clipped gradients, steps left out where the loss is
broken.

Everything stays on the device: the network's next step need not wait for the heads'. Batches wait and are learned from
in bursts: on a CPU a step right after another takes half the time, since its code is still in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from doublehead.calibration_head import CalibrationHead, HeadBank
from doublehead.torch_tools import (
    AsyncFlags,
    average_over_processes,
    n_processes,
    same_on_all_processes,
    without_autocast,
)

B0 = TypeVar("B0", float, Tensor)
MOMENTUM = 0.9
BURST = 64  # batches that are learned from together, at most
MAX_WAITING = 2**23  # logits and features of all batches that wait: 32 MiB
# Times: the network's BatchNorm averages have not settled; such batches are left out.
WORSE_THAN_GUESSING = 10


class HeadTraining:
    """Trains the heads of a bank, one step per calibration batch.

    Each head moves as it would alone under SGD with Nesterov momentum, at its own peak rate `spec.lr` times the
    shape of the schedule of `follow`, the network's optimizer. The gradient of each head is clipped to a 2-norm of
    `clip`: its usual size is below 1, but in the first steps a deep network in evaluation mode gives features of
    any size. `clip=math.inf` is the paper's method to the letter. A head whose gradient is not finite is left out
    of a step. The gradients are written by hand, in `CalibrationHead.gradients`.
    """

    def __init__(
        self,
        bank: HeadBank,
        *,
        follow: torch.optim.Optimizer | None = None,
        weight_decay: float = 5e-5,
        clip: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.bank, self.schedule = bank, ScheduleShape(follow)
        self.is_alone = n_processes() == 1
        same_on_all_processes(bank)
        self.generator = torch.Generator(bank.order.device).manual_seed(seed)  # of dropout
        how = weight_decay, clip, self.generator
        self._stacks = [_Stack(head, *how) for head in bank.stacks]  # type: ignore[arg-type]
        n_classes = self._stacks[0].head.n_classes
        self._classes = torch.arange(n_classes, device=bank.order.device)[:, None]  # (K, 1)
        self._min_fit = -WORSE_THAN_GUESSING * math.log(n_classes)
        self._waiting: list[tuple[Any, ...]] = []  # form, progress, share of the peak rate, and a batch
        self._form: Any = ()  # shapes and types of the parts of the last batch
        self._n_waiting = 0  # logits and features that wait
        # Form and memory of those: with new memory each time, the network's steps take longer.
        self._copies: list[tuple[Any, Tensor, Tensor]] = []
        self.losses: Tensor | None = None  # (H,) of the last step
        self.grad_norms: Tensor | None = None  # (H,) of the last step, before clipping
        self.progress: float | None = None  # of the last step
        self.skipped = self.skipped_in_a_row = 0  # steps in which no head had a finite loss
        self._flags = AsyncFlags()

    @property
    def beta(self) -> Tensor | None:
        """(H,) of the last step."""
        beta0 = torch.tensor([spec.beta0 for spec in self.bank.specs])
        return None if self.progress is None else anneal(beta0, self.progress)

    def add(self, progress: float, *batch: Tensor) -> None:
        """One step of every head on a batch, at `progress` of the epoch, made now or in a later call.

        When it is made changes no result. `batch` holds main logits (B, K), features (B, F), labels, which are classes
        (B,) or rows of probabilities (B, K), folds (B,) and, where there are any, sample weights (B,). Logits and
        features may be overwritten afterwards.
        """
        anneal(1.0, progress)  # what cannot be learned from raises an error now, not in a later call
        form = [(part.shape, part.dtype) for part in batch]
        if form != self._form:
            for stack in self._stacks:
                stack.head.check(*batch[:3])
            self._form = form
        main, features, *known = batch
        self._n_waiting += main.numel() + features.numel()
        # One of several processes may be asked for its heads alone, and a step needs all of them.
        waits = self.is_alone and self._n_waiting < MAX_WAITING
        if waits:  # compiled networks and some loaders use memory again
            main, features = self._copied(main, features)
        self._waiting.append((self._form, progress, self.schedule.now(), main, features, *known))
        if not waits or len(self._waiting) >= BURST:
            self.catch_up()

    def _copied(self, main: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        place = len(self._waiting)
        if place < len(self._copies) and self._copies[place][0] == self._form:
            _, own_main, own_features = self._copies[place]
            return own_main.copy_(main), own_features.copy_(features)
        copies = main.clone(), features.clone()
        self._copies[place : place + 1] = [(self._form, *copies)]
        return copies

    def catch_up(self) -> None:
        """Make the steps on the batches that wait, in order."""
        if not self._waiting:
            return
        waiting, device_type = self._waiting, self._classes.device.type
        self._waiting, self._n_waiting = [], 0
        del self._copies[len(waiting) :]  # so that all are never more than MAX_WAITING
        with torch.inference_mode(), without_autocast(device_type):  # no_grad is a little slower
            for _, alike in groupby(waiting, itemgetter(0)):
                _, *parts = zip(*alike)
                losses = self._learn(*parts)
        self.losses = losses.clone()  # as an ordinary tensor

    def _learn(
        self,
        progress: Sequence[float],
        shares: Sequence[float],
        main: tuple[Tensor, ...],
        features: tuple[Tensor, ...],
        labels: tuple[Tensor, ...],
        folds: tuple[Tensor, ...],
        counts: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """A step on each of T batches; the losses (H,) of the last."""
        # What does not depend on the heads is computed for all steps at once. Logits and features stay apart: the
        # rounding of a matrix product may depend on where its factors lie, and must not on the length of a burst.
        main = tuple(some.float() for some in main)
        targets = _targets(torch.stack(labels), self._classes)  # (T, K, B)
        known = targets.sum(1)  # (T, B) 1, or 0 where a label is no class
        if counts:
            of_samples = torch.stack(counts)
            known = known * (of_samples / of_samples.mean(1, keepdim=True))
        log_probs = torch.stack(main).mT.log_softmax(1)  # (T, K, B)
        fit = (log_probs * targets).sum((1, 2)) / len(labels[0])  # (T,) minus the NLL
        sane = average_over_processes(fit) > self._min_fit
        weights = [stack.weigh(known, torch.stack(folds)) for stack in self._stacks]  # (T, H, 1, B) each
        betas = [stack.betas(progress) for stack in self._stacks]  # (T, H, 1, 1) each
        pulls = [(beta.unbind(), (own * beta).unbind()) for beta, own in zip(betas, weights)]
        # To ask another device would mean to wait for it.
        known_sane = sane.tolist() if sane.device.type == "cpu" else [False] * len(main)
        logits: list[Tensor] = []
        norms: list[list[Tensor]] = [[] for _ in self._stacks]
        for t, step in enumerate(zip(shares, main, features, targets, sane, known_sane)):
            logits.clear()
            for stack, some, (beta, pull) in zip(self._stacks, norms, pulls):
                answer, norm = stack.step(beta[t], pull[t], *step)
                logits.append(answer)
                some.append(norm)
        sizes = self.bank.in_order([torch.stack(some, 1).squeeze(2) for some in norms])  # (H, T)
        self._flags.send((sizes.isfinite() & fit.isfinite()).T)
        self.grad_norms, self.progress = sizes[:, -1], progress[-1]
        parts = [_losses(some.log_softmax(1), targets[-1], own[-1]) for some, own in zip(logits, weights)]
        return average_over_processes(self.bank.in_order(parts))

    def count_skipped(self, wait: bool = False) -> None:
        """Bring `skipped` and `skipped_in_a_row` up to date with the steps whose result has arrived."""
        for fine in self._flags.arrived(wait):
            self.skipped += not fine
            self.skipped_in_a_row = 0 if fine else self.skipped_in_a_row + 1

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, velocities, schedule and counts: all that the next steps depend on but the generator."""
        self.catch_up()
        self.count_skipped(wait=True)
        return {
            "bank": self.bank.state_dict(),
            "velocity": [stack.velocity for stack in self._stacks],
            "schedule": self.schedule.peak,
            "skipped": [self.skipped, self.skipped_in_a_row],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where `state_dict` was taken."""
        self._waiting, self._n_waiting = [], 0
        self.bank.load_state_dict(state["bank"])
        for stack, saved in zip(self._stacks, state["velocity"], strict=True):
            stack.velocity.copy_(saved)
        self.schedule.peak = state["schedule"]
        self._flags = AsyncFlags()  # those under way are of the steps before
        self.skipped, self.skipped_in_a_row = state["skipped"]


class _Stack:
    """Trains a stack of heads whose weights, gradients and velocities are one tensor (H, P) each.

    The stack's parameters become views of the weights, so that an operation moves them all: on a CPU the heads of a
    small network cost what the number of operations costs.
    """

    def __init__(
        self, head: CalibrationHead, weight_decay: float, clip: float, generator: torch.Generator
    ) -> None:
        self.is_alone = n_processes() == 1
        self.head, self.generator, parameters = head, generator, list(head.parameters())
        self.weights = torch.cat([parameter.detach().flatten(1) for parameter in parameters], 1)
        self.gradient, self.velocity = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        sizes = [parameter[0].numel() for parameter in parameters]
        for parameter, part in zip(parameters, self.weights.split(sizes, 1)):
            parameter.data = part.view(parameter.shape)
        self.gradients = [torch.zeros_like(parameter) for parameter in parameters]  # kept: new memory is slow
        self.rows = [part.flatten(1) for part in self.gradients]  # (H, size) each
        blind = [-1 if spec.fold is None else spec.fold for spec in head.specs]
        blind_folds = torch.tensor(blind, device=self.weights.device)
        self.blind = blind_folds[:, None, None]  # (H, 1, 1) each head's unseen fold
        self.beta0 = self.weights.new_tensor([spec.beta0 for spec in head.specs])[:, None, None]  # (H, 1, 1)
        self.clip, self.weight_decay = clip, weight_decay
        rates = {spec.lr for spec in head.specs}
        self._rate = rates.pop() if len(rates) == 1 else None  # of all heads
        # Rate, momentum, weight decay, share of the gradient, (4, H, 1), of heads that move and of those that do not.
        table = [[(spec.lr, MOMENTUM, weight_decay, 1.0), (0.0, 1.0, 0.0, 0.0)] for spec in head.specs]
        self._moving, self._idle = self.weights.new_tensor(table).permute(1, 2, 0).unsqueeze(3)

    def weigh(self, known: Tensor, folds: Tensor) -> Tensor:
        """(T, H, 1, B) the weight of each sample in a head's loss, from weights and folds of samples, (T, B) each."""
        sees = known[:, None, None] * (folds[:, None, None] != self.blind)
        n_seen = average_over_processes(sees.sum(3, keepdim=True))  # several processes do what one would
        return sees.div_(n_seen.clamp_(min=1.0))

    def betas(self, progress: Sequence[float]) -> Tensor:
        """(T, H, 1, 1) of T steps."""
        shares = torch.tensor(progress, dtype=self.weights.dtype).view(-1, 1, 1, 1)
        return anneal(self.beta0, shares.to(self.weights.device, non_blocking=True))

    def step(
        self,
        beta: Tensor,
        pull: Tensor,
        share: float,
        main: Tensor,
        features: Tensor,
        targets: Tensor,
        sane: Tensor,
        known_sane: bool,
    ) -> tuple[Tensor, Tensor]:
        """Move the heads; annealed logits (H, K, B) before, and the norms of gradients, (H, 1).

        `pull` (H, 1, B) are the weights of samples times beta: what turns errors of probabilities into slopes. `share`
        is that of the peak rate. Heads learn from a batch if it is `sane`, a bool tensor (); `known_sane` is True where
        that is known without waiting for a device.
        """
        self.head.follow(main, features, sane)
        passed = self.head.run(main, features, self.generator)
        logits = passed.logits * beta  # (H, K, B)
        slopes = logits.softmax(1).sub_(targets).mul_(pull)
        self.head.gradients(passed, slopes, self.gradients)
        torch.cat(self.rows, 1, out=self.gradient)
        if not self.is_alone:
            average_over_processes(self.gradient)
        norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
        sizes = norms.flatten().tolist() if known_sane else [math.inf]
        if self._rate is not None and all(map(math.isfinite, sizes)):
            self._move_all(norms, max(sizes), self._rate * share)
        else:
            self._move(norms.isfinite() & sane, norms, share)  # a nan loss has a nan gradient
        return logits, norms

    def _move_all(self, norms: Tensor, largest: float, rate: float) -> None:
        """`_move` where no head is left out, as nearly always, in one pass over the memory."""
        if largest > self.clip:
            self.gradient.div_((norms / self.clip).clamp_(min=1.0))
        torch._fused_sgd_(
            [self.weights], [self.gradient], [self.velocity], lr=rate, momentum=MOMENTUM, nesterov=True,
            weight_decay=self.weight_decay, dampening=0.0, maximize=False, is_first_step=False,
        )  # fmt: skip

    def _move(self, moves: Tensor, norms: Tensor, share: float) -> None:
        """Nesterov SGD for the heads that move, (H, 1) bool, whose gradients have these norms, (H, 1)."""
        rates = torch.where(moves, self._moving, self._idle)
        rate, momentum, decay, share_of_gradient = rates.unbind()  # (H, 1) each
        shrink = share_of_gradient / (norms / self.clip).clamp_(min=1.0)  # nan where a norm is
        step = self.gradient.mul_(shrink).nan_to_num_(0.0, 0.0, 0.0)
        step.addcmul_(self.weights, decay)
        torch.addcmul(step, self.velocity, momentum, out=self.velocity)
        step.add_(self.velocity, alpha=MOMENTUM)
        self.weights.addcmul_(step, rate, value=-share)


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
        rate = max([float(group["lr"]) for group in self.optimizer.param_groups])
        self.peak = max(self.peak, rate)
        return rate / self.peak if rate else 0.0


def anneal(beta0: B0, progress: B0 | float) -> B0:
    """beta at `progress` of the epoch, 0..1: from beta0 straight to 1 (the paper's Eq. 5).

    beta0 > 1 makes a head less confident, beta0 < 1 more; beta0 = 1 switches annealing off.

    >>> [round(anneal(1.2, progress), 6) for progress in (0.0, 0.5, 1.0)]
    [1.2, 1.1, 1.0]
    """
    if not isinstance(progress, Tensor) and not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress must lie in 0..1, the share of the epoch that is over, got {progress}")
    return beta0 * (1 - progress) + progress


def _targets(labels: Tensor, classes: Tensor) -> Tensor:
    """Labels (T, B) or (T, B, K) as probabilities (T, K, B), all 0 where a label is no class."""
    if labels.ndim == 2:
        return (labels.unsqueeze(1) == classes).float()
    return labels.float().mT.where((labels >= 0).all(2).unsqueeze(1), 0.0)  # no nan


def _losses(log_probs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """(H,) from (H, K, B), (K, B) and (H, 1, B)."""
    return (log_probs * targets).sum(1).mul_(weights.squeeze(1)).sum(1).neg_()
