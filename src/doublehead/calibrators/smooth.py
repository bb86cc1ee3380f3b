"""Smooth maps without a formula: a spline of the confidence, a Gaussian process of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator, lines, top_log_odds, with_top_odds
from doublehead.calibrators.optimise import minimise
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.predictions import Predictions

TABLE = 1001  # points at which the map is kept, evenly spaced in rank
LOWEST = -25.0  # log probabilities below are ignored: exp(-25) = 1e-11
JITTER = 1e-6
N_INDUCING, GRID = 12, 256  # points of the Gaussian process, and of the table that is kept of it
Likelihood = Callable[[Tensor, Tensor], Tensor]
MANY = 32  # classes above which sums over them, made once, are cheaper than all entries each time


class Spline(Calibrator):
    """A smooth correction of the confidence, by a spline. Use it to repair top-label confidences without bins.

    Samples are put in order of confidence. A natural cubic spline with `n_knots` is fitted to the running sum of
    (correct - confidence), the curve whose largest distance from 0 is the Kolmogorov-Smirnov error; its slope is
    what the confidence lacks. The other classes keep their proportions and the predicted class stays. With `temper`
    the logits are first divided by their temperature, which leaves the spline little to do; without, the spline is
    fitted to the running sum of correct answers alone, as published.

    >>> p = Predictions([[3.0, 0.0]] * 8, [0] * 6 + [1] * 2)
    >>> round(float(Spline().fit(p).calibrate(p).confidence[0]), 2)
    0.75
    """

    learned = ("temperature_", "knots_", "values_", "margin_")
    keeps_order = True  # only the confidence of the predicted class changes, and not below the runner-up's

    temperature_: Tensor
    knots_: Tensor  # (1, M) log odds of the confidence
    values_: Tensor  # (1, M) what is added to the confidence
    margin_: Tensor  # what N samples leave uncertain at the ends: 1 / (N + 2)

    def __init__(self, n_knots: int = 6, temper: bool = True) -> None:
        super().__init__()
        self.n_knots, self.temper = n_knots, temper

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if self.n_knots < 2:
            raise ValueError(f"n_knots must be at least 2, got {self.n_knots}")
        logits, labels = predictions.logits.double(), predictions.labels
        inverse = fit_inverse_temperature(logits, labels) if self.temper else 1.0
        odds, order = top_log_odds(logits * inverse).sort()
        # Equal confidences have no order: they are averaged.
        at, tied = odds.unique_consecutive(return_inverse=True)
        correct, confidence = _mean_by(tied, predictions.correct[order].double())[tied], odds.sigmoid()
        if self.temper:
            slopes = _slope_of_running_mean(correct - confidence, self.n_knots)
        else:
            slopes = _slope_of_running_mean(correct, self.n_knots) - confidence
        values = _mean_by(tied, slopes)
        rows = torch.linspace(0, len(at) - 1, max(2, min(TABLE, len(at)))).round().long().to(at.device)
        return {
            "temperature_": 1 / inverse,
            "knots_": at[rows][None],
            "values_": values[rows][None],
            "margin_": 1 / (len(odds) + 2),
        }

    def _transform(self, logits: Tensor) -> Tensor:
        logits = logits / self.temperature_.to(logits.dtype)
        odds = top_log_odds(logits)
        confidence, margin = odds.sigmoid(), self.margin_.to(logits.dtype)
        probs = confidence + lines(odds[..., None], self.knots_, self.values_)[..., 0]
        # A spline may overshoot 0..1. It may not be more certain than the samples or the confidence support.
        probs = torch.minimum(probs, torch.maximum(confidence, 1 - margin))
        probs = torch.maximum(probs, torch.minimum(confidence, margin))
        return with_top_odds(logits, probs.logit(torch.finfo(probs.dtype).eps))


def _mean_by(group: Tensor, y: Tensor) -> Tensor:
    """The mean of y (N,) in each group, groups (N,) being numbered from 0 without gaps."""
    return y.new_zeros(int(group.max()) + 1).scatter_reduce(0, group, y, "mean", include_self=False)


def _slope_of_running_mean(y: Tensor, n_knots: int) -> Tensor:
    """The slope (N,) at each rank of the natural cubic spline that best fits the running sum of y (N,) over N."""
    rank = torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device) / len(y)
    knots = torch.linspace(0, 1, n_knots, dtype=y.dtype, device=y.device)
    # The natural basis (N, n_knots) and its slopes: 1, the rank, and cubics that are straight outside.
    powers = (rank[:, None] - knots).clamp(min=0)
    width = (knots[-1] - knots[:-1]).clamp(min=1e-12)
    cubics = (powers[:, :-1] ** 3 - powers[:, -1:] ** 3) / width
    squares = 3 * (powers[:, :-1] ** 2 - powers[:, -1:] ** 2) / width
    one, zero = torch.ones_like(rank)[:, None], torch.zeros_like(rank)[:, None]
    values = torch.cat([one, rank[:, None], cubics[:, :-1] - cubics[:, -1:]], 1)
    slopes = torch.cat([zero, one, squares[:, :-1] - squares[:, -1:]], 1)
    # On the CPU, whose solver accepts fewer samples than knots.
    running = y.cumsum(0) / len(y)
    weights: Tensor = torch.linalg.lstsq(values.cpu(), running.cpu()[:, None], driver="gelsd").solution
    return slopes @ weights[:, 0].to(y.device)


class Places(NamedTuple):
    """Where entries lie on an even grid, for linear interpolation that is cheap to repeat, differentiate and export.

    >>> places = Places.of(torch.tensor([-9.0, -0.5, 0.0]), torch.tensor([-2.0, -1.0, 0.0]))
    >>> places.values_of(torch.tensor([7.0, 8.0, 10.0]))
    tensor([ 7.,  9., 10.])
    """

    left: Tensor
    share: Tensor

    @classmethod
    def of(cls, x: Tensor, grid: Tensor) -> Places:
        """Of entries of any shape on a rising grid (G,); what lies outside is put at its ends."""
        position = (torch.maximum(x, grid[0]) - grid[0]) / (grid[1] - grid[0])
        left = position.long().clamp(0, len(grid) - 2)  # nan entries get a place too and stay nan
        return cls(left, (position - left).clamp(max=1.0))

    def values_of(self, table: Tensor) -> Tensor:
        """The values there of the function that has the values `table` (G,) on the grid."""
        flat = self.left.flatten()
        low, high = table.index_select(0, flat), table.index_select(0, flat + 1)
        return torch.lerp(low.view_as(self.share), high.view_as(self.share), self.share)

    def sums(self, weights: Tensor, size: int) -> Tensor:
        """(N, G) the weights (N, K) of entries (N, K), each shared by the two points of the grid (G,) next to it.

        >>> Places.of(torch.tensor([[-1.5, 0.0]]), torch.tensor([-2.0, -1.0, 0.0])).sums(torch.tensor([[4.0, 1.0]]), 3)
        tensor([[2., 2., 1.]])
        """
        made = weights.new_zeros(len(weights), size)
        made.scatter_add_(1, self.left, weights * (1 - self.share))
        return made.scatter_add_(1, self.left + 1, weights * self.share)


class GaussianProcess(Calibrator):
    """A smooth map of log probabilities, shared by all classes. Use it where one temperature is not flexible enough.

    The latent function is g(x) = x + f(x) at x the tempered log probability, f a Gaussian process with a squared
    exponential kernel, and the class probabilities are the softmax of g. The posterior of f at 12 points is
    Gaussian and is found, with the kernel's length and height, by maximising the evidence bound; the expected log
    likelihood is taken to second order, as in the paper. The posterior mean is kept as a table, so applying it costs
    about as much as a softmax.
    """

    learned = ("temperature_", "inputs_", "values_")

    temperature_: Tensor
    inputs_: Tensor  # (1, G) log probabilities
    values_: Tensor  # (1, G) the posterior mean of f there

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        inverse = fit_inverse_temperature(predictions.logits, predictions.labels)
        x = (predictions.logits.double() * inverse).log_softmax(1)
        low = x.min().clamp(LOWEST, -1.0).item()
        grid = torch.linspace(low, 0, GRID, dtype=x.dtype, device=x.device)
        inducing = torch.linspace(low, 0, N_INDUCING, dtype=x.dtype, device=x.device)
        likelihood = (_by_sums if x.shape[1] > MANY else _by_entries)(x, grid, predictions.labels)

        def loss(mean: Tensor, root: Tensor, kernel: Tensor) -> Tensor:
            f, variance = _posterior(grid, inducing, mean, root, kernel)
            expected = likelihood(f, variance)
            prior = kernel.square().sum() / 2  # log-normal about length 1 and height 1
            return (_divergence(mean, root) + prior) / len(x) - expected

        eye = torch.eye(N_INDUCING, dtype=x.dtype, device=x.device)
        found = minimise(loss, [eye[0] * 0, 0.1 * eye, eye.new_zeros(2)])
        values, _ = _posterior(grid, inducing, *found.values)
        return {
            "temperature_": 1 / inverse,
            "inputs_": grid[None],
            "values_": values[None],
            **found.verdict(),
        }

    def _transform(self, logits: Tensor) -> Tensor:
        x = (logits / self.temperature_.to(logits.dtype)).log_softmax(-1)
        return x + Places.of(x, self.inputs_[0].to(x.dtype)).values_of(self.values_[0].to(x.dtype))


def _posterior(
    grid: Tensor, inducing: Tensor, mean: Tensor, root: Tensor, kernel: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (G,) of f on the grid, for inducing values N(mean, root root^T) in whitened coordinates."""
    length, height = kernel[0].exp(), kernel[1].exp()

    def covariance(a: Tensor, b: Tensor) -> Tensor:
        return height.square() * (-((a[:, None] - b) / length).square() / 2).exp()

    inner = covariance(inducing, inducing) + JITTER * height.square() * torch.eye(
        len(inducing), dtype=grid.dtype, device=grid.device
    )
    triangle = torch.linalg.cholesky(inner)
    across = torch.linalg.solve_triangular(triangle, covariance(inducing, grid), upper=False)  # (M, G)
    explained, left = across.square().sum(0), (root.tril().T @ across).square().sum(0)
    return across.T @ mean, (height.square() - explained).clamp(min=0) + left


