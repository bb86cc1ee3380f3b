"""Annealing Double-Head: a calibration head beside a normal network. This file is the whole method.

A shallow `CalibrationHead` reads what the network knows about a sample (the features before its last layer, its
logits, or a few statistics of them) and gives calibrated logits. `DoubleHead` puts it beside any classifier.
`Alternation` trains it: once every k steps of the network, on calibration data that the network never trains on,
with the logits scaled by beta, which `Annealing` lets run from beta0 to 1 within each epoch. The network itself is
not touched: its weights after training are bit-identical with and without the calibration head.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.last_layer import FeatureTap, find_last_layer, logits_of, uncompiled, with_logits
from doublehead.plumbing import (
    Endless,
    Randomness,
    average_over_processes,
    device_of,
    evaluating,
    rank,
    same_on_all_processes,
    seeded,
    unpack,
)

Reads: TypeAlias = Literal["features", "logits", "statistics"]
N_TOP = 10  # how many of the largest log-probabilities the statistics hold


class Heads(NamedTuple):
    """The logits of both heads, (B, K) each."""

    main: Tensor
    calib: Tensor


class Readings(NamedTuple):
    """What a calibration head needs to know of some data: features (N, F), main logits (N, K), labels (N,)."""

    features: Tensor
    main: Tensor
    labels: Tensor


def statistics(logits: Tensor) -> Tensor:
    """What logits say about themselves, (B, K) -> (B, min(K, 10) + 3).

    The largest log-probabilities in falling order, then log-sum-exp, entropy and the largest logit.
    """
    logits = logits.float()
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    top = log_probs.topk(min(N_TOP, logits.shape[-1]), -1).values
    return torch.cat([top, logits.logsumexp(-1, keepdim=True), entropy, logits.amax(-1, keepdim=True)], -1)


class Standardise(nn.Module):
    """Subtract the mean and divide by the deviation of the calibration data seen so far.

    The moments follow the network as it learns: a plain average over the first 50 batches, then an
    exponential one. They change in training mode only and are part of the state.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.ones(size))
        self.register_buffer("batches", torch.zeros(()))
        self.mean: Tensor
        self.square: Tensor
        self.batches: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """(B, size) -> (B, size)."""
        if self.training:
            self._follow(values.detach())
        variance = (self.square - self.mean.square()).clamp(min=1e-6)
        return (values - self.mean) * variance.rsqrt()

    def _follow(self, values: Tensor) -> None:
        moments = average_over_processes(torch.stack([values.mean(0), values.square().mean(0)]))
        fine = torch.isfinite(moments).all()  # stays on the device; a broken batch is left out
        self.batches += fine
        rate = fine * self.batches.clamp(min=1).reciprocal().clamp(min=0.02)
        moments = moments.nan_to_num(0.0, 0.0, 0.0)
        self.mean.lerp_(moments[0], rate)
        self.square.lerp_(moments[1], rate)


