"""What every kind of batches shares: the order of an epoch, its share for each process, and exact resume."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

B = TypeVar("B", bound="Batches")


class Batches(ABC):
    """Batches (inputs, labels) of one split, epoch after epoch.

    `train=True` shuffles anew in each epoch and leaves out the last, smaller batch; otherwise samples come in
    their own order, all of them. Everything random in an epoch follows from `seed` and the epoch's number alone,
    so a run resumes exactly and the CPU and a GPU see the same samples.

    Iterating starts the next epoch, or goes on within the one that `load_state_dict` restored.
    """

    def __init__(self, n: int, batch_size: int, *, train: bool, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.n, self.batch_size, self.train, self.seed = n, batch_size, train, seed
        self.rank, self.world_size = 0, 1
        self.epoch = self.position = 0  # position: batches given in this epoch
        self._begun = False
        self._check_enough()

    def shard(self: B, rank: int, world_size: int) -> B:
        """The part of these batches that process `rank` of `world_size` takes; the data itself is shared.

        In training each step's `world_size * batch_size` samples are dealt out to the processes, so together they
        see what one process with the larger batch would see. Otherwise each takes one contiguous part,
        and together they see each sample exactly once.
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
        for batch in self._batches_from(self.position):
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The place within the epoch; the data and the settings are not part of it."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken. A finished epoch is followed by the next one."""
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self._begun = self.position >= len(self)

    @abstractmethod
    def _batches_from(self, position: int) -> Iterator[Any]:
        """The batches of epoch `self.epoch` from number `position` on."""

    def _generator(self) -> torch.Generator:
        """The randomness of this epoch, always on the CPU: drawn once an epoch, the same on every device."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)

    def _order(self, generator: torch.Generator) -> Tensor:
        """(N,) the sample numbers of this epoch in the order in which all processes together take them."""
        return torch.randperm(self.n, generator=generator) if self.train else torch.arange(self.n)

    def _own(self, values: Tensor) -> Tensor:
        """This process's part of something that has one entry per sample, in the order of its batches."""
        if self.train:
            whole = values[: len(self) * self.world_size * self.batch_size]
            steps = whole.view(len(self), self.world_size, self.batch_size)
            return steps[:, self.rank].flatten()
        start, stop = self._bounds()
        return values[start:stop]

    def _bounds(self) -> tuple[int, int]:
        return self.rank * self.n // self.world_size, (self.rank + 1) * self.n // self.world_size

    def _check_enough(self) -> None:
        if self.train and len(self) == 0:
            raise ValueError(
                f"batch_size must be at most the {self.n} samples (in {self.world_size} processes), "
                f"got {self.batch_size}: training would see no batch"
            )
