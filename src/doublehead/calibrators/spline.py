"""Spline calibration of the confidence (Gupta et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.maps import lines, top_log_odds, with_top_odds
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.predictions import Predictions

TABLE = 1001  # points at which the map is kept, evenly spaced in rank


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
        inverse = fit_inverse_temperature(logits, labels) if self.temper else torch.ones_like(logits[0, 0])
        odds, order = top_log_odds(logits * inverse).sort()
        at, tied = odds.unique_consecutive(
            return_inverse=True
        )  # equal confidences have no order: they are averaged
        correct, confidence = _mean_by(tied, predictions.correct[order].double())[tied], odds.sigmoid()
        if self.temper:
            slopes = _slope_of_running_mean(correct - confidence, self.n_knots)
        else:
            slopes = _slope_of_running_mean(correct, self.n_knots) - confidence
        values = _mean_by(tied, slopes)
        rows = torch.linspace(0, len(at) - 1, max(2, min(TABLE, len(at)))).round().long().to(at.device)
        return {
            "temperature_": inverse.reciprocal(),
            "knots_": at[rows][None],
            "values_": values[rows][None],
            "margin_": 1 / (len(odds) + 2),
        }

    def _transform(self, logits: Tensor) -> Tensor:
        logits = logits / self.temperature_.to(logits.dtype)
        odds = top_log_odds(logits)
        confidence, margin = odds.sigmoid(), self.margin_.to(logits.dtype)
        probs = confidence + lines(odds[..., None], self.knots_, self.values_)[..., 0]
        # A spline may overshoot 0..1. It may not claim more certainty than the samples or the confidence bear.
        probs = torch.minimum(probs, torch.maximum(confidence, 1 - margin))
        probs = torch.maximum(probs, torch.minimum(confidence, margin))
        return with_top_odds(logits, probs.logit(torch.finfo(probs.dtype).eps))

    @property
    def keeps_argmax(self) -> bool:
        """Only the confidence of the predicted class changes, and not below the runner-up's."""
        return True


def _mean_by(group: Tensor, y: Tensor) -> Tensor:
    """The mean of y (N,) in each group, groups (N,) being numbered from 0 without gaps."""
    return y.new_zeros(int(group.max()) + 1).scatter_reduce(0, group, y, "mean", include_self=False)


def _slope_of_running_mean(y: Tensor, n_knots: int) -> Tensor:
    """The slope (N,) at each rank of the natural cubic spline that best fits the running sum of y (N,) over N."""
    rank = torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device) / len(y)
    knots = torch.linspace(0, 1, n_knots, dtype=y.dtype, device=y.device)
    values, slopes = _natural_basis(rank, knots)
    # On the CPU, whose solver bears fewer samples than knots.
    running = y.cumsum(0) / len(y)
    weights: Tensor = torch.linalg.lstsq(values.cpu(), running.cpu()[:, None], driver="gelsd").solution
    return slopes @ weights[:, 0].to(y.device)


def _natural_basis(x: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """The natural cubic spline basis at x and its slopes, (N, len(knots)) each: 1, x, and cubics straight outside."""
    last = knots[-1]
    powers = (x[:, None] - knots).clamp(min=0)  # (N, M)
    width = (last - knots[:-1]).clamp(min=1e-12)
    cubics = (powers[:, :-1] ** 3 - powers[:, -1:] ** 3) / width
    squares = 3 * (powers[:, :-1] ** 2 - powers[:, -1:] ** 2) / width
    one, zero = torch.ones_like(x)[:, None], torch.zeros_like(x)[:, None]
    values = torch.cat([one, x[:, None], cubics[:, :-1] - cubics[:, -1:]], 1)
    return values, torch.cat([zero, one, squares[:, :-1] - squares[:, -1:]], 1)