def _by_entries(x: Tensor, grid: Tensor, labels: Tensor) -> Likelihood:
    """The mean over samples of E[log softmax(x + f)] at the label, to second order.

    f is independent and Gaussian at each entry, and given by its mean and variance on the grid.
    """
    places = Places.of(x, grid)

    def expected(f: Tensor, variance: Tensor) -> Tensor:
        log_probs = (x + places.values_of(f)).log_softmax(1)
        probs = log_probs.exp()
        spread = (places.values_of(variance) * probs * (1 - probs)).sum(1)
        return log_probs.gather(1, labels[:, None]).mean() - spread.mean() / 2

    return expected


def _by_sums(x: Tensor, grid: Tensor, labels: Tensor) -> Likelihood:
    """The same to 1e-3, at a cost that does not grow with the classes.

    exp(x) and exp(2 x) are summed by place on the grid, once. A sum of exp(x + f(x)) over classes is then a sum of
    exp(f) over the grid, with these as weights.
    """
    at_label, places, probs = x.gather(1, labels[:, None])[:, 0], Places.of(x, grid), x.exp()
    label_places = Places.of(at_label, grid)
    once, twice = (places.sums(weights, len(grid)) for weights in (probs, probs.square()))  # (N, G) each

    def expected(f: Tensor, variance: Tensor) -> Tensor:
        factor = f.exp()
        total = once @ factor  # (N,) of the probabilities before they are normalised
        spread = (once @ (factor * variance)) / total
        spread = spread - (twice @ (factor.square() * variance)) / total.square()
        return (at_label + label_places.values_of(f) - total.log()).mean() - spread.mean() / 2

    return expected


def _divergence(mean: Tensor, root: Tensor) -> Tensor:
    """KL(N(mean, root root^T) || N(0, 1)), root taken as lower triangular."""
    lower = root.tril()
    log_determinant: Tensor = 2 * lower.diagonal().abs().log().sum()
    return (lower.square().sum() + mean.square().sum() - len(mean) - log_determinant) / 2
