"""A calibration error for a stream of batches and any number of processes, as a `torchmetrics.Metric`.

Importing this file needs torchmetrics. Without it a stream is two lines of plain torch:
`bins = Bins.zeros(15)`, then `bins += Bins.top(Predictions(logits, labels))` for each batch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from doublehead.bins import Bins, check_n_bins
from doublehead.metrics.calibration import Components
from doublehead.predictions import Predictions
from doublehead.system import require

Metric: Any = require("torchmetrics", extra="metrics").Metric


class CalibrationError(Metric):  # type: ignore[misc]
    """`metrics.ece` (or mce, ece2) of all batches seen so far, by all processes, to the last bit.

    The state is a handful of whole numbers per bin, summed over processes; it does not grow with the data.
    `update(logits, labels)` takes logits, or probabilities where `are_probs=True`. Class-wise errors need
    `n_classes`, the size of their state.

    >>> metric = CalibrationError(n_bins=15)
    >>> metric.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> round(float(metric.compute()), 4)
    0.4251
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(
        self,
        n_bins: int = 15,
        components: Components = "top",
        norm: Literal["ece", "mce", "ece2"] = "ece",
        *,
        n_classes: int | None = None,
        are_probs: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if components not in ("top", "all", "classwise"):
            raise ValueError(f"components must be 'top', 'all' or 'classwise', got {components!r}")
        if norm not in ("ece", "mce", "ece2"):
            raise ValueError(f"norm must be 'ece', 'mce' or 'ece2', got {norm!r}")
        if (components == "top") != (n_classes is None):
            raise ValueError(
                f"n_classes must be given exactly when components is not 'top', got {n_classes!r}"
            )
        self.n_bins, self.components, self.norm = check_n_bins(n_bins), components, norm
        self.n_classes, self.are_probs = n_classes, are_probs
        rows = () if components != "classwise" else (n_classes,)
        self.add_state("bins", torch.zeros(3, *rows, n_bins, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (or probs) (B, K) and labels (B,)."""
        p = Predictions.from_probs(logits, labels) if self.are_probs else Predictions(logits, labels)
        if self.n_classes not in (None, p.n_classes):
            raise ValueError(f"logits must have {self.n_classes} columns, got {p.n_classes}")
        bins_of = {"top": Bins.top, "all": Bins.pooled, "classwise": Bins.classwise}[self.components]
        self.bins += bins_of(p, self.n_bins).state().to(self.bins.device)

    def compute(self) -> Tensor:
        """The error of everything seen, 0-dim float64; nan before the first batch."""
        bins = Bins.from_state(self.bins)
        error: Tensor = getattr(bins, self.norm)()
        if self.components == "all" and self.norm == "ece" and self.n_classes:
            error = error * self.n_classes  # divided by N, as `metrics.ece` does
        return error.mean()
