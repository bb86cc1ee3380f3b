"""Networks small enough for tests, named as `tiny_networks:mlp` by commands that run in this folder."""

from __future__ import annotations

from torch import nn


def mlp(n_classes: int) -> nn.Module:
    """Without BatchNorm and dropout: the same in one process and in two."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, n_classes))


def dropout_mlp(n_classes: int) -> nn.Module:
    """With everything that has a state: BatchNorm's averages and dropout's random numbers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(32, n_classes),
    )


def norm_mlp(n_classes: int) -> nn.Module:
    """With a layer for guards to read, and the same in one process and in two."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, n_classes)
    )
