"""Predictions that several tests make, calls that are refused, and a pickle that none may load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import Predictions


class Bomb:
    """What a malicious pickle does: it calls something while it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def refused(
    message: str, call: Callable[..., Any], *args: Any, error: Any = ValueError, **options: Any
) -> None:
    """That `call(*args, **options)` raises this error; `message` is a regular expression."""
    with pytest.raises(error, match=message):
        call(*args, **options)


def binary(confidence: Any, correct: Any, dtype: Any = np.float64) -> Predictions:
    """Two classes, the first predicted with these confidences, all of them >= 0.5."""
    confidence, labels = np.asarray(confidence, dtype=dtype), 1 - np.asarray(correct, dtype=int)
    return Predictions.from_probs(np.stack([confidence, 1 - confidence], 1), labels)


def overconfident(
    n: int, k: int, factor: float = 3.0, *, spread: float = 1.5, seed: int = 0, dtype: Any = torch.float32
) -> Predictions:
    """Labels drawn from softmax(z) of random z, logits factor * z: calibrated at 1, underconfident below."""
    generator = torch.Generator().manual_seed(seed)
    z = spread * torch.randn(n, k, generator=generator, dtype=dtype)
    return Predictions(factor * z, z.softmax(1).multinomial(1, generator=generator)[:, 0])


def random_predictions(n: int, k: int = 7, sharpness: float = 2.0) -> Predictions:
    """Labels drawn from softmax(sharpness * logits): calibrated at 1, underconfident above."""
    return overconfident(n, k, 1 / sharpness, spread=3 * sharpness, seed=3)
