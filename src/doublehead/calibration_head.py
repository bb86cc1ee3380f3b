"""The calibration head: a shallow network that turns features or logits of a sample into calibrated logits.

`CalibrationHead` is one head, or a stack of equal ones that run as one computation; `HeadBank` puts stacks of
different shapes side by side. How heads are trained is in `head_training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from doublehead.calibration_data import N_FOLDS
from doublehead.torch_tools import StaysFloat32, average_over_processes, seeded, without_autocast

Reads = Literal["features", "logits", "statistics"]
N_TOP = 10  # largest log-probabilities among the statistics
MIN_LOG_PROB = -1e4  # classes masked with -inf are a constant there
MIN_LOGIT = -1e9  # below a row's largest: a class masked with -inf keeps probability 0
MAX_LOG_SCALE = 4.0  # a sample's temperature stays within e^-4 .. e^4
MIN_HIDDEN = 16  # of a temperature head
MAX_HIDDEN = 256  # of the heads of the second opinion


@dataclass(frozen=True)
class HeadSpec:
    """One head and how it is trained.

    `kind="mlp"` is the paper's head: features -> hidden -> K logits of its own. `kind="temperature"` gives one
    inverse temperature per sample, which scales the main logits, so predictions never change; it reads statistics
    of the logits unless `reads` says otherwise. `hidden` is half the input's size unless given; 0 makes the head
    linear. `lr` is its peak learning rate, `beta0` where annealing starts (1 switches it off), `fold` the fold of
    the calibration data that it never trains on.

    >>> PAPER
    HeadSpec(kind='mlp', hidden=None, reads=('features',), dropout=0.0, lr=0.1, beta0=1.2, fold=None, seed=0)
    """

    kind: Literal["mlp", "temperature"] = "mlp"
    hidden: int | None = None
    reads: Reads | tuple[Reads, ...] | None = None
    dropout: float = 0.0
    lr: float | None = None
    beta0: float | None = None
    fold: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("mlp", "temperature"):
            raise ValueError(f"kind must be 'mlp' or 'temperature', got {self.kind!r}")
        mlp = self.kind == "mlp"
        usual = {"lr": 0.1 if mlp else 0.03, "beta0": 1.2 if mlp else 1.0}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        reads = self.reads or ("features" if mlp else "statistics")
        object.__setattr__(self, "reads", (reads,) if isinstance(reads, str) else tuple(reads))
        known = ("features", "logits", "statistics")
        if not set(self.reads) <= set(known):  # type: ignore[arg-type]
            raise ValueError(f"reads must be one or several of {known}, got {reads!r}")
        if not self.beta0 > 0:  # type: ignore[operator]
            raise ValueError(f"beta0 must be positive, got {self.beta0}")

    @property
    def shape(self) -> HeadSpec:
        """The spec without what may differ within a stack."""
        return replace(self, lr=1.0, beta0=1.0, fold=None, seed=0)


PAPER = HeadSpec()  # the method of the paper


def second_opinion(n_features: int) -> list[HeadSpec]:
    """The paper's head five times, each trained without another fold of the calibration data."""
    spec = replace(PAPER, hidden=max(1, min(MAX_HIDDEN, n_features // 2)), dropout=0.5)
    return [replace(spec, fold=fold, seed=fold) for fold in range(N_FOLDS)]


class Pass(NamedTuple):
    """What heads compute for a batch: inputs (H, B, size), hidden (H, B, hidden), out (H, n_out, B), logits (H, K, B).

    Samples come last: on a CPU a softmax over the last dimension is slow for few classes.
    """

    inputs: Tensor
    hidden: Tensor
    out: Tensor
    logits: Tensor
    scale: float  # of hidden in out, which makes up for dropout


class CalibrationHead(StaysFloat32):
    """A calibration head, or a stack of H heads that differ in their weights alone.

    Called with main logits (B, K) and features (B, F) it gives calibrated logits, (B, K), or (H, B, K) for a stack.
    Where samples have `n_labels` independent labels, rows are pairs of a sample and a label with the logits of no and
    yes: main logits and answers are (B L, 2), features (B, F). A head of kind "mlp" then answers all labels of a sample
    at once, one of kind "temperature" each pair by itself.

    >>> head = CalibrationHead(64, 10, HeadSpec(kind="temperature"))
    >>> main = torch.randn(5, 10)
    >>> torch.equal(head(main, torch.randn(5, 64)).argmax(1), main.argmax(1))
    True
    """

    def __init__(
        self, n_features: int, n_classes: int, *specs: HeadSpec, n_labels: int | None = None
    ) -> None:
        super().__init__()
        specs = specs or (PAPER,)
        spec = specs[0]
        if any(one.shape != spec.shape for one in specs):
            raise ValueError("the heads of one CalibrationHead must have the same shape; HeadBank takes any")
        self.n_labels = n_labels if spec.kind == "mlp" else None
        n_logits = self.n_labels or n_classes
        sizes = {"features": n_features, "logits": n_logits, "statistics": min(N_TOP, n_classes) + 3}
        self.reads: tuple[str, ...] = spec.reads  # type: ignore[assignment]
        other = "statistics" if spec.kind == "mlp" else "features"  # of pairs, or of samples
        if n_labels and other in self.reads:
            raise ValueError(f"reads must not hold {other!r} for kind {spec.kind!r} and several labels")
        if "features" in self.reads and n_features == 0:
            raise ValueError(
                "this head reads features, and none were found that belong to the network's logits: name the last "
                "layer with layer='...', give heads=HeadSpec(kind='temperature'), or calibrate after training"
            )
        self.specs, self.n_features, self.n_classes, self.size = (
            specs, n_features, n_classes, sum(sizes[part] for part in self.reads)
        )  # fmt: skip
        usual = max(1 if spec.kind == "mlp" else MIN_HIDDEN, self.size // 2)
        self.hidden = usual if spec.hidden is None else spec.hidden
        # Tensors, since comparing with a number is slower.
        self._dropout, self._zero = torch.tensor([spec.dropout, 0.0], dtype=torch.float32)
        # Features come in a moderate range; logits and their statistics do not.
        self.standardise = Standardise(self.size) if self.reads != ("features",) else None
        n_out = n_logits if spec.kind == "mlp" else 1
        layers = [_initial(self.size, self.hidden, n_out, one.seed) for one in specs]
        names = ("first_weight", "first_bias", "last_weight", "last_bias")
        for name, parts in zip(names if self.hidden else names[2:], zip(*layers)):
            self.register_parameter(name, nn.Parameter(torch.stack(parts)))  # (H, ...)
        if spec.kind == "temperature":  # start at an inverse temperature of 1
            nn.init.zeros_(self.last_weight)
            nn.init.zeros_(self.last_bias)

    first_weight: Tensor  # (H, hidden, size); a linear head has no first layer
    first_bias: Tensor  # (H, hidden)
    last_weight: Tensor  # (H, n_out, hidden)
    last_bias: Tensor  # (H, n_out)

    def forward(self, main: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits in float32, for inputs of any type."""
        with without_autocast(main.device.type):
            logits = self.run(main, features).logits.mT
        return logits[0] if len(self.specs) == 1 else logits

    def inputs(self, main: Tensor, features: Tensor | None) -> Tensor:
        """What the head reads, side by side, (B, size)."""
        parts = []
        for name in self.reads:
            if name == "statistics":
                parts.append(statistics(main).float())
            elif name == "logits":
                odds = main if self.n_labels is None else (main[:, 1] - main[:, 0]).view(-1, self.n_labels)
                parts.append(odds.float())
            else:
                assert features is not None
                parts.append(features.float())
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def run(self, main: Tensor, features: Tensor | None, generator: torch.Generator | None = None) -> Pass:
        """The logits, and what their gradients need; dropout draws from `generator`."""
        spec, n_heads = self.specs[0], len(self.specs)
        weights: Any = self._parameters  # self.first_weight is slow
        inputs = self.inputs(main, features)  # (B, size)
        inputs = inputs if self.standardise is None else self.standardise(inputs)
        inputs = inputs.expand(n_heads, -1, -1)
        hidden, scale = inputs, 1.0
        if self.hidden:
            bias = weights["first_bias"].unsqueeze(1)
            hidden = torch.baddbmm(bias, inputs, weights["first_weight"].mT).relu_()
        if self.training and spec.dropout:
            # One mask for all heads: on a CPU drawing it costs more than using it.
            how: Any = {"generator": generator, "dtype": hidden.dtype, "device": hidden.device}
            drawn = torch.rand(hidden.shape[1:], **how)
            hidden = hidden * drawn.ge_(self._dropout)  # (H, B, hidden)
            scale = 1 / (1 - spec.dropout)
        bias = weights["last_bias"].unsqueeze(2)
        out = torch.baddbmm(bias, weights["last_weight"], hidden.mT, alpha=scale)  # (H, n_out, B)
        logits = out
        if spec.kind == "temperature":
            logits = scale_logits(main, out.mT).mT
        elif self.n_labels is not None:
            odds = out.mT.flatten(1)  # (H, B L)
            logits = torch.stack([torch.zeros_like(odds), odds], 1)
        return Pass(inputs, hidden, out, logits, scale)

    def gradients(self, passed: Pass, slopes: Tensor, into: Sequence[Tensor]) -> None:
        """Write all parameters' gradients, given those of the loss by the logits, `slopes` (H, K, B), into `into`.

        Autograd gives the same, but for a small network its overhead takes longer than the gradients. `passed.hidden`
        is overwritten.
        """
        spec = self.specs[0]
        if spec.kind == "temperature":
            inside = passed.out.abs() <= MAX_LOG_SCALE
            slopes = (slopes * passed.logits).sum(1, keepdim=True).mul_(inside)  # (H, 1, B)
        elif self.n_labels is not None:
            slopes = slopes[:, 1].unflatten(1, (-1, self.n_labels)).mT  # (H, L, B)
        *first, last_weight, last_bias = into
        torch.sum(slopes, 2, out=last_bias)
        scaled: Any = {"beta": 0, "alpha": passed.scale}
        torch.baddbmm(last_weight, slopes, passed.hidden, out=last_weight, **scaled)
        if first:
            weight, bias = first
            last: Any = self._parameters["last_weight"]
            back = torch.baddbmm(passed.hidden, slopes.mT, last, **scaled)  # (H, B, hidden)
            back.mul_(passed.hidden.gt_(self._zero))  # 0 or 1, in its place: torch.sign is slow
            torch.bmm(back.mT, passed.inputs, out=weight)
            torch.sum(back, 1, out=bias)

    def check(self, main: Tensor, features: Tensor, labels: Tensor) -> None:
        """Raise an error if the shapes do not fit each other or the head."""
        n = len(labels)
        logits, inputs = (n, self.n_classes), (n // (self.n_labels or 1), self.n_features)
        fits = main.shape == logits and labels.shape in ((n,), logits)
        if not fits or ("features" in self.reads and features.shape != inputs):
            found = ", ".join(str(tuple(part.shape)) for part in (main, features, labels))
            raise ValueError(f"logits and features must be {logits} and {inputs} for {n} labels, got {found}")

    def follow(self, main: Tensor, features: Tensor, fine: Tensor) -> None:
        """Update the moments of the inputs with a calibration batch if it is `fine`, a bool tensor ()."""
        if self.standardise is not None:
            self.standardise.follow(self.inputs(main, features), fine)

    def extra_repr(self) -> str:
        """The settings, for print(head)."""
        return "\n".join(map(str, self.specs))


class HeadBank(StaysFloat32):
    """Heads of any shapes on one network: equal ones are stacked, so a sweep costs little more than one head.

    >>> bank = HeadBank(16, 3, [HeadSpec(beta0=b) for b in (1.0, 1.2, 1.5)])
    >>> bank(torch.randn(5, 3), torch.randn(5, 16)).shape
    torch.Size([3, 5, 3])
    """

    def __init__(
        self, n_features: int, n_classes: int, specs: Sequence[HeadSpec], n_labels: int | None = None
    ) -> None:
        super().__init__()
        if not specs:
            raise ValueError("specs must hold at least one HeadSpec, got none")
        self.specs = tuple(specs)
        groups: dict[HeadSpec, list[int]] = {}
        for number, spec in enumerate(self.specs):
            groups.setdefault(spec.shape, []).append(number)
        self.members = list(groups.values())
        stacks = [
            CalibrationHead(n_features, n_classes, *(self.specs[i] for i in some), n_labels=n_labels)
            for some in self.members
        ]
        self.stacks = nn.ModuleList(stacks)
        order = torch.tensor([number for numbers in self.members for number in numbers]).argsort()
        self.register_buffer("order", order, persistent=False)
        self.order: Tensor

    def forward(self, main: Tensor, features: Tensor | None = None) -> Tensor:
        """The logits of every head, (H, B, K)."""
        made = [stack(main, features) for stack in self.stacks]
        return self.in_order([one if one.ndim == 3 else one[None] for one in made])

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """What each stack gives for its heads, (heads of the stack, ...), as one tensor (H, ...)."""
        return torch.cat(list(parts))[self.order] if len(parts) > 1 else parts[0]

    @torch.no_grad()
    def take(self, *numbers: int) -> CalibrationHead:
        """A copy of some equal heads of the bank, as a CalibrationHead of their own."""
        stack, rows = next(
            (stack, [some.index(number) for number in numbers])
            for stack, some in zip(self.stacks, self.members)
            if set(numbers) <= set(some)
        )
        assert isinstance(stack, CalibrationHead)
        specs = [self.specs[number] for number in numbers]
        made = CalibrationHead(stack.n_features, stack.n_classes, *specs, n_labels=stack.n_labels)
        made.to(stack.last_bias.device)
        for name, value in made.named_parameters():
            value.copy_(stack.get_parameter(name)[rows])
        for mine, moments in zip(made.buffers(), stack.buffers()):
            mine.copy_(moments)
        return made.train(self.training)


def scale_logits(main: Tensor, log_scale: Tensor) -> Tensor:
    """Logits (..., K) times exp(log_scale), (..., 1), moved so that a row's largest is exactly 0.

    So rounding never makes a new tie at the top, and no prediction changes.
    """
    below = main if main.dtype == torch.float64 else main.float()
    below = (below - below.amax(-1, keepdim=True)).clamp(min=MIN_LOGIT)
    return below * log_scale.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()


def statistics(logits: Tensor) -> Tensor:
    """Statistics of logits, (..., K) -> (..., min(K, 10) + 3).

    The largest log-probabilities in falling order, logsumexp, entropy and the largest logit.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = logits.log_softmax(-1).clamp(min=MIN_LOG_PROB)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    top = log_probs.topk(min(N_TOP, logits.shape[-1]), -1).values
    return torch.cat([top, logits.logsumexp(-1, keepdim=True), entropy, logits.amax(-1, keepdim=True)], -1)


def feature_numbers(features: Tensor) -> Tensor:
    """Five numbers of features (..., F): log norm, log maximum, share of zeros, log mean size, log kurtosis."""
    features = features.float()
    mean = features.mean(-1, keepdim=True)
    off = features - mean
    kurtosis = off.pow(4).mean(-1) / off.square().mean(-1).square().clamp(min=1e-12)
    sizes = [features.norm(dim=-1), features.amax(-1), features.abs().mean(-1), kurtosis]
    norm, top, size, heavy = (value.clamp(min=1e-6).log() for value in sizes)
    return torch.stack([norm, top, (features.abs() <= 1e-6).float().mean(-1), size, heavy], -1)


class Standardise(nn.Module):
    """Subtract the mean and divide by the deviation of the data that `follow` or `set_moments` has seen.

    The moments follow the network as it learns: a plain average over the first 50 batches, then an exponential one.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float32))
        self.register_buffer("square", torch.ones(size, dtype=torch.float32))
        self.register_buffer("batches", torch.zeros((), dtype=torch.float32))
        self.mean: Tensor
        self.square: Tensor
        self.batches: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        variance = (self.square - self.mean.square()).clamp(min=1e-6)
        return (values - self.mean) * variance.rsqrt()

    @torch.no_grad()
    def set_moments(self, values: Tensor) -> None:
        """Take the moments of all data (N, size) at once."""
        self.mean.copy_(values.mean(0))
        self.square.copy_(values.square().mean(0))
        self.batches.fill_(50)

    @torch.no_grad()
    def follow(self, values: Tensor, fine: Tensor) -> None:
        """Take a batch (B, size) into the moments if it is `fine`, a bool tensor ()."""
        moments = average_over_processes(torch.stack([values.mean(0), values.square().mean(0)]))
        fine = fine & torch.isfinite(moments).all()
        self.batches += fine
        rate = fine * self.batches.clamp(min=1).reciprocal().clamp(min=0.02)
        moments = moments.nan_to_num(0.0, 0.0, 0.0)
        self.mean.lerp_(moments[0], rate)
        self.square.lerp_(moments[1], rate)


def _initial(n_in: int, hidden: int, n_out: int, seed: int) -> list[Tensor]:
    """The weights and biases that nn.Linear would start with; the caller's random numbers stay as they were."""
    with seeded(seed):
        layers = [nn.Linear(n_in, hidden, dtype=torch.float32)] if hidden else []
        layers.append(nn.Linear(hidden or n_in, n_out, dtype=torch.float32))
    return [part.detach() for layer in layers for part in (layer.weight, layer.bias)]


def keep_top(changed: Tensor, logits: Tensor) -> Tensor:
    """Raise the class that `logits` predict by a rounding where `changed` no longer has it strictly on top."""
    top = logits.argmax(-1, keepdim=True)
    info = torch.finfo(changed.dtype)
    best = changed.scatter(-1, top, -torch.inf).amax(-1, keepdim=True)  # of the others, which may all be -inf
    above = best + 4 * info.eps * (1 + best.abs()).clamp(max=info.max)
    return changed.scatter(-1, top, torch.maximum(changed.gather(-1, top), above))
