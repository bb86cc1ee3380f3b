"""The calibration head as a calibrator: fitted to predictions alone, it reads what their logits say of themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.calibrators import CALIBRATORS, Calibrator
from doublehead.double_head import Readings
from doublehead.head_inputs import Standardise, statistics
from doublehead.integrations.fit_head import fit_head_on
from doublehead.last_map import bend
from doublehead.predictions import Predictions


class HeadCalibrator(Calibrator):
    """A temperature for each sample, from statistics of its logits. For a thousand samples or more.

    What `fit_head` does for a network by default, for logits at hand: cross-fitted, and the scalar temperature itself
    unless a head is better on held-back data by more than chance; a smooth curve follows where it pays.

    >>> logits = 3 * torch.randn(200, 4)
    >>> calibrator = HeadCalibrator().fit(Predictions(logits, logits.argmax(1)))
    >>> bool((calibrator(logits).argmax(1) == logits.argmax(1)).all())
    True
    """

    learned = ("first_weight_", "first_bias_", "last_weight_", "last_bias_", "mean_", "deviation_",
               "scale_", "grid_", "curve_")  # fmt: skip

    first_weight_: Tensor  # (hidden, size), or empty for a linear head
    first_bias_: Tensor
    last_weight_: Tensor
    last_bias_: Tensor
    mean_: Tensor
    deviation_: Tensor
    scale_: Tensor
    grid_: Tensor  # (G,) where the last curve is given, and `curve_` its values; both empty without one
    curve_: Tensor

    def __init__(self, folds: int = 5, seed: int = 0) -> None:
        super().__init__()
        self.folds, self.seed = folds, seed

    @property
    def keeps_argmax(self) -> bool:
        """A positive factor changes no prediction, and the curve keeps the top class on top."""
        return True

    def in_words(self) -> str:
        """Whether a head was found, and whether a curve follows."""
        if not self.is_fitted:
            return ""
        same = not self.first_weight_.numel() and not self.last_weight_.any()
        factor = float(F.softplus(self.last_bias_).clamp(min=1e-6) * self.scale_)
        told = f"temperature {1 / factor:.4g} for all samples" if same else "a temperature for each sample"
        return told + ", then a smooth curve" * bool(self.curve_.numel())

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        logits, labels = predictions.logits, predictions.labels
        none = logits.new_empty(len(predictions), 0)
        with torch.enable_grad():
            head = fit_head_on(Readings(none, logits, labels), folds=self.folds, seed=self.seed)
        moments = head.standardise
        assert isinstance(moments, Standardise)
        has_hidden = isinstance(head.first, nn.Linear)
        return {
            "first_weight_": head.first.weight if has_hidden else torch.empty(0),
            "first_bias_": head.first.bias if has_hidden else torch.empty(0),
            "last_weight_": head.last.weight,
            "last_bias_": head.last.bias,
            "mean_": moments.mean,
            "scale_": head.after.scale,
            "grid_": head.after.grid if head.after.bends else torch.empty(0),
            "curve_": head.after.curve if head.after.bends else torch.empty(0),
            "deviation_": (moments.square - moments.mean.square()).clamp(min=1e-6).sqrt(),
        }

    def _transform(self, logits: Tensor) -> Tensor:
        inputs = (statistics(logits).to(self.mean_.dtype) - self.mean_) / self.deviation_
        if self.first_weight_.numel():
            inputs = F.relu(F.linear(inputs, self.first_weight_, self.first_bias_))
        out = F.linear(inputs, self.last_weight_, self.last_bias_).to(logits.dtype)  # (..., 1)
        below = logits - logits.amax(-1, keepdim=True)  # the largest stays exactly 0: no new tie at the top
        made = below * F.softplus(out).clamp(min=1e-6) * self.scale_.to(logits.dtype)
        if not self.curve_.numel():
            return made
        return bend(made, self.grid_.to(logits.dtype), self.curve_.to(logits.dtype))

    def _n_classes(self) -> int | None:
        """The statistics of fewer than ten classes tell how many there were."""
        n_top = len(self.mean_) - 3
        return n_top if n_top < 10 else None


CALIBRATORS["head"] = HeadCalibrator  # found by name as the others are: chosen, saved, on the command line
