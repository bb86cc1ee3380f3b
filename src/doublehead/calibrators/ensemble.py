"""Ensemble temperature scaling: tempered, untouched and uniform probabilities, mixed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.predictions import Predictions

GAP = 1e-7  # how far the NLL may be from its minimum, by the certificate below
MAX_STEPS = 200


class EnsembleTemperature(Calibrator):
    """Mix tempered, untouched and uniform probabilities (Zhang et al. 2020). Use it when temperature alone falls short.

    The temperature minimises the NLL; the weights then minimise the NLL of the mixture, which is convex in them.
    `weights_` are those of softmax(z / T), softmax(z) and 1 / K, in this order.

    >>> p = Predictions([[9.0, 0.0], [9.0, 0.0], [0.5, 0.0], [0.0, 0.5]], [0, 1, 0, 1])
    >>> round(float(EnsembleTemperature().fit(p).weights_.sum()), 6)
    1.0
    """

    learned = ("temperature_", "weights_")

    temperature_: Tensor
    weights_: Tensor  # (3,)

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        inverse = fit_inverse_temperature(predictions.logits, predictions.labels)
        parts = _log_parts(predictions.logits.double(), inverse)
        at_label = torch.stack(
            [part.gather(1, predictions.labels[:, None])[:, 0] for part in parts]
        )  # (3, N)
        weights, gap = _mixture_weights(at_label)
        facts = f"the NLL may be {gap:.2g} above its minimum after {MAX_STEPS} steps (wanted {GAP:.0g})"
        return {
            "temperature_": inverse.reciprocal(),
            "weights_": weights,
            "converged_": gap <= GAP,
            "facts": facts,
        }

    def _transform(self, logits: Tensor) -> Tensor:
        parts = _log_parts(logits, self.temperature_.to(logits.dtype).reciprocal())
        log_weights = self.weights_.to(logits.dtype).log()
        return torch.stack([part + weight for part, weight in zip(parts, log_weights)]).logsumexp(0)

    @property
    def keeps_argmax(self) -> bool:
        """Every part orders the classes alike."""
        return True

    @property
    def never_worse(self) -> bool:
        """The untouched probabilities are among the candidates."""
        return True


def _log_parts(logits: Tensor, inverse: Tensor) -> list[Tensor]:
    uniform = torch.full_like(logits, -math.log(logits.shape[-1]))
    return [(logits * inverse).log_softmax(-1), logits.log_softmax(-1), uniform]


def _mixture_weights(log_probs: Tensor) -> tuple[Tensor, float]:
    """Weights (3,) of a mixture with log probabilities (3, N) of the labels, by Newton's method with a barrier.

    -mean(log(w p)) + sum(w) has its minimum on the simplex, so positive weights are the only constraint. With g_j the
    mean over samples of p_j / mixture, the NLL is at most log(max g_j) above its minimum: a certificate.
    """
    ratio = (log_probs - log_probs.amax(0)).exp()  # (3, N), the best part of each sample is 1
    weights, barrier, gap = torch.full_like(ratio[:, 0], 1 / 3), 0.1, torch.inf
    for _ in range(MAX_STEPS):
        shares = ratio / (weights @ ratio)
        gains = shares.mean(1)
        gap = float(gains.max().log() + weights.sum().log())
        if gap <= GAP:
            break
        gradient = 1 - gains - barrier / weights
        curvature = shares @ shares.T / shares.shape[1] + (barrier / weights.square()).diag()
        step = torch.linalg.solve(curvature, gradient)
        size = min(1.0, float(0.9 / (step / weights).max().clamp(min=1e-300)))  # stay above 0
        weights = weights - size * step
        barrier = barrier / 4 if size == 1.0 and float(gradient @ step) < barrier else barrier
    return weights / weights.sum(), gap
