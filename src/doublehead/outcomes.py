"""Outcomes: what is kept of each prediction once its scores are gone. A few bytes a sample, whatever the classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.predictions import Predictions


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Confidences and whether each answer was correct; the rest is None where only these are known.

    >>> found = Outcomes.of(Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 0]))
    >>> len(found), found.correct.tolist(), found[1:].predicted.tolist()
    (2, [True, False], [1])
    """

    confidence: Tensor  # (N,)
    correct: Tensor  # (N,) bool
    labels: Tensor | None = None  # (N,) int32
    predicted: Tensor | None = None  # (N,) int32
    nll: Tensor | None = None  # (N,) float64; without weights inf where the label has a probability of 0
    weights: Tensor | None = None  # (N,) float64

    @classmethod
    def of(cls, p: Predictions) -> Outcomes:
        """The outcomes of predictions, on the CPU."""
        nll = metrics.per_sample(p)["nll"]
        if p.weights is None:
            nll = nll.where(~metrics.zero_labels(p), torch.inf)
        columns = (p.confidence, p.correct, p.labels.int(), p.predicted.int(), nll, p.weights)
        return cls(*(None if column is None else column.cpu() for column in columns))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """One after the other."""
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        return cls(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})

    def __len__(self) -> int:
        return len(self.confidence)

    def __getitem__(self, rows: Any) -> Outcomes:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return Outcomes(**{name: column[rows] for name, column in columns.items() if column is not None})

    def top_label(self) -> tuple[Tensor, Tensor]:
        """(N,) `confidence` and (N,) `correct`, as of `Predictions`."""
        return self.confidence, self.correct

    def bins(self, n_bins: int) -> Bins:
        """Bins (n_bins,) of the confidences."""
        return Bins.of(self.confidence, self.correct, n_bins, self.weights)
