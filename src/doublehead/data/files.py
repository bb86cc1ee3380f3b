"""Batches from image files on disk, decoded by worker processes: for sets that do not fit on the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from doublehead.data.epochs import Batches
from doublehead.data.normalise import Normalise
from doublehead.data.readers import naming
from doublehead.data.splits import ImageFiles
from doublehead.optional import require


class FileBatches(Batches):
    """Batches of images (B, 3, size, size) and labels (B,), read from files by a torch DataLoader.

    In training a random part of the image (8 % .. 100 % of its area) is resized to `size` and flipped by chance, as is
    usual for ImageNet; otherwise the centre is taken after resizing the shorter side to 256/224 of `size`. What is
    random follows from seed, epoch and the sample's number, so it does not depend on the number of workers
    and resumes exactly. `augment=False` keeps the centre in training too.
    """

    def __init__(
        self,
        samples: ImageFiles,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        train: bool = False,
        augment: bool | None = None,
        size: int = 224,
        normalise: Normalise | None = None,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(len(samples), batch_size, train=train, seed=seed)
        self.samples, self.device, self.size, self.workers = samples, torch.device(device), size, workers
        self.augment = train if augment is None else augment
        self.normalise = normalise

    def _batches_from(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._own(self._order(self._generator()))[position * self.batch_size :]
        batches: DataLoader[tuple[Tensor, int]] = DataLoader(
            _Files(self.samples, self.size, self.augment, (self.seed, self.epoch)),
            batch_sampler=[chosen.tolist() for chosen in order.split(self.batch_size)],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # Each worker gets a base seed from the global generator: a generator of our own leaves that one alone.
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=_one_thread,
        )
        for pixels, labels in batches:
            images = pixels.to(self.device, non_blocking=True).float() / 255
            yield (
                self.normalise(images) if self.normalise else images,
                labels.to(self.device, non_blocking=True),
            )


class _Files(Dataset[tuple[Tensor, int]]):
    """Item i: the image of file i, uint8 (3, size, size), and its label."""

    def __init__(self, samples: ImageFiles, size: int, augment: bool, key: tuple[int, int]) -> None:
        self.size, self.augment, self.key, self.labels = size, augment, key, samples.labels
        # One array instead of a million Python objects, whose counters would make each worker copy them.
        self.files = np.array([os.fsencode(file) for file in samples.files])
        self.pillow = require("PIL.Image", extra="data")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        file = Path(os.fsdecode(self.files[i]))
        with naming(file), self.pillow.open(file) as image:
            colour = image.convert("RGB")
            box, flip = self._box(i, *colour.size)
            pixels = colour.resize((self.size, self.size), self.pillow.Resampling.BILINEAR, box=box)
        tensor = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
        tensor = tensor.view(self.size, self.size, 3).permute(2, 0, 1)
        return tensor.flip(2) if flip else tensor, int(self.labels[i])

    def _box(self, i: int, width: int, height: int) -> tuple[tuple[float, float, float, float], bool]:
        """The part of the image to take, (left, top, right, bottom), and whether to mirror it."""
        if not self.augment:
            side = min(width, height) * 224 / 256
            left, top = (width - side) / 2, (height - side) / 2
            return (left, top, left + side, top + side), False
        seed, epoch = self.key
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) * 2_000_003 + i)
        for _ in range(10):  # as torchvision's RandomResizedCrop: ten tries, then the centre
            area, ratio, x, y = torch.rand(4, generator=generator).tolist()
            shape = (3 / 4) * (16 / 9) ** ratio  # 3/4 .. 4/3, uniform in its logarithm
            pixels = (0.08 + 0.92 * area) * width * height
            w, h = (pixels * shape) ** 0.5, (pixels / shape) ** 0.5
            if w <= width and h <= height:
                left, top = x * (width - w), y * (height - h)
                flip = bool(torch.rand((), generator=generator) < 0.5)
                return (left, top, left + w, top + h), flip
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return (left, top, left + side, top + side), bool(torch.rand((), generator=generator) < 0.5)


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)
