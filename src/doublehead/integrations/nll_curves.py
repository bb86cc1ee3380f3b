"""Each sample's NLL as a function of its own inverse temperature, tabulated once and read at no cost in K."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doublehead.predictions import CHUNK_ENTRIES

REACH = 2.5  # the table spans e**-2.5 .. e**2.5 times the centre: a twelfth to twelve times the fitted temperature
KNOTS = 41  # cubic pieces of 1/8 in log(s): within 3e-4 of the exact NLL of a sample


class NllCurves:
    """The NLL of N samples against u = log(s), s a sample's inverse temperature, as smooth cubic pieces.

    With d the logits less their row's largest, the NLL is log(sum(exp(s d))) - s d_label. Its value and slope at the
    knots are exact; between them stands the cubic that agrees with both, outside the straight line. Training a
    head that gives one number per sample then costs the same for 1,000 classes as for two.

    >>> logits, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(float(NllCurves(logits, labels)(torch.tensor([0.0]))), 4)  # log(1 + exp(-2))
    0.1269
    """

    def __init__(self, logits: Tensor, labels: Tensor, centre: float = 0.0) -> None:
        self.low, self.width = centre - REACH, 2 * REACH / (KNOTS - 1)
        inverse = torch.linspace(self.low, centre + REACH, KNOTS, dtype=torch.float64).exp().tolist()
        values, slopes = [], []
        rows = max(1, CHUNK_ENTRIES // logits.shape[1])
        for some, their in zip(logits.split(rows), labels.split(rows)):
            below = some - some.amax(1, keepdim=True)  # (n, K)
            pairs = [_nll_and_slope(below, below.gather(1, their[:, None])[:, 0], s) for s in inverse]
            values.append(torch.stack([value for value, _ in pairs], 1))
            slopes.append(torch.stack([slope for _, slope in pairs], 1))
        self.values = torch.cat(values).flatten()  # (N * KNOTS,)
        self.rises = torch.cat(slopes).flatten() * self.width  # slope times the width of a piece
        self.first = torch.arange(len(logits), device=logits.device) * KNOTS  # (N,) each sample's first knot

    def __call__(self, u: Tensor) -> Tensor:
        """The NLL (..., N) of each sample at log inverse temperatures u (..., N)."""
        x = (u - self.low) / self.width
        inside = x.clamp(0, KNOTS - 1 - 1e-4)
        knot = inside.detach().long()
        t, at = inside - knot, self.first + knot
        v0, v1, r0, r1 = (table.take(place) for table in (self.values, self.rises) for place in (at, at + 1))
        rise = v1 - v0
        cubic = v0 + t * (r0 + t * ((3 * rise - 2 * r0 - r1) + t * (r0 + r1 - 2 * rise)))
        return cubic + torch.where(x < inside, r0, r1) * (x - inside)


def _nll_and_slope(below: Tensor, label: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """(n,) NLL of s * below and its derivative in log(s)."""
    weight = (below * s).exp_()
    total = weight.sum(1)
    return total.log() - s * label, s * (weight.mul_(below).sum(1) / total - label)


def inverse_softplus(value: float) -> float:
    """x with log(1 + exp(x)) = value, for value > 0.

    >>> round(inverse_softplus(math.log(2.0)), 6) == 0
    True
    """
    return value + math.log(-math.expm1(-value)) if value < 30 else value
