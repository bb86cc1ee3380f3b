"""Numbers of both heads over a stream of batches: exact sums that add up over batches and processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from doublehead.bins import Bins
from doublehead.curves import Reliability, reliability
from doublehead.double_head import Heads
from doublehead.losses import cross_entropy
from doublehead.metrics import ece_floor, fine_bins
from doublehead.predictions import Predictions
from doublehead.torch_tools import from_every_process, n_processes


class Watch:
    """ECE, its floor, NLL and accuracy of the main and the calibration head, in memory that does not grow.

    Rows whose logits are not finite are left out and counted in `n_broken`.

    >>> watch = Watch()
    >>> watch.add(Heads(torch.tensor([[4.0, 0.0]]), torch.tensor([[1.0, 0.0]])), torch.tensor([1]))
    >>> numbers = watch.numbers()
    >>> round(numbers["ece_main"], 3), round(numbers["ece_calib"], 3)
    (0.982, 0.731)
    """

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = n_bins
        self._bins: Tensor | None = None  # (2, 3, fine bins) int64: main, calib
        self._nll: Tensor | None = None  # (2,) float64 sums
        self._noted = torch.zeros(
            2, dtype=torch.float64
        )  # of the inputs: sums of all entries and of every other one
        self.n_broken = 0

    @torch.no_grad()
    def add(self, heads: Heads, labels: Tensor) -> None:
        """Take in a batch: logits (B, K) of both heads, labels (B,)."""
        fine = torch.isfinite(heads.main).all(1) & torch.isfinite(heads.calib).all(1)
        self.n_broken += int((~fine).sum())
        if not bool(fine.any()):
            return
        bins, nll = [], []
        for logits in heads:
            p = Predictions(logits[fine].float(), labels[fine])
            bins.append(Bins.top(p, fine_bins(self.n_bins)).state())
            nll.append(cross_entropy(p.logits, p.labels).double().sum())
        both, sums = torch.stack(bins), torch.stack(nll)
        self._bins = both if self._bins is None else self._bins + both
        self._nll = sums if self._nll is None else self._nll + sums

    @torch.no_grad()
    def note(self, inputs: Iterable[Any]) -> None:
        """Add up the entries of a batch's tensors: by their sums `gather` knows processes that saw the same data."""
        for part in inputs:
            if isinstance(part, Tensor):
                flat = part.reshape(-1)
                sums = [values.sum(dtype=torch.float64) for values in (flat, flat[::2])]
                self._noted = self._noted.to(part.device) + torch.stack(sums)

    def gather(self, device: torch.device) -> None:
        """Sum over all processes; each then holds the whole. Every process must call it.

        Where all of them noted exactly the same, they saw the same samples, and those of the first count.
        """
        if n_processes() > 1:
            if self._bins is None or self._nll is None:
                self._bins = torch.zeros(2, 3, fine_bins(self.n_bins), dtype=torch.int64)
                self._nll = torch.zeros(2, dtype=torch.float64)
            self._bins, self._nll = self._bins.to(device), self._nll.to(device)
            noted = from_every_process(self._noted.tolist())
            same = any(noted[0]) and all(one == noted[0] for one in noted)
            for sums in (self._bins, self._nll):
                dist.broadcast(sums, 0) if same else dist.all_reduce(sums)

    @property
    def n(self) -> int:
        """How many samples were taken in."""
        return 0 if self._bins is None else int(self._bins[1, 0].sum())

    def bins(self, head: int) -> Bins:
        """The fine top-label bins of the main (0) or the calibration head (1)."""
        if self._bins is None or self.n == 0:
            raise ValueError("a Watch must have taken in at least one sample, got none")
        return Bins.from_state(self._bins[head].cpu())

    def numbers(self) -> dict[str, float]:
        """{"ece_main", "ece_calib", "ece_floor", "nll_main", "nll_calib", "accuracy_main", "accuracy_calib"}."""
        numbers: dict[str, float] = {}
        for index, name in enumerate(Heads._fields):
            bins = self.bins(index)
            assert self._nll is not None
            numbers[f"ece_{name}"] = float(bins.coarsen(self.n_bins).ece())
            numbers[f"nll_{name}"] = float(self._nll[index]) / bins.n
            numbers[f"accuracy_{name}"] = float(bins.correct_sums.sum()) / bins.n
        numbers["ece_floor"] = ece_floor(self.bins(1), self.n_bins).mean
        return numbers

    def reliability(self) -> Reliability:
        """The reliability diagram of the calibration head."""
        return reliability(self.bins(1), self.n_bins)
