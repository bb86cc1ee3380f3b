"""Numbers of predictions that come batch by batch and are never held: tokens, pixels, or a stream of samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doublehead.bins import Bins, bin_of, entries_of
from doublehead.curves import CLASS_CELLS, class_gaps_of
from doublehead.metrics import fine_bins
from doublehead.predictions import Predictions
from doublehead.summary import SCORES, Summary, Tally, exact_sum
from doublehead.tasks import IGNORE_INDEX, Reservoir, Task, recognise_task, targets_of
from doublehead.torch_tools import one_thread

AT_ONCE = 1 << 15  # positions: their logits of some classes stay in a core's cache
AT_ONCE_GPU = 1 << 22
SAMPLE = 100_000
MAX_CLASSES = 1000  # beyond, nothing is counted class by class


class Stream:
    """A `Summary` of outputs that are added batch by batch, in memory that does not grow.

    `add` takes logits (or probabilities) and labels of any task with classes, such as tokens (B, T, K) with labels
    (B, T) and pixels (B, K, H, W) with labels (B, H, W); labels of `ignore_index` do not count. Counts, ECE, NLL and
    the like are exact. Metrics that need all samples at once, and those class by class, are those of `sample`
    positions, of which each is as likely as any other.

    Intervals and floor take positions as independent. Neighbours are not, so both are too narrow.

    >>> stream = Stream()
    >>> for _ in range(3):
    ...     stream.add(torch.randn(2, 5, 8, 8), torch.randint(5, (2, 8, 8)))
    >>> summary = stream.summary()
    >>> summary.n, len(stream.sample)
    (384, 384)
    """

    def __init__(
        self,
        n_bins: int = 15,
        *,
        ignore_index: int = IGNORE_INDEX,
        are_probs: bool = False,
        task: Task | None = None,
        sample: int = SAMPLE,
        seed: int = 0,
    ) -> None:
        self.n_bins, self.ignore_index, self.are_probs, self.task = n_bins, ignore_index, are_probs, task
        self._tally: Tally | None = None
        self._groups: dict[str, Tally] = {}
        self._numbers: dict[str, int] = {}  # of groups, in the order of their first batch
        self._kept = Reservoir(sample, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def add(self, outputs: Tensor, labels: Tensor, group: str | None = None) -> None:
        """Add a batch; `group` names what it belongs to, such as an image, for a summary of its own."""
        task = self.task or recognise_task(outputs, labels)
        if task in ("binary", "labels"):
            raise ValueError(
                "outputs must be scores of classes, (B, K), (B, T, K) or (B, K, H, W), got one per label"
            )
        n_classes = outputs.shape[-1] if task == "tokens" else outputs.shape[1]
        targets = targets_of(labels.to(outputs.device), task, n_classes, self.ignore_index)
        if targets.ndim != 1:
            raise TypeError("labels must be classes, got rows of probabilities")
        # (S, K, P): classes before positions, as images have them, so that nothing is copied for them
        tokens = outputs.reshape(-1, n_classes).mT[None] if task != "pixels" else outputs.flatten(2)
        tally = self._count(tokens, targets.view(len(tokens), -1))
        if tally is None:
            return
        self._tally = tally if self._tally is None else self._tally + tally
        if group is not None:
            known = self._groups.get(group)
            plain = replace(tally, predicted=None)
            self._groups[group] = plain if known is None else known + plain
        rows = self._kept.draw(targets.cpu())
        assert rows is not None
        rows = rows.to(tokens.device)
        sample, place = torch.unravel_index(rows, (len(tokens), tokens.shape[2]))
        number = self._numbers.setdefault(group or "", len(self._numbers))
        drawn = tokens[sample, :, place].float().cpu(), targets[rows].cpu(), torch.full((len(rows),), number)
        self._kept.add(*drawn)

    def _count(self, values: Tensor, targets: Tensor) -> Tally | None:
        """The tally of values (S, K, P) and targets (S, P), some positions after the other."""
        cells, k = fine_bins(self.n_bins), values.shape[1]
        at_once = AT_ONCE if values.device.type == "cpu" else AT_ONCE_GPU
        n_groups = k if k <= MAX_CLASSES else 1
        # The last cell holds what does not count.
        state = torch.zeros(3, n_groups * cells + 1, dtype=torch.int64, device=values.device)
        sums, squares = dict.fromkeys(SCORES, 0), dict.fromkeys(SCORES, 0)
        with one_thread():
            for image, truth in zip(values, targets):
                for start in range(0, image.shape[1], at_once):
                    labels = truth[start : start + at_once]
                    counts = labels >= 0
                    found = _scores(
                        image[:, start : start + at_once].float(), labels.clamp(min=0), self.are_probs
                    )
                    confidence, guess = found.pop("confidence"), found.pop("guess")
                    place = bin_of(confidence, cells) + (guess * cells if n_groups > 1 else 0)
                    place = place.where(counts, n_groups * cells)
                    state.index_add_(1, place, entries_of(confidence, guess == labels))
                    for name in SCORES:
                        kept = found[name].double().where(counts, 0.0)
                        sums[name] += exact_sum(kept)
                        squares[name] += exact_sum(kept.square())
        by_class = Bins.from_state(state[:, :-1].cpu().reshape(3, n_groups, cells))
        top = Bins.from_state(by_class.state().sum(1))
        predicted = by_class.coarsen(CLASS_CELLS) if cells % CLASS_CELLS == 0 and n_groups > 1 else None
        return Tally(self.n_bins, k, top, None, predicted, int(top.n), sums, squares, {}) if top.n else None

    @property
    def sample(self) -> Predictions:
        """The predictions that were drawn: for `report`, and for `calibrate`."""
        if self._tally is None:
            raise ValueError("a Stream must have at least one position that counts, got none")
        scores, labels, _ = self._kept.rows()
        return Predictions.from_probs(scores, labels) if self.are_probs else Predictions(scores, labels)

    @property
    def groups(self) -> np.ndarray[Any, np.dtype[np.str_]]:
        """The group of each row of `sample`, as `report(stream.sample, by=stream.groups)` takes it."""
        if self._tally is None:
            raise ValueError("a Stream must have at least one position that counts, got none")
        names = list(self._numbers)
        return np.array([names[number] for number in self._kept.rows()[2].tolist()])

    def summary(self, seed: int = 0) -> Summary:
        """Every number of what was added so far, and of each group."""
        sample, tally = self.sample, self._tally
        assert tally is not None
        whole = replace(tally, predicted=None, groups=self._groups).summary(seed)
        drawn = Summary.of(sample, self.n_bins, seed=seed).metrics
        classes = None
        if tally.predicted is not None:
            classes = class_gaps_of(tally.predicted, Bins.classwise(sample, self.n_bins))
        found = {name: whole.metrics.get(name, value) for name, value in drawn.items()}
        return replace(whole, metrics=found, classes=classes)


def _scores(values: Tensor, labels: Tensor, are_probs: bool) -> dict[str, Tensor]:
    """(P,) each, for values (K, P) and labels (P,): the predicted class, its confidence, and the proper scores."""
    top, guess = _largest(values)
    if are_probs:
        logs, exps, total = (
            values.clamp(min=torch.finfo(values.dtype).tiny).log_(),
            values,
            torch.ones_like(top),
        )
    else:
        logs = values - top
        exps = logs.exp()
        total = exps.sum(0)
    log_total, at_label = total.log(), labels[None]
    return {
        "guess": guess,
        "confidence": (exps.gather(0, guess[None])[0] / total).clamp(max=1.0),
        "nll": log_total - logs.gather(0, at_label)[0],
        "brier": (exps * exps).sum(0) / total.square() - 2 * exps.gather(0, at_label)[0] / total + 1,
        "entropy": log_total - logs.mul_(exps).sum(0) / total,
    }


def _largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values.max(0)` of (K, P), the first of equals; for few classes one after the other, ten times as fast."""
    if len(values) > 64:
        return values.max(0)
    top, guess = values[0], torch.zeros_like(values[0])
    for k in range(1, len(values)):
        guess = torch.where(values[k] > top, float(k), guess)
        top = torch.maximum(top, values[k])
    return top, guess.long()
