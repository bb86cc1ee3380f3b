"""Affine calibrators: vector, matrix and Dirichlet scaling.

All three are fitted in temperature-scaled logits, so the scale of the logits is of no account, and are pulled towards
temperature scaling. The pull is that of a Gaussian prior: it fades as samples come in, and rises with the classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.optimise import minimise
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.predictions import Predictions


class Vector(Calibrator):
    """A scale and a shift for every class. Use it when classes err differently and each has a hundred samples or more.

    `prior` is the standard deviation of the scales about the temperature's and of the shifts about 0; infinity gives
    the plain form of Guo et al. (2017).

    >>> p = Predictions([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]], [0, 0, 0, 1])
    >>> Vector().fit(p).weight_.shape
    torch.Size([2])
    """

    learned = ("weight_", "bias_")

    weight_: Tensor  # (K,)
    bias_: Tensor  # (K,)

    def __init__(self, prior: float = 0.2) -> None:
        super().__init__()
        self.prior = prior

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        _check_positive("prior", self.prior)
        scale = fit_inverse_temperature(predictions.logits, predictions.labels)
        x = predictions.logits.double() * scale
        pull = 0.5 / (self.prior**2 * len(predictions))

        def loss(weight: Tensor, bias: Tensor) -> Tensor:
            drift = (weight - 1).square().sum() + bias.square().sum()
            return cross_entropy(x * weight + bias, predictions.labels) + pull * drift

        ones = torch.ones_like(x[0])
        found = minimise(loss, [ones, 0 * ones])
        weight, bias = found.values
        return {"weight_": weight * scale, "bias_": bias, **found.verdict()}

    def _transform(self, logits: Tensor) -> Tensor:
        return logits * self.weight_.to(logits.dtype) + self.bias_.to(logits.dtype)

    def _n_classes(self) -> int:
        return self.bias_.shape[0]

    @property
    def never_worse(self) -> bool:
        """Temperature scaling is among the candidates, at no penalty."""
        return True


class Matrix(Calibrator):
    """A full linear map of the logits. Use it with few classes and thousands of samples: K * K numbers are learned.

    `prior` is the standard deviation of the diagonal about the temperature's scale and of the shifts about 0; that of
    the K - 1 other weights of a row is prior / sqrt(K). `odir=(l, m)` asks for the penalty of Kull et al. (2019)
    instead: l times the mean square of the off-diagonal weights plus m times that of the shifts, the diagonal free.
    """

    learned = ("weight_", "bias_")

    weight_: Tensor  # (K, K)
    bias_: Tensor  # (K,)

    def __init__(self, prior: float = 0.2, odir: tuple[float, float] | None = None) -> None:
        super().__init__()
        self.prior, self.odir = prior, odir

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        _check_positive("prior", self.prior)
        scale = fit_inverse_temperature(predictions.logits, predictions.labels)
        x = self._inputs(predictions.logits.double()) * scale
        eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        pull, pull_bias = self._pulls(len(predictions), eye)
        center = (
            x.mean(0) if self.odir is None else torch.zeros_like(x[0])
        )  # weights turn about it, not about 0
        top, moved = x - x.amax(1, keepdim=True), x - center

        def loss(weight: Tensor, bias: Tensor) -> Tensor:
            drift = (pull * (weight - eye).square()).sum() + pull_bias * bias.square().sum()
            return cross_entropy(moved @ (weight - eye).T + top + bias, predictions.labels) + drift

        found = minimise(loss, [eye, torch.zeros_like(x[0])])
        weight, bias = found.values
        return {"weight_": weight * scale, "bias_": bias - (weight - eye) @ center, **found.verdict()}

    def _pulls(self, n: int, eye: Tensor) -> tuple[Tensor, float]:
        """What each squared weight (K, K) and each squared shift is multiplied by."""
        k = len(eye)
        if self.odir is not None:
            off_diagonal, intercept = self.odir
            return (1 - eye) * off_diagonal / (k * (k - 1)), intercept / k
        pull = 0.5 / (self.prior**2 * n)
        return pull * (eye + k * (1 - eye)), pull

    def _transform(self, logits: Tensor) -> Tensor:
        return self._inputs(logits) @ self.weight_.T.to(logits.dtype) + self.bias_.to(logits.dtype)

    def _inputs(self, logits: Tensor) -> Tensor:
        return logits

    def _n_classes(self) -> int:
        return self.bias_.shape[0]

    @property
    def never_worse(self) -> bool:
        """Temperature scaling is among the candidates, at no penalty."""
        return True


class Dirichlet(Matrix):
    """Matrix scaling of log probabilities (Kull et al. 2019). Use it like Matrix, when only probabilities are known."""

    def _inputs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
