"""Leave the logits as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from doublehead.calibrators.base import Calibrator
from doublehead.predictions import Predictions


class Identity(Calibrator):
    """Change nothing. The row every other calibrator must beat.

    >>> p = Predictions([[2.0, 0.0]], [0])
    >>> Identity().fit(p)(p.logits).tolist()
    [[2.0, 0.0]]
    """

    takes_weights = True

    @property
    def keeps_argmax(self) -> bool:
        """Nothing changes."""
        return True

    @property
    def never_worse(self) -> bool:
        """Nothing changes."""
        return True

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        return {}

    def _transform(self, logits: Tensor) -> Tensor:
        return logits
