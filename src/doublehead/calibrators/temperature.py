"""Temperature scaling: one positive number, found at the true optimum of the NLL in a few passes over the data.

Beside it what is close to it: no change, a temperature from a grid, a mixture of temperatures.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from doublehead.calibration_head import keep_top
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.optimise import minimise
from doublehead.metrics import ece
from doublehead.predictions import Predictions
from doublehead.score_arrays import CHUNK_ENTRIES, Target

MAX_PASSES = 200
COARSE = 1e-3  # once a step in log(s) is this small, the passes go on in float64
FINE = 1e-6  # Newton squares the error: after a step this small it is about 1e-12
EXCESS = 1e-6  # where the optimum is at 0 or infinity, stop when the mean NLL is this close to its limit
SHARP = 1000.0  # times the NLL: a small weight has a small gradient, however far it is from its best value
SAMPLE_ROWS = 1000  # rows that give the starting point when there are many more


class Identity(Calibrator):
    """Change nothing. The baseline for every other calibrator.

    >>> p = Predictions([[2.0, 0.0]], [0])
    >>> Identity().fit(p)(p.logits).tolist()
    [[2.0, 0.0]]
    """

    takes_weights = True
    keeps_order = True  # nothing changes

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        return {}

    def _transform(self, logits: Tensor) -> Tensor:
        return logits


class Temperature(Calibrator):
    """Divide the logits by one number, the minimiser of the NLL. Try it first; it is hard to beat with little data.

    `temperature_` is positive. Where no finite optimum exists (every label has the largest logit, so T -> 0, or the
    logits are worse than none, so T -> infinity) it is a temperature at which the mean NLL is within
    1e-6 of its limit, and `at_bound_` is True.

    >>> p = Predictions([[4.0, 0.0]] * 4, [0, 0, 0, 1])
    >>> t = Temperature().fit(p)
    >>> round(float(t.temperature_), 4), round(float(t(p.logits).softmax(1)[0, 0]), 4)  # 4 / log 3: right 3 in 4
    (3.641, 0.75)
    """

    learned: ClassVar[tuple[str, ...]] = ("temperature_", "at_bound_")
    takes_weights = True
    keeps_order = True  # dividing by a positive number changes no order

    temperature_: Tensor
    at_bound_: Tensor

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        found = solve_inverse_temperature(predictions.logits, predictions.target)
        return {
            "temperature_": 1 / found.inverse,
            "at_bound_": found.at_bound,
            "converged_": found.converged,
            "facts": f"after {MAX_PASSES} passes T = {1 / found.inverse:.6g}",
        }

    def _transform(self, logits: Tensor) -> Tensor:
        return logits / self.temperature_.to(logits.dtype)


class TemperatureGrid(Temperature):
    """Temperature from a grid, by validation ECE. Only to reproduce published tables; else use Temperature.

    This is the protocol of the focal-loss papers: 0.1, 0.2, ..., 10.0 by the ECE of 15 right-closed bins, the first of
    equals.
    """

    learned = ("temperature_",)

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        grid, logits = torch.arange(1, 101, dtype=torch.float64) / 10, predictions.logits.double()
        scores = [ece(predictions.with_logits(logits / t)) for t in grid]
        return {"temperature_": grid[scores.index(min(scores))]}


class EnsembleTemperature(Calibrator):
    """Mix tempered, untouched and uniform probabilities (Zhang et al. 2020). Use it if a temperature is not enough.

    The temperature minimises the NLL; the weights then minimise the NLL of the mixture, which is convex in them.
    `weights_` are those of softmax(z / T), softmax(z) and 1 / K, in this order.

    >>> p = Predictions([[9.0, 0.0], [9.0, 0.0], [0.5, 0.0], [0.0, 0.5]], [0, 1, 0, 1])
    >>> round(float(EnsembleTemperature().fit(p).weights_.sum()), 6)
    1.0
    """

    learned = ("temperature_", "weights_")
    keeps_order = True  # every part orders the classes alike

    temperature_: Tensor
    weights_: Tensor  # (3,)

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        inverse = fit_inverse_temperature(predictions.logits, predictions.labels)
        parts = _log_parts(predictions.logits.double(), inverse)
        at_label = torch.stack([predictions.target.of(part) for part in parts])  # (3, N)

        def loss(log_weights: Tensor) -> Tensor:
            return -SHARP * (log_weights.log_softmax(0)[:, None] + at_label).logsumexp(0).mean()

        found = minimise(loss, [at_label.new_zeros(3)])
        verdict = found._replace(loss=found.loss / SHARP).verdict()
        return {"temperature_": 1 / inverse, "weights_": found.values[0].softmax(0), **verdict}

    def _transform(self, logits: Tensor) -> Tensor:
        parts = _log_parts(logits, self.temperature_.to(logits.dtype).reciprocal())
        log_weights = self.weights_.to(logits.dtype).log()
        mixed = torch.stack([part + weight for part, weight in zip(parts, log_weights)]).logsumexp(0)
        return keep_top(mixed, logits)


def _log_parts(logits: Tensor, inverse: Tensor | float) -> list[Tensor]:
    uniform = torch.full_like(logits, -math.log(logits.shape[-1]))
    return [(logits * inverse).log_softmax(-1), logits.log_softmax(-1), uniform]


# --- the solver


class InverseTemperature(NamedTuple):
    """What the solver found."""

    inverse: float  # s = 1 / T
    at_bound: bool  # the optimum is at 0 or infinity, or every s is as good
    converged: bool


def fit_inverse_temperature(logits: Tensor, labels: Tensor | Target) -> float:
    """The s > 0 that minimises the mean NLL of s times logits (N, K), to about 1e-9 of its value.

    >>> logits = torch.tensor([[4.0, 0.0]] * 4)
    >>> round(fit_inverse_temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # log(3) / 4
    0.2747
    """
    return solve_inverse_temperature(logits, labels if isinstance(labels, Target) else Target(labels)).inverse


@torch.no_grad()
def solve_inverse_temperature(logits: Tensor, target: Target) -> InverseTemperature:
    """Like `fit_inverse_temperature`, with a statement on whether the optimum is finite and was reached.

    The NLL is convex in s. With d the logits less their row's maximum, its derivative is m(s) - c: m the mean over
    rows of the expectation of d under softmax(s d), c the mean of the labels' d. Both are negative and m rises to 0
    about like a power of s, so Newton's method for log(m / c) in log(s) needs few steps. A bracket keeps it safe.
    """
    below = logits - logits.amax(1, keepdim=True)  # (N, K), all <= 0
    at_label, weights = target.of(below), target.weights
    unit = -min(_mean(below.double().mean(1), weights), _mean(at_label, weights))  # the scale of the logits
    unit = 2.0 ** round(math.log2(unit)) if unit else 1.0  # a power of two: dividing by it is exact
    found = _solve(below.div_(unit), at_label / unit, weights)
    return found._replace(inverse=found.inverse / unit)


def _solve(below: Tensor, at_label: Tensor, weights: Tensor | None) -> InverseTemperature:
    """For logits (N, K) of unit scale and no maximum above 0, those of the labels (N,), and weights (N,)."""
    wanted, at_zero = _mean(at_label, weights), _mean(below.double().mean(1), weights)  # c and m(0)
    if wanted == 0:  # every label has the largest logit: the NLL falls as T does, so stop near its limit
        # Where s times the gaps is large, s times their expectation bounds what is left of the NLL from above.
        tried = (2.0**i for i in range(MAX_PASSES))
        enough = (s for s in tried if -s * _moments(below, weights, s, torch.float64)[0] <= EXCESS)
        return InverseTemperature(next(enough, 2.0**MAX_PASSES), True, True)
    if at_zero - wanted >= -1e-12:
        return InverseTemperature(EXCESS, True, True)
    start, n = 0.0, len(below)
    if n > 4 * SAMPLE_ROWS:
        rows = slice(None, None, n // SAMPLE_ROWS)
        guess = _solve(below[rows], at_label[rows], None if weights is None else weights[rows])
        start = 0.0 if guess.at_bound else math.log(guess.inverse)
    return _newton(below, weights, wanted, start)


def _newton(below: Tensor, weights: Tensor | None, wanted: float, log_s: float) -> InverseTemperature:
    """The root of log(m(s) / c) in log(s)."""
    low, high, fine = -math.inf, math.inf, below.dtype == torch.float64
    for _ in range(MAX_PASSES):
        mean, variance = _moments(below, weights, math.exp(log_s), torch.float64 if fine else below.dtype)
        too_small = mean < wanted  # the root lies at a larger s
        low, high = (log_s, high) if too_small else (low, log_s)
        slope = math.exp(log_s) * variance
        step = -math.log(mean / wanted) * mean / slope if mean < 0 < slope else 1.0 if too_small else -1.0
        moved = log_s + max(-3.0, min(3.0, step))
        # "At the other end" counts too: two steps of the largest size allowed would otherwise alternate forever.
        if not low < moved < high and math.isfinite(low + high):
            moved = (low + high) / 2
        if moved < math.log(EXCESS):  # the logits carry no information beyond rounding errors
            return InverseTemperature(EXCESS, True, True)
        log_s, size = moved, abs(moved - log_s)
        if fine and size < FINE:
            return InverseTemperature(math.exp(log_s), False, True)
        if not fine and size < COARSE:  # float32 brackets may be off by a rounding; float64 starts its own
            fine, low, high = True, -math.inf, math.inf
    return InverseTemperature(math.exp(log_s), False, False)


def _moments(below: Tensor, weights: Tensor | None, s: float, dtype: torch.dtype) -> tuple[float, float]:
    """The mean over rows of the expectation and of the variance of d under softmax(s d)."""
    firsts, spreads = [], []
    for part in below.split(max(1, CHUNK_ENTRIES // below.shape[1])):
        d = part.to(dtype)
        odds = (d * s).exp_()  # (n, K), each row's largest is 1
        total = odds.sum(1)
        first = odds.mul_(d).sum(1) / total
        spreads.append(odds.mul_(d).sum(1) / total - first * first)
        firsts.append(first)
    return _mean(torch.cat(firsts), weights), _mean(torch.cat(spreads), weights)


def _mean(values: Tensor, weights: Tensor | None) -> float:
    """Of (N,), in float64."""
    values = values.double()
    return float(values.mean() if weights is None else (values * weights).sum() / weights.sum())
