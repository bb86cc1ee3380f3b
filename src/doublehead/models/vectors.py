"""Word vectors as the first layer of a text network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def embedding(vectors: Any, *, tuned: bool) -> nn.Embedding:
    """A layer that looks words up in a copy of `vectors` (V, D): fixed, or `tuned` with the rest of the network.

    >>> embedding(torch.eye(3), tuned=False)(torch.tensor([2])).tolist()
    [[0.0, 0.0, 1.0]]
    """
    if not isinstance(vectors, Tensor | np.ndarray):
        raise TypeError(
            f"vectors must be a tensor or array of shape (V, D), one row per word, got {type(vectors).__name__}"
        )
    table = torch.as_tensor(vectors)
    if table.ndim != 2 or 0 in table.shape or not table.is_floating_point():
        raise ValueError(
            "vectors must hold floating-point numbers of shape (V, D), one row per word, "
            f"got {str(table.dtype).removeprefix('torch.')} {tuple(table.shape)}"
        )
    copied = table.detach().to(torch.get_default_dtype(), copy=True)
    layer = nn.Embedding(table.shape[0], table.shape[1], _weight=copied)
    layer.weight.requires_grad_(tuned)
    return layer
