"""Annealing Double-Head: a calibration head beside a normal network. This file is the whole method.

A shallow `CalibrationHead` reads what the network knows about a sample (the features before its last layer, its
logits, or a few statistics of them) and gives calibrated logits. `DoubleHead` puts it beside any classifier.
`Alternation` trains it: once every k steps of the network, on calibration data that the network never trains on,
with the logits scaled by beta, which `Annealing` lets run from beta0 to 1 within each epoch. The network itself is
not touched: its weights after training are bit-identical with and without the calibration head.

The paper's method is `DoubleHead(network, kind="mlp")` with an `Alternation`. The default is the head that was
safest on held-back data: it reads statistics of the logits, gives one temperature per sample, and is not annealed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.head_inputs import N_TOP, Standardise, statistics
from doublehead.head_optimizer import HeadSGD
from doublehead.head_rate import HeadRate
from doublehead.last_layer import FeatureTap, find_last_layer, logits_of, outputs_of, uncompiled, with_logits
from doublehead.last_map import LastMap
from doublehead.plumbing import (
    Endless,
    Randomness,
    StaysFloat32,
    Verdicts,
    average_over_processes,
    device_of,
    evaluating,
    rank,
    same_on_all_processes,
    seeded,
    unpack,
)

Reads: TypeAlias = Literal["features", "logits", "statistics"]
Kind: TypeAlias = Literal["mlp", "temperature"]
LOWEST = -1e9  # below a row's largest logit: a class masked out with -inf has no probability here either
LEAST_HIDDEN = 16  # of a temperature head: what was measured; half of the 13 statistics would be 6
# The paper's, and those of the safest of auto's candidates, which is the default (docs/results/candidates.md).
LR = {"mlp": 0.1, "temperature": 0.03}  # of SGD
BETA0 = {"mlp": 1.2, "temperature": 1.0}


class Heads(NamedTuple):
    """The logits of both heads, (B, K) each."""

    main: Tensor
    calib: Tensor


class Readings(NamedTuple):
    """What a calibration head needs to know of some data: features (N, F), main logits (N, K), labels (N,)."""

    features: Tensor
    main: Tensor
    labels: Tensor


class CalibrationHead(StaysFloat32):
    """A shallow network that turns what the main network knows of a sample into calibrated logits.

    `kind="temperature"` gives one positive number per sample, an inverse temperature that scales the main logits: it
    never changes a prediction and needs little data. `kind="mlp"` is the paper's head: inputs -> hidden -> K logits
    of its own. Unless `reads` says otherwise the first reads statistics of the logits, the second the features.
    `hidden` is half the input's size unless given, for a temperature at least 16; 0 makes the head linear. `lr` and
    `annealing` are what an `Alternation` trains the head with if it is not told otherwise.

    >>> head = CalibrationHead(n_features=64, n_classes=10)
    >>> features, main = torch.randn(5, 64), torch.randn(5, 10)
    >>> bool((head(features, main).argmax(1) == main.argmax(1)).all())
    True
    >>> head.reads, head.hidden, head.lr, head.annealing
    (('statistics',), 16, 0.03, Annealing(beta0=1.0))
    """

    def __init__(
        self,
        n_features: int,
        n_classes: int,
        kind: Kind = "temperature",
        hidden: int | None = None,
        *,
        reads: Reads | Sequence[Reads] | None = None,
        dropout: float = 0.0,
        standardise: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.reads = what_it_reads(kind, reads)
        sizes = {"features": n_features, "logits": n_classes, "statistics": min(N_TOP, n_classes) + 3}
        if not self.reads or not set(self.reads) <= set(sizes):
            raise ValueError(f"reads must be one or several of {sorted(sizes)}, got {reads!r}")
        size = sum(sizes[part] for part in self.reads)
        self.kind, self.dropout, self.lr = kind, dropout, LR[kind]
        self.hidden = (
            max(LEAST_HIDDEN if kind == "temperature" else 1, size // 2) if hidden is None else hidden
        )
        # Features come out of the network in a tame range; logits and their statistics do not.
        wants = self.reads != ("features",) if standardise is None else standardise
        self.standardise = Standardise(size) if wants else nn.Identity()
        self.after = LastMap()  # changes nothing until it is fitted, after training
        n_out = n_classes if kind == "mlp" else 1
        with seeded(seed):  # the caller's random numbers stay as they were
            self.first = nn.Linear(size, self.hidden) if self.hidden else nn.Identity()
            self.last = nn.Linear(self.hidden or size, n_out)
        if kind == "temperature":  # start at an inverse temperature of 1
            nn.init.zeros_(self.last.weight)
            nn.init.constant_(self.last.bias, math.log(math.e - 1))

    @property
    def annealing(self) -> Annealing:
        """How beta runs where an `Alternation` is not told otherwise."""
        return Annealing(BETA0[self.kind])

    def forward(self, features: Tensor, main: Tensor) -> Tensor:
        """Features (B, F) and main logits (B, K) -> calibrated logits (B, K), in float32 whatever comes in."""
        with torch.autocast(main.device.type, enabled=False):
            calibrated: Tensor = self.after(
                self.calibrate(self.standardise(self.gather(features, main)), main)
            )
            return calibrated

    def follow(self, features: Tensor, main: Tensor, fine: Tensor) -> None:
        """Let the moments of what the head reads go along with a calibration batch that is `fine`."""
        if isinstance(self.standardise, Standardise):
            self.standardise.follow(self.gather(features, main), fine)

    def gather(self, features: Tensor, main: Tensor) -> Tensor:
        """What the head reads, side by side, (B, size)."""
        parts = {"features": features.float(), "logits": main.float()}
        if "statistics" in self.reads:
            parts["statistics"] = statistics(main)
        return torch.cat([parts[name] for name in self.reads], -1)

    def calibrate(self, inputs: Tensor, main: Tensor) -> Tensor:
        """Standardised inputs (B, size) and main logits (B, K) -> calibrated logits (B, K)."""
        if self.hidden:
            inputs = F.relu(self.first(inputs))
        out: Tensor = self.last(F.dropout(inputs, self.dropout, self.training))
        if self.kind == "mlp":
            return out
        # Below the largest logit, which stays exactly 0, so rounding can never make a new tie at the top.
        below = (main.float() - main.float().amax(-1, keepdim=True)).clamp(min=LOWEST)
        return below * F.softplus(out).clamp(min=1e-6)


def what_it_reads(kind: Kind, reads: Reads | Sequence[Reads] | None) -> tuple[str, ...]:
    """The parts that a head of this kind reads: those named, or its usual one.

    >>> what_it_reads("mlp", None), what_it_reads("temperature", ("logits", "features"))
    (('features',), ('logits', 'features'))
    """
    if kind not in LR:
        raise ValueError(f"kind must be 'mlp' or 'temperature', got {kind!r}")
    if reads is None:
        return ("features",) if kind == "mlp" else ("statistics",)
    return (reads,) if isinstance(reads, str) else tuple(reads)


class DoubleHead(nn.Module):
    """Any classifier with a calibration head beside it.

    In training mode it returns what `model` returns. In evaluation mode it returns the calibrated logits in the
    same form. `heads(x)` gives both. `kind`, `reads` and `hidden` are those of a `CalibrationHead`; the default head
    scales each sample's logits by a temperature of its own, `kind="mlp"` is the paper's. What reads features reads the
    input of the model's last linear layer, found by itself or named by `layer`; the model is not changed. `n_classes`
    is what that layer gives out, unless given. `head` takes a head of your own, or a function
    `(n_features, n_classes) -> head`.

    >>> model = DoubleHead(nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    >>> model.eval().heads(torch.randn(5, 8)).calib.shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        n_classes: int | None = None,
        *,
        reads: Reads | Sequence[Reads] | None = None,
        kind: Kind = "temperature",
        hidden: int | None = None,
        layer: str | None = None,
        n_features: int | None = None,
        head: nn.Module | Callable[[int, int], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_innermost(model)
        self.model = model
        wants_features = head is not None or "features" in what_it_reads(kind, reads)
        self._tap = FeatureTap()
        if wants_features or n_classes is None:
            name, last = find_last_layer(model, layer, n_classes)
            n_classes = n_classes or outputs_of(last)
            if wants_features:
                self._tap = FeatureTap.on(model, last, name, n_features)
            if n_classes is None:
                raise ValueError(f"n_classes must be given: layer {name!r} does not state it")
        if isinstance(head, nn.Module):
            self.head = head
        elif head is not None:
            self.head = head(self._tap.n_features, n_classes)
        else:
            self.head = CalibrationHead(self._tap.n_features, n_classes, kind, hidden, reads=reads, seed=seed)
        self.head.to(device_of(model))
        # DistributedDataParallel must not wait for gradients that the main loss never makes.
        self._ddp_params_and_buffers_to_ignore = [f"head.{key}" for key in self.head.state_dict()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; in evaluation mode with calibrated logits in place of its own."""
        if self.training:
            return self.model(*args, **kwargs)
        output, features = self._tap.run(self.model, args, kwargs)
        return with_logits(output, self.head(features, logits_of(output)))

    def heads(self, *args: Any, **kwargs: Any) -> Heads:
        """Main and calibrated logits, in either mode. The calibrated ones carry no gradient in training mode."""
        output, features = self._tap.run(self.model, args, kwargs)
        main = logits_of(output)
        if self.training:
            return Heads(main, self.head(features.detach(), main.detach()))
        return Heads(main, self.head(features, main))

    def main_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the wrapped model alone: what your own optimizer should train."""
        return self.model.parameters()

    @torch.no_grad()
    def read(self, batches: Iterable[Any], enough: float = math.inf) -> Readings:
        """Run over `batches` of (inputs, labels) in evaluation mode and keep features, main logits and labels.

        The model runs as it was before any torch.compile: here batches differ in size. No batch is asked for once
        there are `enough` samples.
        """
        rows: list[tuple[Tensor, ...]] = []
        model, n = uncompiled(self.model), 0
        with evaluating(self):
            for batch in batches:
                args, kwargs, labels = unpack(batch, device_of(self))
                output, features = self._tap.run(model, args, kwargs)
                rows.append((features.float(), logits_of(output).float(), labels))
                n += len(labels)
                if n >= enough:
                    break
        if not rows:
            raise ValueError("batches must hold at least one batch, got none")
        return Readings(*(torch.cat(parts) for parts in zip(*rows)))


@dataclass(frozen=True)
class Annealing:
    """beta as a function of progress within the epoch: from beta0 straight to 1 (the paper's Eq. 5).

    beta0 > 1 makes the head more humble, beta0 < 1 bolder; beta0 = 1 switches annealing off.

    >>> anneal = Annealing(1.2)
    >>> round(anneal(0.0), 6), round(anneal(0.5), 6), anneal(1.0)
    (1.2, 1.1, 1.0)
    """

    beta0: float | Tensor = 1.2

    def __post_init__(self) -> None:
        if not bool(torch.as_tensor(self.beta0).gt(0).all()):
            raise ValueError(f"beta0 must be positive, got {self.beta0}")

    def __call__(self, progress: float) -> Any:
        """beta at `progress` in 0..1; a tensor where beta0 is one."""
        if not 0.0 <= progress <= 1.0:
            raise ValueError(
                f"progress must lie in 0..1 (the share of the epoch that is over), got {progress}"
            )
        return 1 + (self.beta0 - 1) * (1 - progress)


class Alternation:
    """Train the calibration head beside the network: one step on calibration data in every k calls of `step`.

    Call `step(progress)` after each step of your own optimizer, inside your autocast block if you have one. The
    network runs in evaluation mode without gradient, only the head learns. Random numbers, optimizer and
    place in the calibration data are its own, so your training goes on exactly as it would without it.

    `calib_batches` is iterated again and again: pairs (inputs, labels) or dicts with "labels". `augment` perturbs the
    inputs (for calibration under distribution shift). `annealing` is the head's own unless given.

    A head learns by SGD at a rate of its own, whatever the network's optimizer: `head.lr`, or 0.1 where a head has
    none. `lr` is another rate, or your optimizer: then the head's rate follows the shape of its schedule, as the
    optimizer's highest rate shows it, and is the head's own (or `peak_lr`) at the peak; or, if `lr_scale` is given,
    that many times the optimizer's rate at any time. The peak is what a scheduler noted in the optimizer, so make that
    first; one that comes unannounced is taken as it comes, and the head's rate is never above its own.
    `optimizer` makes another optimizer than SGD: `optimizer(parameters, lr=...)`.

    In the first steps a deep network in evaluation mode gives features of any size, since BatchNorm's averages are
    not there yet; one such batch can end a head. So the head's gradient is clipped to a 2-norm of `clip` (its usual
    size is below 1; `clip=math.inf` is the paper's method to the letter), and a batch on which the network is ten
    times worse than guessing is passed over. A calibration loss that is not finite skips the step, is counted in
    `skipped`, warned about once, and raises after `patience` of them in a row.
    """

    def __init__(
        self,
        model: nn.Module,
        calib_batches: Iterable[Any],
        *,
        every: int = 10,
        annealing: Annealing | None = None,
        augment: Callable[[Any], Any] | None = None,
        lr: float | torch.optim.Optimizer | None = None,
        lr_scale: float | None = None,
        peak_lr: float | None = None,
        weight_decay: float = 5e-5,
        momentum: float = 0.9,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        clip: float = 1.0,
        patience: int = 20,
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.model = double_head_in(model)
        self.head: Any = self.model.head
        self.calib_batches, self.every, self.augment = calib_batches, every, augment
        self.clip, self.patience = clip, patience
        self.annealing = annealing or getattr(self.head, "annealing", None) or Annealing()
        own = getattr(self.head, "lr", LR["mlp"]) if peak_lr is None else peak_lr
        self.rate = HeadRate(lr, peak=own, scale=lr_scale)
        if optimizer is not None:
            self.optimizer = optimizer(self.head.parameters(), lr=self.rate.now())
        else:
            groups = getattr(self.head, "parameter_groups", self.head.parameters)
            self.optimizer = HeadSGD(groups(), self.rate.now(), momentum, weight_decay)
        self._randomness = Randomness(seed + rank(), device_of(self.model))
        self._batches, self._verdicts = Endless(calib_batches, self._randomness), Verdicts()
        self.calls = self._skipped = self._skipped_in_a_row = 0
        self.beta: Any = None
        self.grad_norm: Tensor | None = None  # of the last calibration step, before clipping; (H,) of a bank
        same_on_all_processes(self.head)

    @property
    def skipped(self) -> int:
        """How many calibration steps were left out because their loss was not finite."""
        self._count(wait=True)
        return self._skipped

    def step(self, progress: float) -> Tensor | None:
        """Count one step of the network; on every k-th train the head once and return the calibration loss."""
        self.calls += 1
        if self.calls % self.every:
            return None
        self.beta = self.annealing(progress)
        with self._randomness.swapped_in():
            args, kwargs, labels = unpack(self._batches.next(), device_of(self.model))
            folds = fold_of(args, kwargs) if getattr(self.head, "has_folds", False) else None
            if self.augment is not None:
                args = (self.augment(args[0]), *args[1:]) if args else args
                kwargs = kwargs if args else self.augment(kwargs)
            with torch.no_grad(), evaluating(self.model):
                if self.model.model is not uncompiled(self.model.model):
                    torch.compiler.cudagraph_mark_step_begin()  # what the network's last step returned is used up
                output, features = self.model._tap.run(self.model.model, args, kwargs)
            return self._train_head(features, logits_of(output), labels, folds)

    def _train_head(self, features: Tensor, main: Tensor, labels: Tensor, folds: Tensor | None) -> Tensor:
        """One step of the head. Everything stays on the device: the network's next step need not wait."""
        sane = average_over_processes(_nll(main.float(), labels).mean()) < 10 * math.log(main.shape[-1])
        if hasattr(self.head, "follow"):
            self.head.follow(features, main, sane)
        self.head.train()
        with torch.enable_grad():
            losses = _nll(
                self.beta * self.head(features, main), labels
            )  # (B,), or (H, B) from a bank of H heads
            losses = losses.mean(-1) if folds is None else (losses * self.head.weights(folds)).sum(-1)
            losses.sum().backward()
        self.head.train(self.model.training)
        losses = average_over_processes(losses.detach())
        gradients = [average_over_processes(p.grad) for p in self.head.parameters() if p.grad is not None]
        norms = self.head.grad_norms() if losses.ndim else torch.nn.utils.get_total_norm(gradients)
        fine = torch.isfinite(losses) & torch.isfinite(norms)
        self._move(fine & sane, (self.clip / norms).clamp(max=1.0), gradients)
        # Without gradients an optimizer over all of the model's parameters leaves the head alone.
        self.optimizer.zero_grad(set_to_none=True)
        self.grad_norm = norms
        self._verdicts.ask(fine.any())
        self._count()
        return losses

    def _move(self, fine: Tensor, shrink: Tensor, gradients: list[Tensor]) -> None:
        if self.rate.follows:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate.now()
        if isinstance(self.optimizer, HeadSGD):
            self.optimizer.step(fine, shrink)
        elif bool(fine.all()):  # another optimizer cannot leave a step out by itself
            for gradient in gradients:
                gradient.mul_(shrink)
            self.optimizer.step()

    def _count(self, wait: bool = False) -> None:
        """Look at the steps whose verdict has come over from the device."""
        for fine in self._verdicts.come(wait):
            self._skipped += not fine
            self._skipped_in_a_row = 0 if fine else self._skipped_in_a_row + 1
            if self._skipped_in_a_row >= self.patience:
                raise FloatingPointError(
                    f"the calibration loss was not finite {self._skipped_in_a_row} times in a row: lower the "
                    "calibration lr, or see whether the network itself still gives finite logits"
                )
            if not fine and self._skipped == 1:
                warnings.warn(
                    "the calibration loss is not finite: this step of the calibration head is skipped; "
                    "further ones are counted in Alternation.skipped",
                    stacklevel=4,
                )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the head's weights, which are in the model's own state."""
        return {
            "calls": self.calls,
            "skipped": [self.skipped, self._skipped_in_a_row],
            "optimizer": self.optimizer.state_dict(),
            **self.rate.state_dict(),
            "rank": rank(),
            "randomness": self._randomness.state,
            "batches": self._batches.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, given the same calibration data.

        From another process's state come its steps alone: each process draws calibration batches of its own.
        """
        self.calls = state["calls"]
        self._skipped, self._skipped_in_a_row = state["skipped"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.rate.load_state_dict(state)
        if state.get("rank", rank()) == rank():
            self._batches.load_state_dict(state["batches"])
            self._randomness.state = dict(state["randomness"])


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy per sample of logits (B, K), or of each of H heads for (H, B, K)."""
    at_labels = logits.gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1) - at_labels


N_FOLDS = 5


def fold_of(args: Sequence[Any], kwargs: Mapping[str, Any], n_folds: int = N_FOLDS) -> Tensor:
    """(B,) the fold, 0 to n_folds - 1, that each sample belongs to, by what it contains.

    The same sample is in the same fold in every epoch, wherever it stands in whatever order, and equal samples are in
    the same one. Folds are about equal in size. Zeros at the end of a row, such as padding, change nothing.
    """
    total: Any = 0
    for value in (*args, *(kwargs[key] for key in sorted(kwargs))):
        if isinstance(value, Tensor) and value.ndim:
            rows = value.detach().flatten(1) if value.ndim > 1 else value.detach()[:, None]
            if rows.is_floating_point():
                rows = rows.contiguous().view(
                    {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
                )
            places = torch.arange(rows.shape[1], device=rows.device)
            weights = (places * 2654435761 + 40503) | 1
            total = total + (rows.long() * weights).sum(1)
    return (((total * 0x9E3779B1) >> 24) & 0xFFFFFF) % n_folds


def _check_innermost(model: nn.Module) -> None:
    """An error for a model that has a DoubleHead, or a guard that belongs round one, inside."""
    model = uncompiled(model)
    for name, part in model.named_modules():
        if isinstance(part, DoubleHead) or getattr(part, "goes_round_double_head", False):
            kind = type(part).__name__
            got = f"{type(model).__name__} with a {kind} as {name!r}" if name else f"a {kind}"
            raise ValueError(
                f"model must be a classifier without a DoubleHead or ShiftGuard, got {got}: put the DoubleHead round "
                "the network itself, and a ShiftGuard round the DoubleHead"
            )


def double_head_in(model: nn.Module, name: str = "model") -> DoubleHead:
    """The DoubleHead inside what DDP, Fabric or torch.compile wrapped round it; errors call it `name`."""
    inner: Any = model
    while not isinstance(inner, DoubleHead):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise TypeError(
                f"{name} must be a DoubleHead (inside DDP, Fabric or torch.compile, if you like), "
                f"got {type(model).__name__}"
            )
    return inner