class CalibrationHead(nn.Module):
    """A shallow network that turns what the main network knows of a sample into calibrated logits.

    `kind="mlp"` is the paper's head: inputs -> hidden -> K logits of its own. `kind="temperature"` gives one positive
    number per sample, an inverse temperature that scales the main logits: it never changes a prediction and
    needs far less data. `hidden` is half the input's size unless given; 0 makes the head linear.

    >>> head = CalibrationHead(n_features=64, n_classes=10, kind="temperature")
    >>> features, main = torch.randn(5, 64), torch.randn(5, 10)
    >>> bool((head(features, main).argmax(1) == main.argmax(1)).all())
    True
    """

    def __init__(
        self,
        n_features: int,
        n_classes: int,
        kind: Literal["mlp", "temperature"] = "mlp",
        hidden: int | None = None,
        *,
        reads: Reads | Sequence[Reads] = "features",
        dropout: float = 0.0,
        standardise: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.reads: tuple[str, ...] = (reads,) if isinstance(reads, str) else tuple(reads)
        sizes = {"features": n_features, "logits": n_classes, "statistics": min(N_TOP, n_classes) + 3}
        if not self.reads or not set(self.reads) <= set(sizes):
            raise ValueError(f"reads must be one or several of {sorted(sizes)}, got {reads!r}")
        if kind not in ("mlp", "temperature"):
            raise ValueError(f"kind must be 'mlp' or 'temperature', got {kind!r}")
        size = sum(sizes[part] for part in self.reads)
        self.kind, self.dropout = kind, dropout
        self.hidden = max(1, size // 2) if hidden is None else hidden
        # Features come out of the network in a tame range; logits and their statistics do not.
        wants = self.reads != ("features",) if standardise is None else standardise
        self.standardise = Standardise(size) if wants else nn.Identity()
        n_out = n_classes if kind == "mlp" else 1
        with seeded(seed):  # the caller's random numbers stay as they were
            self.first = nn.Linear(size, self.hidden) if self.hidden else nn.Identity()
            self.last = nn.Linear(self.hidden or size, n_out)
        if kind == "temperature":  # start at an inverse temperature of 1
            nn.init.zeros_(self.last.weight)
            nn.init.constant_(self.last.bias, math.log(math.e - 1))

    def forward(self, features: Tensor, main: Tensor) -> Tensor:
        """Features (B, F) and main logits (B, K) -> calibrated logits (B, K), in float32 whatever comes in."""
        with torch.autocast(main.device.type, enabled=False):
            return self.calibrate(self.standardise(self.gather(features, main)), main)

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
        below = main.float() - main.float().amax(-1, keepdim=True)
        return below * F.softplus(out).clamp(min=1e-6)


class DoubleHead(nn.Module):
    """Any classifier with a calibration head beside it.

    In training mode it returns what `model` returns. In evaluation mode it returns the calibrated logits in the
    same form. `heads(x)` gives both. The head reads the input of the model's last linear layer, found by itself or
    named by `layer`; the model is not changed. `head` takes a head of your own, or a function
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
        reads: Reads | Sequence[Reads] = "features",
        kind: Literal["mlp", "temperature"] = "mlp",
        hidden: int | None = None,
        layer: str | None = None,
        n_features: int | None = None,
        head: nn.Module | Callable[[int, int], nn.Module] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        names = (reads,) if isinstance(reads, str) else tuple(reads)
        self._tap = FeatureTap()
        if head is not None or "features" in names or n_classes is None:
            name, last = find_last_layer(model, layer, n_classes)
            self._tap = FeatureTap(last, name, n_features)
            n_classes = n_classes or self._tap.n_classes
        if n_classes is None:
            raise ValueError(f"n_classes must be given: layer {self._tap.name!r} does not state it")
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
    def read(self, batches: Iterable[Any]) -> Readings:
        """Run over `batches` of (inputs, labels) in evaluation mode and keep features, main logits and labels.

        The model runs as it was before any torch.compile: here batches differ in size.
        """
        rows, model = [], uncompiled(self.model)
        with evaluating(self):
            for batch in batches:
                args, kwargs, labels = unpack(batch, device_of(self))
                output, features = self._tap.run(model, args, kwargs)
                rows.append((features.float(), logits_of(output).float(), labels))
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
    inputs (for calibration under distribution shift). `lr` is a number, or your optimizer, whose first learning
    rate, times `lr_scale`, is then followed. `optimizer` makes another optimizer than SGD:
    `optimizer(parameters, lr=...)`.
    A calibration loss that is not finite skips the step, is counted in `skipped`, and raises after
    `patience` of them in a row.
    """

    def __init__(
        self,
        model: nn.Module,
        calib_batches: Iterable[Any],
        *,
        every: int = 10,
        annealing: Annealing | None = None,
        augment: Callable[[Any], Any] | None = None,
        lr: float | torch.optim.Optimizer = 0.1,
        lr_scale: float = 1.0,
        weight_decay: float = 5e-5,
        momentum: float = 0.9,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        watch_gradients: bool = False,
        patience: int = 20,
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.model = _unwrap(model)
        self.head = self.model.head
        self.calib_batches, self.every, self.augment, self.patience = calib_batches, every, augment, patience
        self.annealing = annealing or getattr(self.head, "annealing", None) or Annealing()
        self._followed = lr if isinstance(lr, torch.optim.Optimizer) else None
        self.lr_scale, self.watch_gradients = lr_scale, watch_gradients
        rate: Any = (self._followed.param_groups[0]["lr"] if self._followed else lr) * lr_scale
        if optimizer is not None:
            self.optimizer = optimizer(self.head.parameters(), lr=rate)
        else:
            make = getattr(self.head, "make_optimizer", None) or partial(_sgd, self.head)
            self.optimizer = make(lr=rate, momentum=momentum, weight_decay=weight_decay)
        self._randomness = Randomness(seed + rank(), device_of(self.model))
        self._batches = Endless(calib_batches, self._randomness)
        self.calls = self.skipped = self._skipped_in_a_row = 0
        self.beta: Any = None
        self.grad_norm: Tensor | None = None  # of the last calibration step; (H,) of a bank, if watched
        same_on_all_processes(self.head)

    def step(self, progress: float) -> Tensor | None:
        """Count one step of the network; on every k-th train the head once and return the calibration loss."""
        self.calls += 1
        if self.calls % self.every:
            return None
        self.beta = self.annealing(progress)
        with self._randomness.swapped_in():
            args, kwargs, labels = unpack(self._batches.next(), device_of(self.model))
            if self.augment is not None:
                args = (self.augment(args[0]), *args[1:]) if args else args
                kwargs = kwargs if args else self.augment(kwargs)
            with torch.no_grad(), evaluating(self.model):
                output, features = self.model._tap.run(self.model.model, args, kwargs)
            return self._train_head(features, logits_of(output), labels)

    def _train_head(self, features: Tensor, main: Tensor, labels: Tensor) -> Tensor:
        self.head.train()
        with torch.enable_grad():
            logits = self.beta * self.head(features, main)  # (B, K), or (H, B, K) from a bank of H heads
            losses = (logits.logsumexp(-1) - _at(logits, labels)).mean(-1)  # (), or (H,)
            losses.sum().backward()
        self.head.train(self.model.training)
        losses = average_over_processes(losses.detach())
        gradients = [average_over_processes(p.grad) for p in self.head.parameters() if p.grad is not None]
        if losses.ndim == 0:
            self.grad_norm = torch.nn.utils.get_total_norm(gradients)
            fine = torch.isfinite(losses + self.grad_norm)
        else:
            self.grad_norm = self.head.grad_norms() if self.watch_gradients else None
            fine = torch.isfinite(losses).any()
        if bool(fine):
            self._skipped_in_a_row = 0
            if self._followed:
                for group in self.optimizer.param_groups:
                    group["lr"] = self._followed.param_groups[0]["lr"] * self.lr_scale
            self.optimizer.step()
        else:
            self._skip(losses)
        self.optimizer.zero_grad(
            set_to_none=True
        )  # so that an optimizer over all parameters leaves the head alone
        return losses

    def _skip(self, losses: Tensor) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.patience:
            raise FloatingPointError(
                f"the calibration loss was not finite {self._skipped_in_a_row} times in a row (now {losses.tolist()}): "
                "lower the calibration lr, or see whether the network itself still gives finite logits"
            )
        if self.skipped == 1:
            warnings.warn(
                f"calibration loss is {losses.tolist()}: this step of the calibration head is skipped; "
                "further ones are counted in Alternation.skipped",
                stacklevel=4,
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the head's weights, which are in the model's own state."""
        return {
            "calls": self.calls,
            "skipped": [self.skipped, self._skipped_in_a_row],
            "optimizer": self.optimizer.state_dict(),
            "randomness": self._randomness.state,
            "batches": self._batches.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, given the same calibration data."""
        self.calls = state["calls"]
        self.skipped, self._skipped_in_a_row = state["skipped"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._batches.load_state_dict(state["batches"])
        self._randomness.state = dict(state["randomness"])


def _at(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each label, for (B, K) and for (H, B, K)."""
    return logits.gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def _sgd(head: nn.Module, lr: float, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(head.parameters(), lr, momentum, weight_decay=weight_decay, nesterov=momentum > 0)


def _unwrap(model: nn.Module) -> DoubleHead:
    inner: Any = model
    while not isinstance(inner, DoubleHead):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise TypeError(
                "model must be a DoubleHead (inside DDP, Fabric or torch.compile, if you like), "
                f"got {type(model).__name__}"
            )
    return inner
