"""Batches of one split, epoch after epoch, with exact resume and one part per process."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from doublehead.data.readers import naming
from doublehead.data.splits import ImageFiles, Images
from doublehead.system import require

B = TypeVar("B", bound="Batches")
CHUNK_IMAGES = 2048  # images made at once and then cut into batches, to launch fewer kernels


class Batches(ABC):
    """Batches (inputs, labels) of one split on `device`, epoch after epoch.

    `train=True` shuffles in each epoch and drops the last, smaller batch; otherwise all samples come in their own
    order. Everything random in an epoch follows from `seed` and the epoch number alone, so a run resumes exactly
    and every device sees the same samples.

    Iterating starts the next epoch, or continues the one that `load_state_dict` restored.
    """

    def __init__(
        self, n: int, batch_size: int, device: torch.device | str, *, train: bool = False, seed: int = 0
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.n, self.batch_size, self.train, self.seed = n, batch_size, train, seed
        self.device = torch.device(device)
        self.rank, self.world_size = 0, 1
        self.epoch = self.position = 0  # position: batches yielded in this epoch
        self._begun = False
        self._check_enough()

    def shard(self: B, rank: int, world_size: int) -> B:
        """The batches of process `rank` out of `world_size`; the data itself is shared.

        In training each step's `world_size * batch_size` samples are divided among the processes, so together they
        see what one process with the larger batch would see. Otherwise each takes one contiguous part, and together
        they see each sample exactly once.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..{world_size - 1}, got {rank}")
        part = copy.copy(self)
        part.rank, part.world_size = rank, world_size
        part._check_enough()
        return part

    def __len__(self) -> int:
        if self.train:
            return self.n // (self.batch_size * self.world_size)
        start, stop = self._bounds()
        return (stop - start + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.epoch, self.position = self.epoch + 1, 0
        self._begun = True
        # Always on the CPU, so that every device sees the same draws.
        generator = torch.Generator().manual_seed(self._key)
        order = torch.randperm(self.n, generator=generator) if self.train else torch.arange(self.n)
        rows = self._own(order)
        for batch in self._batches(rows, generator) if len(rows) else ():  # a small part may be empty
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch and position; not the data or the settings."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken. After a finished epoch the next one starts."""
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self._begun = self.position >= len(self)

    @abstractmethod
    def _batches(self, rows: Tensor, generator: torch.Generator) -> Iterator[Any]:
        """The batches of the samples numbered `rows` (n,); further draws of the epoch come from `generator`."""

    @property
    def _key(self) -> int:
        """The seed of this epoch."""
        return self.seed * 1_000_003 + self.epoch

    def _own(self, values: Tensor) -> Tensor:
        """This process's part of `values`, one entry per sample in the order of the epoch, from `position` on."""
        if self.train:
            whole = values[: len(self) * self.world_size * self.batch_size]
            values = whole.view(len(self), self.world_size, self.batch_size)[:, self.rank].flatten()
        else:
            start, stop = self._bounds()
            values = values[start:stop]
        return values[self.position * self.batch_size :]

    def _bounds(self) -> tuple[int, int]:
        return self.rank * self.n // self.world_size, (self.rank + 1) * self.n // self.world_size

    def _check_enough(self) -> None:
        if self.train and len(self) == 0:
            raise ValueError(
                f"batch_size must be at most the {self.n} samples divided by the {self.world_size} processes for "
                f"training, got {self.batch_size}"
            )


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
        """Mean and standard deviation of uint8 images (N, H, W, C) over all pixels; pass the train split."""
        n_pixels = images[..., 0].size
        counts = np.stack(
            [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
        )
        values = np.arange(256) / 255.0
        mean = counts @ values / n_pixels
        variance = counts @ values**2 / n_pixels - mean**2  # of a constant channel about 0, perhaps below
        return cls(tuple(mean.tolist()), tuple(np.sqrt(np.maximum(variance, 1e-6)).tolist()))

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
    """(C, 1, 1), cached: copying it to a GPU for each batch would wait for the GPU."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


@dataclass(frozen=True)
class CropFlip:
    """The paper's augmentation: pad by zeros, crop a random window of the original size, flip by chance."""

    padding: int = 4
    flip: bool = True


class DeviceBatches(Batches):
    """Batches of images (B, C, H, W) and labels (B,) from uint8 images (N, H, W, C) kept whole on `device`.

    Images come out as float32, in 0..1, or normalised if `normalise` is given; `channels_last` sets their memory
    format. `augment` is drawn for each image in each epoch. Augmentation is one gather per 2,048 images and does not
    synchronise with the host.

    >>> samples = Images(np.zeros((10, 8, 8, 3), np.uint8), np.arange(10))
    >>> batches = DeviceBatches(samples, 4, train=True, augment=CropFlip())
    >>> [tuple(x.shape) for x, y in batches]
    [(4, 3, 8, 8), (4, 3, 8, 8)]
    """

    def __init__(
        self,
        samples: Images,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        augment: CropFlip | None = None,
        normalise: Normalise | None = None,
        channels_last: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(len(samples), batch_size, device, **options)
        self.augment, self.channels_last = augment, channels_last
        self.labels = torch.from_numpy(samples.labels).to(self.device)
        self.height, self.width, n_channels = samples.images.shape[1:]
        # (N, H + 2p, W + 2p, C)
        margin = (augment.padding if augment else 0,) * 4
        pixels = torch.from_numpy(np.ascontiguousarray(samples.images))
        self.pixels = F.pad(pixels, (0, 0, *margin)).to(self.device)
        mean, std = (normalise.mean, normalise.std) if normalise else ((0.0,), (1.0,))
        if normalise and len(mean) != n_channels:
            raise ValueError(f"normalise must have {n_channels} channels, got {len(mean)}")
        self._scale = 1 / (255 * torch.tensor(std, device=self.device))  # (C,) or (1,)
        self._shift = -torch.tensor(mean, device=self.device) / torch.tensor(std, device=self.device)

    def _batches(self, rows: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        columns = [rows]  # with `augment` also top, left and flip of each crop
        if self.augment:
            for high in (2 * self.augment.padding + 1,) * 2 + (1 + self.augment.flip,):
                columns.append(self._own(torch.randint(high, (self.n,), generator=generator)))
        plan = torch.stack(columns).to(self.device)  # (1, n) or (4, n)
        for part in plan.split(max(1, CHUNK_IMAGES // self.batch_size) * self.batch_size, dim=1):
            images, labels = self._images(part), self.labels[part[0]]
            yield from zip(images.split(self.batch_size), labels.split(self.batch_size))

    def _images(self, plan: Tensor) -> Tensor:
        """(B, C, H, W) the images of some columns of the plan."""
        pixels = self.pixels[plan[0]] if self.augment is None else self._cropped(plan)  # (B, H, W, C) uint8
        images = torch.mul(pixels, self._scale).add_(self._shift).permute(0, 3, 1, 2)
        return images if self.channels_last else images.contiguous()

    def _cropped(self, plan: Tensor) -> Tensor:
        """(B, H, W, C) the crops, gathered by source row and column."""
        sample, top, left, flip = plan[:, :, None]  # (B, 1) each
        down = torch.arange(self.height, device=self.device)
        across = torch.arange(self.width, device=self.device)
        rows = top + down  # (B, H)
        columns = left + torch.where(flip == 1, self.width - 1 - across, across)  # (B, W)
        return self.pixels[sample[:, :, None], rows[:, :, None], columns[:, None, :]]


class FileBatches(Batches):
    """Batches of images (B, 3, size, size) and labels (B,), read from files by a torch DataLoader.

    In training a random part of the image (8 % to 100 % of its area) is resized to `size` and randomly flipped, as is
    usual for ImageNet; otherwise the centre is cropped after resizing the shorter side to 256/224 of `size`. Draws
    follow from seed, epoch and sample number, so they do not depend on `workers` and resume exactly.
    `augment=False` takes the centre in training too.
    """

    def __init__(
        self,
        samples: ImageFiles,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        augment: bool | None = None,
        size: int = 224,
        normalise: Normalise | None = None,
        workers: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(len(samples), batch_size, device, **options)
        self.samples, self.size, self.workers = samples, size, workers
        self.augment = self.train if augment is None else augment
        self.normalise = normalise

    def _batches(self, rows: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        batches: DataLoader[tuple[Tensor, int]] = DataLoader(
            _Files(self.samples, self.size, self.augment, self._key),
            batch_sampler=[chosen.tolist() for chosen in rows.split(self.batch_size)],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # Workers draw their base seed from this generator; the default is the global one.
            generator=torch.Generator().manual_seed(self.seed),
        )
        for pixels, labels in batches:
            images = pixels.to(self.device, non_blocking=True).float() / 255
            yield (
                self.normalise(images) if self.normalise else images,
                labels.to(self.device, non_blocking=True),
            )


class _Files(Dataset[tuple[Tensor, int]]):
    """Item i: the image of file i, uint8 (3, size, size), and its label."""

    def __init__(self, samples: ImageFiles, size: int, augment: bool, key: int) -> None:
        # One array, not a million Python objects: reference counts would make each worker copy those.
        self.files, self.labels = np.array([os.fsencode(file) for file in samples.files]), samples.labels
        self.key, t = key, require("torchvision.transforms", extra="data")
        random = (t.RandomResizedCrop(size), t.RandomHorizontalFlip())
        centre = (t.Resize(round(size * 256 / 224)), t.CenterCrop(size))
        self.transform = t.Compose([*(random if augment else centre), t.PILToTensor()])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        file = Path(os.fsdecode(self.files[i]))
        pillow = require("PIL.Image", extra="data")
        with naming(file), pillow.open(file) as image, torch.random.fork_rng(devices=()):
            # Not torch.manual_seed, which would also seed the GPU, on which the network draws.
            torch.default_generator.manual_seed(self.key * 2_000_003 + i)
            return self.transform(image.convert("RGB")), int(self.labels[i])
