"""Image batches made on the device itself: the whole set lies there, no worker processes, no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from doublehead.data.epochs import Batches
from doublehead.data.normalise import Normalise

CHUNK_IMAGES = (
    2048  # made in one go and then cut into batches, so that launching kernels costs next to nothing
)


@dataclass(frozen=True)
class CropFlip:
    """The augmentation of the paper: a crop of the original size after padding, and a flip left to right.

    `mode="zero"` pads with black, `"reflect"` with the mirrored image.
    """

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0 or self.mode not in ("zero", "reflect"):
            raise ValueError(
                f"padding must be at least 0 and mode 'zero' or 'reflect', got {self.padding}, {self.mode!r}"
            )


class DeviceBatches(Batches):
    """Batches of images (B, C, H, W) and labels (B,) from uint8 images (N, H, W, C) that lie on `device` as a whole.

    Images come out as `dtype`, in 0..1, or normalised where `normalise` is given. With `channels_last` their memory
    has the channels innermost. `augment` is drawn anew for each image in each epoch. Augmenting costs one gather
    over 2,048 images at a time and no synchronisation with the host.

    >>> images, labels = np.zeros((10, 8, 8, 3), np.uint8), np.arange(10)
    >>> batches = DeviceBatches(images, labels, 4, train=True, augment=CropFlip())
    >>> [tuple(x.shape) for x, y in batches]
    [(4, 3, 8, 8), (4, 3, 8, 8)]
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8] | Tensor,
        labels: npt.NDArray[Any] | Tensor,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        train: bool = False,
        augment: CropFlip | None = None,
        normalise: Normalise | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        seed: int = 0,
    ) -> None:
        pixels = torch.as_tensor(images)
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise ValueError(
                f"images must be uint8 of shape (N, H, W, C), got {pixels.dtype} {tuple(pixels.shape)}"
            )
        if len(labels) != len(pixels):
            raise ValueError(f"labels must be as many as the {len(pixels)} images, got {len(labels)}")
        super().__init__(len(pixels), batch_size, train=train, seed=seed)
        self.device, self.augment, self.dtype = torch.device(device), augment, dtype
        self.channels_last = channels_last
        self.labels = torch.as_tensor(labels).to(self.device, torch.int64)
        self.height, self.width, n_channels = pixels.shape[1:]
        # (N, H + 2p, W + 2p, C)
        self.pixels = (_pad(pixels, augment) if augment else pixels).contiguous().to(self.device)
        mean, std = (normalise.mean, normalise.std) if normalise else ((0.0,), (1.0,))
        if normalise and len(mean) != n_channels:
            raise ValueError(f"normalise must have {n_channels} channels, got {len(mean)}")
        self._scale = 1 / (255 * torch.tensor(std, device=self.device))  # (C,) or (1,)
        self._shift = -torch.tensor(mean, device=self.device) / torch.tensor(std, device=self.device)

    def _batches_from(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        plan = self._plan()
        chunk = max(1, CHUNK_IMAGES // self.batch_size) * self.batch_size
        for start in range(position * self.batch_size, plan.shape[1], chunk):
            part = plan[:, start : start + chunk]
            yield from zip(
                self._images(part).split(self.batch_size), self.labels[part[0]].split(self.batch_size)
            )

    def _plan(self) -> Tensor:
        """(1, n) the sample numbers of this epoch, or (4, n) with the crop's top and left and whether to flip."""
        generator = self._generator()
        rows = [self._order(generator)]
        if self.augment:
            for high in (2 * self.augment.padding + 1,) * 2 + (1 + self.augment.flip,):
                rows.append(torch.randint(high, (self.n,), generator=generator))
        return torch.stack([self._own(row) for row in rows]).to(self.device)

    def _images(self, plan: Tensor) -> Tensor:
        """The images of some columns of the plan, (B, C, H, W)."""
        pixels = self._cropped(plan) if self.augment else self.pixels[plan[0]]  # (B, H, W, C) uint8
        images = torch.mul(pixels, self._scale).add_(self._shift).to(self.dtype).permute(0, 3, 1, 2)
        return images if self.channels_last else images.contiguous()

    def _cropped(self, plan: Tensor) -> Tensor:
        """One gather: the row and the column that each pixel of each crop comes from."""
        sample, top, left, flip = plan[:, :, None]  # (B, 1) each
        down = torch.arange(self.height, device=self.device)
        across = torch.arange(self.width, device=self.device)
        rows = top + down  # (B, H)
        columns = left + torch.where(flip == 1, self.width - 1 - across, across)  # (B, W)
        return self.pixels[sample[:, :, None], rows[:, :, None], columns[:, None, :]]


def _pad(images: Tensor, augment: CropFlip) -> Tensor:
    width = ((0, 0), (augment.padding,) * 2, (augment.padding,) * 2, (0, 0))
    mode = {"zero": "constant", "reflect": "reflect"}[augment.mode]
    return torch.from_numpy(np.pad(images.cpu().numpy(), width, mode=mode))  # type: ignore[call-overload]
