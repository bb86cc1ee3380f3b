"""What the Lightning and the Transformers callback share: their options, and numbers of both heads over a stream."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from doublehead.bins import UNIT
from doublehead.calibration_head import HeadSpec
from doublehead.curves import Reliability, reliability
from doublehead.double_head import SECOND_OPINION, DoubleHead, Heads
from doublehead.metrics import ece_floor
from doublehead.predictions import Predictions
from doublehead.summary import Tally
from doublehead.torch_tools import from_every_process, n_processes


def double_head_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a callback that go to `DoubleHead`, checked before there is a network.

    Heads other than the second opinion are used as trained, so there must be one. With `augment` it is a temperature
    head unless `heads` is given: the second opinion would be judged on clean data.

    >>> double_head_options({"evry": 5})
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'evry'
    """
    inspect.signature(DoubleHead).bind(None, None, follow=None, steps=None, **options)
    heads = options.get("heads")
    if heads is None:
        alone = options.get("augment") is not None
        return {**options, "heads": HeadSpec(kind="temperature") if alone else SECOND_OPINION}
    several = () if isinstance(heads, HeadSpec) else tuple(heads)
    if len(several) > 1 and several != SECOND_OPINION:
        raise ValueError(f"heads must be None or one HeadSpec, got {len(several)} of them")
    return dict(options)


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
        self.n_bins, self.n_broken = n_bins, 0
        self.tallies: dict[str, Tally] = {}  # by head, "main" and "calib"; empty before the first sample
        self._noted = torch.zeros(2, dtype=torch.float64)  # sums of all input entries and of every other one

    @torch.no_grad()
    def add(self, heads: Heads, labels: Tensor) -> None:
        """Take in a batch: logits (B, K) of both heads, labels (B,)."""
        fine = torch.isfinite(heads.main).all(1) & torch.isfinite(heads.calib).all(1)
        self.n_broken += int((~fine).sum())
        if bool(fine.any()):
            for name, logits in heads._asdict().items():
                p = Predictions(logits[fine].float(), labels[fine])
                self._merge(name, Tally.of(p, self.n_bins, per_class=False))

    def _merge(self, name: str, tally: Tally) -> None:
        self.tallies[name] = self.tallies[name] + tally if name in self.tallies else tally

    @torch.no_grad()
    def note(self, inputs: Iterable[Any]) -> None:
        """Add up the entries of a batch's tensors: by their sums `gather` knows processes that saw the same data."""
        for part in inputs:
            if isinstance(part, Tensor):
                flat = part.reshape(-1)
                sums = [values.sum(dtype=torch.float64) for values in (flat, flat[::2])]
                self._noted = self._noted.to(part.device) + torch.stack(sums)

    def gather(self) -> None:
        """Sum over all processes; each then holds the whole. Every process must call it.

        Where all of them noted exactly the same, they saw the same samples, and those of the first count.
        """
        if n_processes() == 1:
            return
        found = from_every_process((self._noted.tolist(), self.tallies))
        noted = [one for one, _ in found]
        same = any(noted[0]) and all(one == noted[0] for one in noted)
        self.tallies = {}
        for _, tallies in found[:1] if same else found:
            for name, tally in tallies.items():
                self._merge(name, tally)

    @property
    def n(self) -> int:
        """How many samples were taken in."""
        return self.tallies["main"].n if self.tallies else 0

    def numbers(self) -> dict[str, float]:
        """{"ece_main", "ece_calib", "ece_floor", "nll_main", "nll_calib", "accuracy_main", "accuracy_calib"}."""
        numbers: dict[str, float] = {}
        for name, tally in self._counted().items():
            numbers[f"ece_{name}"] = float(tally.top.coarsen(self.n_bins).ece())
            numbers[f"nll_{name}"] = tally.sums["nll"] / UNIT / tally.n
            numbers[f"accuracy_{name}"] = float(tally.top.correct_sums.sum()) / tally.n
        numbers["ece_floor"] = ece_floor(self.tallies["calib"].top, self.n_bins).mean
        return numbers

    def reliability(self) -> Reliability:
        """The reliability diagram of the calibration head."""
        return reliability(self._counted()["calib"].top, self.n_bins)

    def _counted(self) -> dict[str, Tally]:
        if not self.tallies:
            raise ValueError("a Watch must have taken in at least one sample, got none")
        return self.tallies
