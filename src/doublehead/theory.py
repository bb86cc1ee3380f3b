"""The paper's two theorems as functions, to check them numerically.

Theorem 1 (how annealing rescales gradients) holds. Theorem 2 (entropy bounds the calibration error) does not: it is
false with the entropy it names, and trivial as printed. docs/theory.md has the proofs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from doublehead.bins import check_outcomes
from doublehead.score_arrays import ArrayLike

# Confidences and correctness: the smallest counterexample to theorem 2. With one or two distinct confidences its
# right side exceeds 1, which no ECE2 does.
COUNTEREXAMPLE = ((0.98, 0.99, 1.0), (False, False, False))


class Theorem1(NamedTuple):
    """Gradient factors gamma and their claimed bounds, (..., K), in logarithms to avoid overflow."""

    label: Tensor  # (...,) the class of the largest logit
    log_gamma: Tensor
    log_lower: Tensor  # log c0 at the label, log c2 elsewhere
    log_upper: Tensor  # log c1 at the label, log c3 elsewhere
    holds: Tensor  # bool, up to rounding

    @property
    def gamma(self) -> Tensor:
        """(..., K) the factors."""
        return self.log_gamma.exp()

    @property
    def lower(self) -> Tensor:
        """(..., K) their lower bounds."""
        return self.log_lower.exp()

    @property
    def upper(self) -> Tensor:
        """(..., K) their upper bounds."""
        return self.log_upper.exp()


def theorem1(logits: ArrayLike, beta: float) -> Theorem1:
    """How scaling the logits by beta changes the gradient of cross entropy, and the paper's bounds on it.

    For logits (K,) or (N, K) whose label is the largest logit, as the theorem assumes:
    d CE(beta z) / dz_j = gamma_j * beta * d CE(z) / dz_j. The bounds are those of the main text; the appendix states
    c2, c3 and the factor beta differently and wrongly. Computed in float64; bounds hold up to rounding.

    >>> t = theorem1([2.0, 1.0, 0.0], beta=1.5)
    >>> [round(g, 3) for g in t.gamma.tolist()], bool(t.holds.all())
    ([0.64, 0.716, 0.434], True)
    """
    z = torch.as_tensor(logits).detach().to(torch.float64)
    if z.ndim not in (1, 2) or z.shape[-1] < 2:
        raise ValueError(f"logits must have shape (K,) or (N, K) with K >= 2, got {tuple(z.shape)}")
    if not bool(z.isfinite().all()):
        raise ValueError("logits must be finite, got NaN or infinity")
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta must be finite and > 0, got {beta}")
    label = z.argmax(-1)
    z = z - z.amax(-1, keepdim=True)  # gamma and the bounds are invariant to a shift of all logits
    at_label = torch.zeros_like(z, dtype=torch.bool).scatter(-1, label[..., None], True)
    log_gamma = torch.where(
        at_label,
        _log_miss(beta * z, at_label) - _log_miss(z, at_label),
        (beta * z).log_softmax(-1) - z.log_softmax(-1),
    )
    log_lower, log_upper = _theorem1_bounds(z, beta, at_label)
    slack = 16 * torch.finfo(z.dtype).eps * (1 + (1 + beta) * z.abs().amax(-1, keepdim=True))
    holds = (log_lower <= log_gamma + slack) & (log_gamma <= log_upper + slack)
    return Theorem1(label, log_gamma, log_lower, log_upper, holds)


def _theorem1_bounds(z: Tensor, beta: float, at_label: Tensor) -> tuple[Tensor, Tensor]:
    """Log of c0 and c1 at the label, of c2 and c3 elsewhere."""
    n = z.shape[-1]
    ordered = z.sort(-1).values
    smallest, second, largest = (ordered[..., [place]] for place in (0, -2, -1))  # z_(1), z_(n-1), z_(n)
    log_n = math.log(n)
    c0 = -log_n + (1 - beta) * (z - smallest) - (second - smallest)
    c1 = log_n + (1 - beta) * (z - second) + (second - smallest)
    common = (1 - beta) * (largest - z)
    c2 = common + ((1 + (n - 1) * (smallest - largest).exp()) / n).log()
    c3 = common + ((n - 1) * (second - largest).exp()).log1p()
    return torch.where(at_label, c0, c2), torch.where(at_label, c1, c3)


def _log_miss(z: Tensor, at_label: Tensor) -> Tensor:
    """log(1 - p_label), (..., 1), summed over the other classes because 1 - p would cancel to 0."""
    others = z.masked_fill(at_label, -torch.inf)
    return others.logsumexp(-1, keepdim=True) - z.logsumexp(-1, keepdim=True)


class Theorem2(NamedTuple):
    """The two sides of theorem 2, squared, under both readings of H, and a bound that holds."""

    ece2: Tensor
    shannon: Tensor  # H as named in the text: the Shannon entropy -E[log f(p)], in nats
    squared_shannon: Tensor  # C - 2 H with C = 3 - 2 E[log p] - E[f(p)]: may be negative
    squared_literal: Tensor  # the same with H as printed in the formula, E[log f(p)]: never below 2
    brier: Tensor  # E[(correct - p)^2], the top-label Brier score: a valid bound on ECE2^2

    @property
    def holds_shannon(self) -> Tensor:
        """Whether ECE2^2 <= C - 2 H with the Shannon entropy H."""
        return self.ece2.square() <= self.squared_shannon + 1e-12

    @property
    def holds_literal(self) -> Tensor:
        """Whether ECE2^2 <= C - 2 E[log f]; always true, as the right side is at least 2."""
        return self.ece2.square() <= self.squared_literal + 1e-12

    @property
    def bound_shannon(self) -> Tensor:
        """The claimed bound on ECE2; NaN if its square is negative."""
        return self.squared_shannon.sqrt()


def theorem2(confidence: ArrayLike, correct: ArrayLike, n_values: int | None = None) -> Theorem2:
    """Both sides of theorem 2 for predictions with these confidences and correctness.

    The theorem assumes a confidence with finitely many values. By default these are the distinct confidences; with
    `n_values`, the confidences in each of that many equal cells of 0..1 are replaced by their mean.

    >>> t = theorem2(*COUNTEREXAMPLE)
    >>> round(float(t.ece2), 3), round(float(t.bound_shannon), 3)
    (0.99, 0.7)
    """
    p, right = (values.double() for values in check_outcomes(confidence, correct))
    if not bool((p > 0).all()) or len(p) == 0:
        raise ValueError(
            f"confidence must be one or more numbers > 0, got {float(p.min()) if len(p) else 'none'}"
        )
    if n_values is not None and n_values < 1:
        raise ValueError(f"n_values must be at least 1, got {n_values}")
    keys = p if n_values is None else (p * n_values).ceil()  # cells are right-closed
    values, place, count = keys.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros_like(values, dtype=p.dtype).scatter_add(0, place, p) / count
    accuracy = torch.zeros_like(mean).scatter_add(0, place, right) / count
    return theorem2_of(mean, count / len(p), accuracy)


def theorem2_of(values: Tensor, mass: Tensor, accuracy: Tensor) -> Theorem2:
    """Both sides of theorem 2 for a distribution: confidences (..., V) in (0, 1], their mass f and accuracy.

    Values of mass 0 are ignored, so distributions of different sizes fit one tensor.

    >>> five = torch.tensor([0.96, 0.97, 0.98, 0.99, 1.0])  # equally frequent, perfectly calibrated
    >>> t = theorem2_of(five, torch.full((5,), 0.2), five)
    >>> float(t.ece2), round(float(t.squared_shannon), 3), bool(t.holds_shannon)
    (0.0, -0.378, False)
    """
    values, mass, accuracy = (x.to(torch.float64) for x in (values, mass, accuracy))
    shannon = -torch.xlogy(mass, mass).sum(-1)
    log_p = torch.where(mass > 0, values, 1).log()
    constant = 3 - 2 * (mass * log_p).sum(-1) - mass.square().sum(-1)
    squared = (mass * (accuracy - values).square()).sum(-1)
    brier = squared + (mass * accuracy * (1 - accuracy)).sum(-1)
    return Theorem2(squared.sqrt(), shannon, constant - 2 * shannon, constant + 2 * shannon, brier)
