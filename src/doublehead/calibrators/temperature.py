"""Temperature scaling: one positive number, found at the true optimum of the NLL in a few passes over the data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator
from doublehead.metrics import ece, nll
from doublehead.predictions import CHUNK_ENTRIES, Predictions, Target

MAX_PASSES = 200
COARSE = 1e-3  # once a step in log(s) is this small, the passes go on in float64
FINE = 1e-6  # Newton squares the error: after a step this small it is about 1e-12
EXCESS = 1e-6  # where the optimum is at 0 or infinity, stop when the mean NLL is this close to its limit
SAMPLE_ROWS = 1000  # rows that give the starting point when there are many more


class Temperature(Calibrator):
    """Divide the logits by one number, the minimiser of the NLL. The first to try; hard to beat with few data.

    `temperature_` is positive. Where no finite optimum exists (every label has the largest logit, so T -> 0, or the
    logits say less than nothing of the labels, so T -> infinity) it is a temperature at which the mean NLL is within
    1e-6 of its limit, and `at_bound_` is True.

    >>> p = Predictions([[4.0, 0.0]] * 4, [0, 0, 0, 1])
    >>> t = Temperature().fit(p)
    >>> round(float(t.temperature_), 4), round(float(t(p.logits).softmax(1)[0, 0]), 4)  # 4 / log 3: right 3 in 4
    (3.641, 0.75)
    """

    learned = ("temperature_", "at_bound_")
    takes_weights = True

    temperature_: Tensor
    at_bound_: Tensor

    @property
    def keeps_argmax(self) -> bool:
        """Dividing by a positive number changes no order."""
        return True

    @property
    def never_worse(self) -> bool:
        """T = 1 is among the candidates."""
        return True

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        found = solve_inverse_temperature(predictions.logits, predictions.target)
        return {
            "temperature_": found.inverse.reciprocal(),
            "at_bound_": found.at_bound,
            "converged_": found.converged,
            "facts": f"after {MAX_PASSES} passes T = {1 / float(found.inverse):.6g}",
        }

    def _transform(self, logits: Tensor) -> Tensor:
        return logits / self.temperature_.to(logits.dtype)


class TemperatureGrid(Calibrator):
    """Temperature from a grid, by validation ECE or NLL. Only to reproduce published tables; else use Temperature.

    The default is the protocol of the focal-loss papers: 0.1, 0.2, ..., 10.0 by the ECE of 15 right-closed bins, the
    first of equals.
    """

    learned = ("temperature_",)
    takes_weights = True

    temperature_: Tensor

    def __init__(
        self,
        by: Literal["ece", "nll"] = "ece",
        low: float = 0.1,
        high: float = 10.0,
        step: float = 0.1,
        n_bins: int = 15,
    ) -> None:
        super().__init__()
        self.by, self.low, self.high, self.step, self.n_bins = by, low, high, step, n_bins

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if self.by not in ("ece", "nll"):
            raise ValueError(f"by must be 'ece' or 'nll', got {self.by!r}")
        if not 0 < self.low <= self.high or self.step <= 0:
            raise ValueError(
                f"the grid needs 0 < low <= high and step > 0, got {self.low}, {self.high}, {self.step}"
            )
        steps = int((self.high - self.low) / self.step + 1e-9) + 1
        grid = self.low + self.step * torch.arange(steps, dtype=torch.float64)
        score = partial(ece, n_bins=self.n_bins) if self.by == "ece" else nll
        logits = predictions.logits.double()
        scores = [score(predictions.with_logits(logits / t)) for t in grid]
        return {"temperature_": grid[scores.index(min(scores))]}

    def _transform(self, logits: Tensor) -> Tensor:
        return logits / self.temperature_.to(logits.dtype)

    @property
    def keeps_argmax(self) -> bool:
        """Dividing by a positive number changes no order."""
        return True


class InverseTemperature(NamedTuple):
    """What the solver found, each of shape logits.shape[:-2]."""

    inverse: Tensor  # s = 1 / T, float64
    at_bound: Tensor  # bool: the optimum is at 0 or infinity, or every s is as good
    converged: Tensor  # bool


def fit_inverse_temperature(logits: Tensor, labels: Tensor | Target) -> Tensor:
    """The s > 0 that minimises the mean NLL of s * logits, in float64, to about 1e-9 of its value.

    Logits (N, K) give a scalar; a stack of them (..., N, K), with labels (N,) or (..., N), gives one s each, all
    fitted together.

    >>> logits = torch.tensor([[4.0, 0.0]] * 4)
    >>> round(float(fit_inverse_temperature(logits, torch.tensor([0, 0, 0, 1]))), 4)  # log(3) / 4
    0.2747
    """
    return solve_inverse_temperature(logits, labels).inverse


@torch.no_grad()
def solve_inverse_temperature(logits: Tensor, labels: Tensor | Target) -> InverseTemperature:
    """Like `fit_inverse_temperature`, with a statement on whether the optimum is finite and was reached.

    Logits (N, K) may have a `Target` with soft labels and weights instead of labels.

    The NLL is convex in s. With d the logits less their row's maximum, its derivative is m(s) - c: m the mean over
    rows of the expectation of d under softmax(s d), c the mean of the labels' d. Both are negative and m rises to 0
    about like a power of s, so Newton's method for log(m / c) in log(s) needs few steps. A bracket keeps it safe.
    """
    stack, (n, k) = logits.shape[:-2], logits.shape[-2:]
    below = (logits - logits.amax(-1, keepdim=True)).reshape(-1, n, k)  # (H, N, K), all <= 0
    weights = None
    if isinstance(labels, Target):
        at_label, weights = labels.of(below[0])[None, :, None], labels.weights
    else:
        at_label = below.gather(2, labels.expand(*stack, n).reshape(-1, n, 1))  # (H, N, 1)
    unit = -torch.minimum(_mean(below, weights), _mean(at_label, weights))  # (H,) the scale of the logits
    unit = torch.where(unit == 0, 1.0, unit.log2().round().exp2())  # a power of two: dividing by it is exact
    scale = unit.reciprocal().to(below.dtype)[:, None, None]
    found = _solve(below.mul_(scale), at_label * scale, weights)
    found = found._replace(inverse=found.inverse / unit)
    return InverseTemperature(*(field.reshape(stack) for field in found))


def _solve(below: Tensor, at_label: Tensor, weights: Tensor | None) -> InverseTemperature:
    """For logits of unit scale and no maximum above 0, (H, N, K), those of the labels (H, N, 1), and weights (N,)."""
    n = below.shape[1]
    target, at_zero = _mean(at_label, weights), _mean(below, weights)  # c and m(0), (H,)
    flat = (target == 0) & (at_zero == 0)
    to_zero = (at_zero - target >= -1e-12) & ~flat
    to_infinity = (target == 0) & ~flat
    at_bound = flat | to_zero | to_infinity

    start = torch.zeros_like(target)
    if n > 4 * SAMPLE_ROWS:
        rows = slice(None, None, n // SAMPLE_ROWS)
        guess = _solve(below[:, rows], at_label[:, rows], None if weights is None else weights[rows])
        start = torch.where(guess.at_bound, start, guess.inverse.log())
    log_s, converged = _newton(below, weights, target, start, at_bound)

    inverse = log_s.exp()
    inverse[to_zero], inverse[flat] = EXCESS, 1.0
    if bool(to_infinity.any()):
        inverse = torch.where(to_infinity, _tame_limit(below, weights, torch.ones_like(inverse)), inverse)
    return InverseTemperature(inverse, at_bound, converged)


def _newton(
    below: Tensor, weights: Tensor | None, target: Tensor, start: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """The root of log(m(s) / c) in log(s), (H,), and whether it was reached; heads `done` from the start are left."""
    log_s, low, high = start, torch.full_like(start, -torch.inf), torch.full_like(start, torch.inf)
    fine = below.dtype == torch.float64
    for _ in range(MAX_PASSES):
        if bool(done.all()):
            break
        mean, variance = _moments(below, weights, log_s.exp(), torch.float64 if fine else below.dtype)
        too_small = mean < target  # the root lies at a larger s
        low, high = torch.where(too_small, log_s, low), torch.where(too_small, high, log_s)
        step = -(mean / target).log() * mean / (log_s.exp() * variance)
        step = torch.where(step.isfinite(), step, torch.where(too_small, 1.0, -1.0)).clamp(-3, 3)
        wanted = log_s + step
        middle = (low + high) / 2
        # "At the other end" counts too: two steps of the largest size allowed would else go to and fro for ever.
        outside = torch.where(too_small, wanted >= high, wanted <= low)
        wanted = torch.where(outside, middle, wanted)
        moved = (wanted - log_s).abs()
        log_s = torch.where(done, log_s, wanted)
        if fine:
            done = done | (moved < FINE)
        elif bool((done | (moved < COARSE)).all()):
            # float32 brackets may be off by a rounding; float64 starts its own.
            fine, low, high = True, torch.full_like(low, -torch.inf), torch.full_like(high, torch.inf)
    return log_s, done


def _moments(below: Tensor, weights: Tensor | None, s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mean over rows of the expectation and of the variance of d under softmax(s d), (H,) in float64."""
    mean, variance = torch.zeros_like(s), torch.zeros_like(s)
    scale, done = s.to(dtype)[:, None, None], 0
    for d in _chunks(below):
        d = d.to(dtype)  # noqa: PLW2901
        weight = (d * scale).exp_()  # (H, n, K), each row's largest is 1
        total = weight.sum(2)
        first = weight.mul_(d).sum(2) / total
        second = weight.mul_(d).sum(2) / total
        spread = second - first * first
        if weights is not None:
            w = weights[done : done + d.shape[1]].to(dtype)
            first, spread, done = first * w, spread * w, done + d.shape[1]
        mean += first.sum(1, dtype=torch.float64)
        variance += spread.sum(1, dtype=torch.float64)
    n = below.shape[1] if weights is None else weights.sum()
    return mean / n, variance / n


def _tame_limit(below: Tensor, weights: Tensor | None, s: Tensor) -> Tensor:
    """The first of s, 2 s, 4 s, ... at which the mean NLL of the largest logit is within EXCESS of its limit, (H,).

    Where s times the gaps is large, s times their expectation bounds what is left of the NLL from above.
    """
    for _ in range(MAX_PASSES):
        left = -s * _moments(below, weights, s, torch.float64)[0]
        if bool((left <= EXCESS).all()):
            break
        s = torch.where(left <= EXCESS, s, 2 * s)
    return s


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """(H, N, K) -> (H,) in float64, rows weighted."""
    if weights is not None:
        return (values.sum(2, dtype=torch.float64) * weights).sum(1) / (weights.sum() * values.shape[2])
    return values.sum((1, 2), dtype=torch.float64) / values[0].numel()


def _chunks(below: Tensor) -> Iterator[Tensor]:
    heads, _, k = below.shape
    return iter(below.split(max(1, CHUNK_ENTRIES // (heads * k)), dim=1))
