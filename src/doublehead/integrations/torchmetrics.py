"""A calibration error for a stream of batches and any number of processes, as a `torchmetrics.Metric`.

Importing this file needs torchmetrics. Without it a stream is two lines of plain torch:
`bins = Bins.zeros(15)`, then `bins += Bins.top(Predictions(logits, labels))` for each batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doublehead.bins import Bins, check_n_bins
from doublehead.predictions import Predictions
from doublehead.system import require

Metric: Any = require("torchmetrics", extra="metrics").Metric


class CalibrationError(Metric):  # type: ignore[misc]
    """`metrics.ece` of all batches seen so far, by all processes, to the last bit.

    `update` takes logits, or probabilities where `are_probs=True`, and labels. With `n_classes` the error is the
    class-wise one. The state, `bins`, does not grow with the data; `Bins.from_state(metric.bins)` has further errors.

    >>> metric = CalibrationError(n_bins=15)
    >>> metric.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> round(float(metric.compute()), 4)
    0.4251
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(
        self, n_bins: int = 15, *, n_classes: int | None = None, are_probs: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.n_classes, self.are_probs = n_classes, are_probs
        shape = [size for size in (3, n_classes, check_n_bins(n_bins)) if size is not None]
        self.add_state("bins", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (or probs) (B, K) and labels (B,)."""
        p = Predictions.from_probs(logits, labels) if self.are_probs else Predictions(logits, labels)
        if self.n_classes not in (None, p.n_classes):
            raise ValueError(f"logits must have {self.n_classes} columns, got {p.n_classes}")
        found = (Bins.classwise if self.n_classes else Bins.top)(p, self.bins.shape[-1])
        self.bins += found.state().to(self.bins.device)

    def compute(self) -> Tensor:
        """The error of everything seen, 0-dim float64; nan before the first batch."""
        return Bins.from_state(self.bins).ece().mean()
