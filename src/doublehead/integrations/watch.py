"""Numbers of both heads over a stream of batches: exact sums that add up over batches and processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from doublehead.calibration_head import HeadSpec
from doublehead.curves import Reliability, reliability
from doublehead.double_head import DoubleHead, Heads
from doublehead.predictions import Predictions
from doublehead.summary import Summary, Tally
from doublehead.torch_tools import from_every_process, n_processes


def double_head_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a callback that go to `DoubleHead`, checked before there is a network.

    Heads that are given are used as trained, so there must be one. With `augment` it is a temperature head unless
    `heads` is given: the second opinion would be judged on clean data.

    >>> double_head_options({"evry": 5})
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'evry'
    """
    inspect.signature(DoubleHead).bind(None, None, follow=None, steps=None, **options)  # known to the trainer
    heads = options.get("heads")
    if heads is None and options.get("augment") is not None:
        heads = HeadSpec(kind="temperature")
    if heads is not None and not isinstance(heads, HeadSpec) and len(heads) != 1:
        raise ValueError(f"heads must be None or one HeadSpec, got {len(heads)} of them")
    return {**options, "heads": heads}


class Watch:
    """The `Summary` of the main and the calibration head over batches, in memory that does not grow.

    Rows whose logits are not finite are left out and counted in `n_broken`.

    >>> watch = Watch()
    >>> watch.add(Heads(torch.tensor([[4.0, 0.0]]), torch.tensor([[1.0, 0.0]])), torch.tensor([1]))
    >>> numbers = watch.numbers()
    >>> round(numbers["ece_main"], 3), round(numbers["ece_calib"], 3)
    (0.982, 0.731)
    """

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = n_bins
        self._tallies: list[Tally] = []  # of main and calib; empty before the first batch
        self._noted = torch.zeros(2, dtype=torch.float64)  # sums of all inputs and of every other entry
        self.n_broken = 0

    @torch.no_grad()
    def add(self, heads: Heads, labels: Tensor) -> None:
        """Add a batch: logits (B, K) of both heads and labels, as `Reader.targets` gives them."""
        counts = labels >= 0 if labels.ndim == 1 else torch.ones_like(labels[:, 0], dtype=torch.bool)
        finite = torch.isfinite(heads.main).all(1) & torch.isfinite(heads.calib).all(1)
        self.n_broken += int((counts & ~finite).sum())
        finite &= counts
        if not bool(finite.any()):
            return
        parts = [
            Tally.of(Predictions(logits[finite].float(), labels[finite]), self.n_bins, per_class=False)
            for logits in heads
        ]
        self._tallies = _sum([self._tallies, parts])

    @torch.no_grad()
    def note(self, inputs: Iterable[Any]) -> None:
        """Add up the entries of a batch's tensors, so that `gather` recognises processes that saw the same data."""
        for part in inputs:
            if isinstance(part, Tensor):
                flat = part.reshape(-1)
                sums = [values.sum(dtype=torch.float64) for values in (flat, flat[::2])]
                self._noted = self._noted.to(part.device) + torch.stack(sums)

    def gather(self, device: torch.device | None = None) -> None:
        """Sum over all processes; each then holds the whole. Every process must call it.

        Where all of them noted exactly the same, they saw the same samples, and those of the first count. The sums
        travel as objects, so `device` does not matter.
        """
        if n_processes() > 1:
            every = from_every_process((self._noted.tolist(), self._tallies))
            noted = [one for one, _ in every]
            same = any(noted[0]) and all(one == noted[0] for one in noted)
            self._tallies = every[0][1] if same else _sum([tallies for _, tallies in every])

    @property
    def n(self) -> int:
        """How many samples were added."""
        return self._tallies[1].n if self._tallies else 0

    def summary(self, head: int) -> Summary:
        """The summary of the main (0) or the calibration head (1)."""
        if not self._tallies:
            raise ValueError("a Watch must have at least one sample, got none")
        return self._tallies[head].summary()

    def numbers(self) -> dict[str, float]:
        """{"ece_main", "ece_calib", "ece_floor", "nll_main", "nll_calib", "accuracy_main", "accuracy_calib"}."""
        numbers: dict[str, float] = {}
        for head, name in enumerate(Heads._fields):
            values = self.summary(head).values
            numbers |= {f"{key}_{name}": values[key] for key in ("ece", "nll", "accuracy")}
        return numbers | {"ece_floor": values["ece_floor"]}

    def reliability(self) -> Reliability:
        """The reliability diagram of the calibration head."""
        if not self._tallies:
            raise ValueError("a Watch must have at least one sample, got none")
        return reliability(self._tallies[1].top, self.n_bins)


def _sum(parts: list[list[Tally]]) -> list[Tally]:
    """Head by head; parts of processes without samples are empty."""
    return [reduce(add, tallies) for tallies in zip(*(part for part in parts if part))]
