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
        places = Places.of(x, grid)

        def loss(mean: Tensor, root: Tensor, kernel: Tensor) -> Tensor:
            f, variance = _posterior(grid, inducing, mean, root, kernel)
            expected = _expected_log_likelihood(x + places(f), places(variance), predictions.labels)
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
        return x + Places.of(x, self.inputs_[0].to(x.dtype))(self.values_[0].to(x.dtype))


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
