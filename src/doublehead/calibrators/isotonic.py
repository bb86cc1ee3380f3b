"""Isotonic regression: the best rising map of the probabilities."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.maps import keep_top, lines, log_normalise, log_odds, pad
from doublehead.optional import require
from doublehead.predictions import Predictions

FLOOR = 1e-6  # no class is declared impossible: isotonic ends often are exactly 0


class Isotonic(Calibrator):
    """The best rising map of probabilities, by scikit-learn. Use it with thousands of samples, where no formula fits.

    `kind="shared"` fits one map to all classes together and keeps the predicted class (IRM of Zhang et al. 2020);
    `"one-vs-rest"` fits one map per class, normalised to sum to 1. Between samples the map is linear in the log odds.
    """

    learned = ("knots_", "values_")

    knots_: Tensor  # (1 or K, M) in log odds
    values_: Tensor  # (1 or K, M) probabilities

    def __init__(self, kind: Literal["shared", "one-vs-rest"] = "shared") -> None:
        super().__init__()
        self.kind = kind

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if self.kind not in ("shared", "one-vs-rest"):
            raise ValueError(f"kind must be 'shared' or 'one-vs-rest', got {self.kind!r}")
        odds = log_odds(predictions.logits.double()).T  # (K, N)
        hits = one_hot(predictions.labels, predictions.n_classes).T
        if self.kind == "shared":
            odds, hits = odds.reshape(1, -1), hits.reshape(1, -1)
        maps = [_fit_rising(*column) for column in zip(odds, hits)]
        return {"knots_": pad([knots for knots, _ in maps]), "values_": pad([values for _, values in maps])}

    def _transform(self, logits: Tensor) -> Tensor:
        odds = log_odds(logits)
        if not self._shared:
            return log_normalise(lines(odds, self.knots_, self.values_), FLOOR)
        mapped = lines(odds[..., None], self.knots_, self.values_)[..., 0]
        return keep_top(log_normalise(mapped, FLOOR), logits)

    def _n_classes(self) -> int | None:
        return None if self._shared else self.values_.shape[0]

    @property
    def _shared(self) -> bool:
        """Read off the fitted state where there is one, so that the state alone decides what is done."""
        return self.values_.shape[0] == 1 if self.is_fitted else self.kind == "shared"

    @property
    def keeps_argmax(self) -> bool:
        """One rising map for all classes keeps their order, up to ties, which go to the class that was on top."""
        return self._shared


def _fit_rising(odds: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """Knots and values (M,) of the isotonic fit to odds and hits (N,), at least two of each."""
    regression = require("sklearn.isotonic", extra="calibrators").IsotonicRegression(y_min=0.0, y_max=1.0)
    regression.fit(odds.cpu().numpy(), hits.double().cpu().numpy())
    knots = torch.as_tensor(regression.X_thresholds_, dtype=torch.float64)
    values = torch.as_tensor(regression.y_thresholds_, dtype=torch.float64)
    return (knots, values) if len(knots) > 1 else (knots.repeat(2), values.repeat(2))
