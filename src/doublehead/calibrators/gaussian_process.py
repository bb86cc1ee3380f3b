"""Gaussian-process calibration: a smooth, free-form correction of the log probabilities (Wenger et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.maps import Places
from doublehead.calibrators.optimise import minimise
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.predictions import Predictions

LOWEST = -25.0  # log probabilities below have no say: exp(-25) = 1e-11
JITTER = 1e-6
MANY = 32  # classes above which sums over them, made once, are cheaper than all entries each time


class GaussianProcess(Calibrator):
    """A smooth free-form map of log probabilities, shared by all classes. Use it where one temperature is too stiff.

    The latent function is g(x) = x + f(x) at x the tempered log probability, f a Gaussian process with a squared
    exponential kernel, and the class probabilities are the softmax of g. The posterior of f at `n_inducing` points is
    Gaussian and is found, with the kernel's length and height, by maximising the evidence bound; the expected log
    likelihood is taken to second order, as in the paper. The posterior mean is kept as a table, so applying it costs
    about as much as a softmax.
    """

    learned = ("temperature_", "inputs_", "values_")

    temperature_: Tensor
    inputs_: Tensor  # (1, G) log probabilities
    values_: Tensor  # (1, G) the posterior mean of f there

    def __init__(self, n_inducing: int = 12, n_table: int = 256) -> None:
        super().__init__()
        self.n_inducing, self.n_table = n_inducing, n_table

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if not 2 <= self.n_inducing <= self.n_table:
            raise ValueError(
                f"2 <= n_inducing <= n_table is needed, got {self.n_inducing} and {self.n_table}"
            )
        inverse = fit_inverse_temperature(predictions.logits, predictions.labels)
        x = (predictions.logits.double() * inverse).log_softmax(1)
        low = x.min().clamp(LOWEST, -1.0).item()
        grid = torch.linspace(low, 0, self.n_table, dtype=x.dtype, device=x.device)
        inducing = torch.linspace(low, 0, self.n_inducing, dtype=x.dtype, device=x.device)
        likelihood = (_BySums if x.shape[1] > MANY else _ByEntries)(x, grid, predictions.labels)

        def loss(mean: Tensor, root: Tensor, kernel: Tensor) -> Tensor:
            f, variance = _posterior(grid, inducing, mean, root, kernel)
            expected = likelihood(f, variance)
            prior = kernel.square().sum() / 2  # log-normal about length 1 and height 1
            return (_divergence(mean, root) + prior) / len(x) - expected

        eye = torch.eye(self.n_inducing, dtype=x.dtype, device=x.device)
        found = minimise(loss, [eye[0] * 0, 0.1 * eye, eye.new_zeros(2)])
        values, _ = _posterior(grid, inducing, *found.values)
        return {
            "temperature_": inverse.reciprocal(),
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


class _ByEntries:
    """The expected log likelihood of f, given by its mean and variance on the grid, from every log probability."""

    def __init__(self, x: Tensor, grid: Tensor, labels: Tensor) -> None:
        self.x, self.places, self.labels = x, Places.of(x, grid), labels

    def __call__(self, f: Tensor, variance: Tensor) -> Tensor:
        return _expected_log_likelihood(
            self.x + self.places.values_of(f), self.places.values_of(variance), self.labels
        )


class _BySums:
    """The same to 1e-3, at a cost that does not grow with the classes.

    exp(x) and exp(2 x) are summed by place on the grid, once. A sum of exp(x + f(x)) over classes is then a sum of
    exp(f) over the grid, with these as weights.
    """

    def __init__(self, x: Tensor, grid: Tensor, labels: Tensor) -> None:
        self.at_label = x.gather(1, labels[:, None])[:, 0]
        self.label_places, places, probs = Places.of(self.at_label, grid), Places.of(x, grid), x.exp()
        self.once, self.twice = (
            places.sums(weights, len(grid)) for weights in (probs, probs.square())
        )  # (N, G)

    def __call__(self, f: Tensor, variance: Tensor) -> Tensor:
        factor = f.exp()
        total = self.once @ factor  # (N,) of the probabilities before they are normalised
        at_label = (self.at_label + self.label_places.values_of(f) - total.log()).mean()
        spread = (self.once @ (factor * variance)) / total
        spread = spread - (self.twice @ (factor.square() * variance)) / total.square()
        return at_label - spread.mean() / 2


def _expected_log_likelihood(mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of E[log softmax(g)] at the label, g (N, K) independent Gaussians, to second order."""
    log_probs = mean.log_softmax(1)
    probs = log_probs.exp()
    at_label = log_probs.gather(1, labels[:, None]).mean()
    return at_label - (variance * probs * (1 - probs)).sum(1).mean() / 2


def _divergence(mean: Tensor, root: Tensor) -> Tensor:
    """KL(N(mean, root root^T) || N(0, 1)), root taken as lower triangular."""
    lower = root.tril()
    log_determinant: Tensor = 2 * lower.diagonal().abs().log().sum()
    return (lower.square().sum() + mean.square().sum() - len(mean) - log_determinant) / 2
