"""Pixels 0..1 <-> the normalised values a network reads, channel by channel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalise:
    """(pixel - mean) / std for each channel, pixels in 0..1; images are (..., C, H, W).

    >>> normalise = Normalise((0.5,), (0.25,))
    >>> normalise(torch.ones(1, 1, 1)).item(), normalise.undo(torch.tensor([[[2.0]]])).item()
    (2.0, 1.0)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean and std must have one number per channel, got {self.mean} and {self.std}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")

    @classmethod
    def of(cls, images: npt.NDArray[Any]) -> Normalise:
        """The mean and deviation of uint8 images (N, H, W, C), taken over all pixels: give it the train split."""
        n_pixels = images[..., 0].size
        counts = np.stack(
            [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
        )
        values = np.arange(256) / 255.0
        mean = counts @ values / n_pixels
        std = np.sqrt(counts @ values**2 / n_pixels - mean**2)
        return cls(tuple(mean.tolist()), tuple(np.maximum(std, 1e-3).tolist()))

    def __call__(self, images: Tensor) -> Tensor:
        """Pixels in 0..1 -> normalised."""
        return (images - self._channels(self.mean, images)) / self._channels(self.std, images)

    def undo(self, images: Tensor) -> Tensor:
        """Normalised -> pixels in 0..1."""
        return images * self._channels(self.std, images) + self._channels(self.mean, images)

    def _channels(self, values: tuple[float, ...], images: Tensor) -> Tensor:
        if images.shape[-3] != len(values):
            raise ValueError(f"images must have {len(values)} channels, got shape {tuple(images.shape)}")
        return _constant(values, images.dtype, images.device)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(C, 1, 1), made once: copying it to a GPU anew for each batch would wait for the GPU."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
