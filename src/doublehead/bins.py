"""Bins: per bin the count, the sum of confidences and the sum of correct answers; halves add up to the whole.

With sample weights or soft labels, counts and correct answers are sums of weights, in the same units as confidences.
Squares of weights are sums of two int64: their whole part, and the rest in units of 2^-32.

The edges are i / n_bins rounded to the type of the confidences (float32 or float64), and a bin is closed on the
right: a confidence c belongs to bin i when i / n_bins < c <= (i + 1) / n_bins, and 0 belongs to the first bin. So
exactly 1.0 lies in the last bin, and 0.2 in the bin that ends at 3/15.

Sums of confidences are kept as int64 in units of 2^-32. Integers add up the same in any order, so any split of the
data over batches, files or processes gives the same bits. A confidence is off by at most 2^-33 (1.2e-10), and a bin
holds up to 2^31 samples of confidence 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate, islice
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doublehead.predictions import Predictions, check_predictions
from doublehead.score_arrays import BLOCK_ENTRIES, Array, ArrayLike, as_float_tensor, as_tensor, in_threads
from doublehead.torch_tools import one_thread

SEARCHED = 64  # up to so many bins, a search is the fastest way to the right one
UNIT = 2.0**32  # conf_sums are in units of 1 / UNIT
MAX_TOTAL = 2.0**31  # weight, of which the units and the squares are still an int64
# A number in 0..1 plus this has a last bit of 1 / UNIT in float64: its bits, read as int64, are those of ROUNDING
# plus the number in whole units.
ROUNDING = 1.5 * 2.0**52 / UNIT
ROUNDING_BITS = int(np.float64(ROUNDING).view(np.int64))


@dataclass(frozen=True, eq=False)
class Bins:
    """Counts, confidence sums and correct sums, each int64 of shape (n_bins,) or (..., n_bins).

    `a + b` are the bins of both data sets together, exactly; start a stream with `Bins.zeros`.

    >>> bins = Bins.of([0.2, 0.9, 1.0], [False, True, True], n_bins=5)
    >>> bins.counts.tolist(), bins.correct_sums.tolist()
    ([1, 0, 0, 0, 2], [0, 0, 0, 0, 2])
    >>> halves = Bins.of([0.2], [False], n_bins=5) + Bins.of([0.9, 1.0], [True, True], n_bins=5)
    >>> halves == bins, round(float(bins.ece()), 6)
    (True, 0.1)
    """

    counts: Tensor  # in units of 2^-32 where there are `squares`, else whole
    conf_sums: Tensor  # in units of 2^-32
    correct_sums: Tensor  # in the units of counts
    squares: Tensor | None = None  # sums of the whole parts of squared weights
    rest_squares: Tensor | None = None  # of what is left of them, in units of 2^-32

    def __post_init__(self) -> None:
        weighted = self.squares is not None or self.rest_squares is not None
        for field in fields(self)[: 5 if weighted else 3]:
            tensor = getattr(self, field.name)
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
                got = (
                    str(tensor.dtype).removeprefix("torch.")
                    if isinstance(tensor, Tensor)
                    else type(tensor).__name__
                )
                raise TypeError(f"{field.name} must be an int64 tensor, got {got}")
            if tensor.ndim == 0 or tensor.shape != self.counts.shape:
                raise ValueError(
                    f"{field.name} must have shape (..., n_bins) like counts {tuple(self.counts.shape)}, "
                    f"got {tuple(tensor.shape)}"
                )

    @classmethod
    def zeros(cls, *shape: int, device: torch.device | str | None = None) -> Bins:
        """No data yet: `Bins.zeros(15)`, or `Bins.zeros(n_classes, 15)` for class-wise bins."""
        return cls.from_state(torch.zeros(3, *shape, dtype=torch.int64, device=device))

    @classmethod
    def of(
        cls, confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, weights: Tensor | None = None
    ) -> Bins:
        """Bin confidences (N,) in 0..1 and whether each was correct (N,), optionally with weights (N,)."""
        conf, right = check_outcomes(confidence, correct)

        def state_of(rows: slice) -> Tensor:
            return _state_of(conf[rows], right[rows], n_bins, None if weights is None else weights[rows])

        return cls.from_state(_sum_of(in_threads(state_of, conf.shape, conf.device)))

    @classmethod
    def top(cls, predictions: Predictions, n_bins: int = 15) -> Bins:
        """Bins (n_bins,) of the confidence in the predicted class."""
        check_predictions(predictions)

        def state_of(rows: slice) -> Tensor:
            piece = predictions[rows]
            return _state_of(piece.confidence, piece.correct, n_bins, piece.weights)

        # what is known of each row is quickly binned
        shape = (len(predictions), 1 if predictions.are_probs else predictions.n_classes)
        return cls.from_state(_sum_of(in_threads(state_of, shape, predictions.device)))

    @classmethod
    def classwise(cls, predictions: Predictions, n_bins: int = 15) -> Bins:
        """Bins (K, n_bins): those of class k hold the probability of class k and whether k is the label."""
        weighted = check_predictions(predictions).weights is not None or predictions.are_soft
        shape = (5 if weighted else 3, predictions.n_classes, check_n_bins(n_bins))
        with one_thread():  # else the threads that share the zeros wait for more in a busy loop
            made = cls.from_state(torch.zeros(shape, dtype=torch.int64, device=predictions.device))
        return made.add_classwise_(predictions)

    def add_classwise_(self, predictions: Predictions) -> Bins:
        """`self + Bins.classwise(predictions)`, in the memory of `self` where both have weights or neither.

        With many classes the bins are much larger than the predictions.
        """
        weighted = predictions.weights is not None or predictions.are_soft
        if weighted != (self.squares is not None) or self.counts.device != predictions.device:
            return self + Bins.classwise(predictions, self.n_bins).to(self.counts.device)
        add, turn = _add_weighted_components if weighted else _add_components, Lock()
        shape = (len(predictions), predictions.n_classes)
        in_threads(lambda rows: add(self.parts, predictions[rows], turn), shape, predictions.device)
        return self

    @classmethod
    def pooled(cls, predictions: Predictions, n_bins: int = 15) -> Bins:
        """Bins (n_bins,) of all N*K probabilities together, each with whether its class is the label."""
        return cls(*(part.sum(0) for part in cls.classwise(predictions, n_bins).parts))

    def state(self) -> Tensor:
        """(3, ..., n_bins) int64: counts, conf_sums, correct_sums. Sum it over processes with one all-reduce.

        (5, ..., n_bins) with weights: squares and rest_squares come last.
        """
        return torch.stack(self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """Counts, conf_sums, correct_sums and, with weights, squares and rest_squares."""
        parts = [self.counts, self.conf_sums, self.correct_sums, self.squares, self.rest_squares]
        return [part for part in parts if part is not None]

    @classmethod
    def from_state(cls, state: Tensor) -> Bins:
        """The bins whose `state()` this is."""
        if state.ndim < 2 or state.shape[0] not in (3, 5):
            raise ValueError(f"state must have shape (3, ..., n_bins), got {tuple(state.shape)}")
        return cls(*state)

    def weighted(self) -> Bins:
        """The same bins with every sample of weight 1."""
        if self.squares is not None:
            return self
        counts, unit = self.counts * int(UNIT), int(UNIT)
        return Bins(counts, self.conf_sums, self.correct_sums * unit, self.counts, torch.zeros_like(counts))

    def __add__(self, other: Bins) -> Bins:
        if not isinstance(other, Bins):
            return NotImplemented
        if self.counts.shape != other.counts.shape:
            raise ValueError(
                "only bins of one shape can be added, "
                f"got {tuple(self.counts.shape)} and {tuple(other.counts.shape)}"
            )
        if (self.squares is None) != (other.squares is None):
            return self.weighted() + other.weighted()
        if self.squares is not None and not float((self.mass + other.mass).sum(-1).amax()) < MAX_TOTAL:
            raise ValueError(
                f"weights must have a sum below {MAX_TOTAL:.2g}: divide all of them by one number"
            )
        return Bins(*(mine + theirs for mine, theirs in zip(self.parts, other.parts)))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Bins) and torch.equal(self.state(), other.state())

    __hash__ = None  # type: ignore[assignment]

    def coarsen(self, n_bins: int) -> Bins:
        """The same data in fewer bins, exactly; `n_bins` must divide the present number."""
        if self.n_bins % check_n_bins(n_bins):
            raise ValueError(f"n_bins must divide the present {self.n_bins} bins, got {n_bins}")
        return Bins.from_state(self.state().unflatten(-1, (n_bins, self.n_bins // n_bins)).sum(-1))

    def to(self, device: torch.device | str) -> Bins:
        """The same bins on another device."""
        if self.counts.device == torch.device(device):
            return self
        return Bins.from_state(self.state().to(device))

    @property
    def n_bins(self) -> int:
        """How many bins 0..1 is divided into."""
        return self.counts.shape[-1]

    @property
    def n(self) -> float:
        """How many entries were binned: N for top-label bins, N*K for class-wise and pooled ones; or their weight."""
        total = self.mass.sum()
        return int(total) if self.squares is None else float(total)

    @property
    def mass(self) -> Tensor:
        """(..., n_bins) how many entries each bin holds, or their weight."""
        return self.counts if self.squares is None else self.counts.double() / UNIT

    @property
    def mass_of_squares(self) -> Tensor:
        """(..., n_bins) the sum of squared weights in each bin, or how many entries it holds."""
        if self.squares is None or self.rest_squares is None:
            return self.counts.double()
        return self.squares.double() + self.rest_squares.double() / UNIT

    @property
    def effective(self) -> Tensor:
        """(..., n_bins) int64: how many entries of one weight vary as much as those of each bin (Kish)."""
        if self.squares is None:
            return self.counts
        found = self.mass.square() / self.mass_of_squares.clamp(min=1 / UNIT)
        return found.round().long().clamp(min=1).where(self.counts > 0, 0)

    @property
    def edges(self) -> Tensor:
        """(n_bins + 1,) float64, from 0 to 1."""
        return torch.arange(self.n_bins + 1, device=self.counts.device, dtype=torch.float64) / self.n_bins

    @property
    def accuracy(self) -> Tensor:
        """(..., n_bins) the share of correct answers in each bin, nan where it is empty."""
        return self.correct_sums.double() / self.counts  # both in the same units

    @property
    def confidence(self) -> Tensor:
        """(..., n_bins) the mean confidence in each bin, nan where it is empty."""
        return self.conf_sums.double() / UNIT / self.mass

    @property
    def gap(self) -> Tensor:
        """(..., n_bins) confidence minus accuracy, positive where overconfident, nan where a bin is empty."""
        return self.excess / self.mass

    @property
    def excess(self) -> Tensor:
        """(..., n_bins) sum of confidences minus sum of correct answers; 0 where a bin is empty."""
        correct = self.correct_sums * int(UNIT) if self.squares is None else self.correct_sums
        return (self.conf_sums - correct).double().div_(UNIT)  # the difference is exact

    def ece(self) -> Tensor:
        """(...) expected calibration error: the mean |gap|, each bin weighted by its count."""
        return self.excess.abs().sum(-1) / self.mass.sum(-1)

    def mce(self) -> Tensor:
        """(...) maximum calibration error: the largest |gap| of any bin that is not empty."""
        return self.gap.abs().nan_to_num(0.0).amax(-1)

    def ece2(self) -> Tensor:
        """(...) root of the mean squared gap, each bin weighted by its count."""
        squares = self.excess.square() / self.mass.where(self.counts > 0, 1.0)
        return (squares.sum(-1) / self.mass.sum(-1)).sqrt()


def quantise(confidence: Tensor) -> Tensor:
    """Confidences as int64 in units of 2^-32. Scaling by a power of two is exact, so only `round` loses anything."""
    return (confidence * UNIT).round_().to(torch.int64)


def inner_edges(n_bins: int, like: Tensor) -> Tensor:
    """(n_bins - 1,) the edges 1/n_bins .. (n_bins - 1)/n_bins, rounded to the type of `like`."""
    return (torch.arange(1, n_bins, dtype=torch.float64, device=like.device) / n_bins).to(like.dtype)


def bin_of(confidence: Tensor, n_bins: int) -> Tensor:
    """The bin (int64) of each confidence, by the right-closed edges stated on top."""
    edges = inner_edges(check_n_bins(n_bins), confidence)
    if n_bins <= SEARCHED:
        return torch.bucketize(confidence.contiguous(), edges)
    # The product is off by a rounding, so the bin by one at most; the edges decide.
    found = (confidence * n_bins).ceil_().long().sub_(1).clamp_(0, n_bins - 1)
    padded = torch.nn.functional.pad(edges, (1, 1), value=-1.0)
    padded[-1] = 2.0
    return found - (confidence <= padded[found]).long() + (confidence > padded[found + 1])


def check_n_bins(n_bins: int) -> int:
    """`n_bins` itself, or an error when it is not a positive whole number."""
    if isinstance(n_bins, bool) or not isinstance(n_bins, int) or n_bins < 1:
        raise ValueError(f"n_bins must be a whole number >= 1, got {n_bins!r}")
    return n_bins


def _state_of(confidence: Tensor, correct: Tensor, n_bins: int, weights: Tensor | None = None) -> Tensor:
    """(3, n_bins) the state of confidences (M,) and whether each was correct (M,); (5, n_bins) with weights (M,)."""
    size = 5 if weights is not None or correct.is_floating_point() else 3
    state = torch.zeros(size, check_n_bins(n_bins), dtype=torch.int64, device=confidence.device)
    step = 1 << 20
    for i in range(0, len(confidence), step):
        conf, right = confidence[i : i + step], correct[i : i + step]
        entries = entries_of(conf, right, None if weights is None else weights[i : i + step])
        state.scatter_add_(1, bin_of(conf, n_bins).expand(size, -1), entries)
    return state


def entries_of(confidence: Tensor, correct: Tensor, weights: Tensor | None = None) -> Tensor:
    """(3, M) what each sample adds to a state: 1, confidence, correct; (5, M) with weights or soft labels."""
    if weights is None and not correct.is_floating_point():
        whole = correct.to(torch.int64)
        return torch.stack([torch.ones_like(whole), quantise(confidence), whole])
    w = torch.ones_like(confidence, dtype=torch.float64) if weights is None else weights.double()
    sums = quantise(torch.stack([w, w * confidence.double(), w * correct.double(), (w * w).frac()]))
    return torch.stack([*sums[:3], (w * w).long(), sums[3]])


@one_thread()  # too short to share
def _sum_of(states: list[Tensor]) -> Tensor:
    return torch.stack(states).sum(0) if len(states) > 1 else states[0]


def _add_components(parts: list[Tensor], predictions: Predictions, turn: Lock) -> None:
    """Add predictions to class-wise counts, conf_sums and correct_sums (K, n_bins), in place, one thread at a time."""
    chunks, n_bins = predictions.probs_chunks(), parts[0].shape[1]
    wide = torch.empty(0, dtype=torch.float64, device=predictions.device)
    edge = float(torch.tensor(1 / n_bins, dtype=predictions.dtype))  # of the first bin
    # The more classes, the smaller the share of a chunk that is kept for `_add_sifted`.
    at_once = 1 if wide.is_cuda else max(1, min(64, predictions.n_classes // 16))
    while seen := [_sift(*chunk, wide, edge) for chunk in islice(chunks, at_once)]:
        with turn:
            _add_sifted(parts, seen)


def _add_weighted_components(parts: list[Tensor], predictions: Predictions, turn: Lock) -> None:
    """`_add_components` with weights or soft labels; the sums of squared weights come last."""
    (k, n_bins), done = parts[0].shape, 0
    for probs, labels in predictions.probs_chunks():
        target = labels if labels.ndim == 2 else torch.nn.functional.one_hot(labels, k)
        weights = probs.new_ones(len(probs))
        if predictions.weights is not None:
            weights = predictions.weights[done : done + len(probs)]
        place = torch.arange(k, device=probs.device) * n_bins + bin_of(probs, n_bins)  # (B, K)
        entries = entries_of(probs.flatten(), target.flatten().double(), weights.repeat_interleave(k))
        with turn:
            for part, entry in zip(parts, entries):
                part.view(-1).index_add_(0, place.flatten(), entry)
        done += len(probs)


def _sift(probs: Tensor, labels: Tensor, wide: Tensor, edge: float) -> tuple[Tensor, ...]:
    """What a chunk of probs (B, K) adds to class-wise bins, computed while the chunk is in the cache.

    Nearly all probabilities lie in the first bin when K is large. Only those above its edge are binned one by one;
    the first bin is the total minus the rest, exact because everything is a whole number.
    """
    if probs.device.type == "cpu":
        return _sift_on_cpu(probs.numpy(), labels, wide, edge)
    places = (probs > edge).view(-1).nonzero()[:, 0]
    totals = wide.resize_(probs.shape).copy_(probs).add_(ROUNDING).view(torch.int64).sum(0)
    return totals, labels, places, probs.view(-1)[places]


def _sift_on_cpu(probs: Array, labels: Tensor, wide: Tensor, edge: float) -> tuple[Tensor, ...]:
    """Sums of each class (K,), labels, places above the edge (M,) and what is there; torch is slow without AVX2."""
    (n, k), found, high = probs.shape, [], []
    rows, totals = max(1, BLOCK_ENTRIES // 4 // k), np.zeros(k, dtype=np.int64)
    memory, limit = wide.resize_(rows, k).numpy(), probs.dtype.type(edge)
    for start in range(0, n, rows):
        block = probs[start : start + rows]
        places = np.flatnonzero(block > limit)
        found.append(places + start * k)
        high.append(block.reshape(-1)[places])
        units = memory[: len(block)]
        if block.dtype != np.float64:
            np.copyto(units, block)
            block = units
        np.add(block, ROUNDING, out=units)
        totals += np.add.reduce(units.view(np.int64), axis=0)  # overflow is undone by the caller
    columns = (np.concatenate(parts) for parts in (found, high))
    return torch.from_numpy(totals), labels, *map(torch.from_numpy, columns)


def _wrapped(whole: int) -> int:
    """The int64 that equals a whole number modulo 2^64."""
    return (whole + 2**63) % 2**64 - 2**63


def _add_sifted(parts: list[Tensor], seen: list[tuple[Tensor, ...]]) -> None:
    (k, n_bins), starts = parts[0].shape, accumulate((len(chunk[1]) for chunk in seen), initial=0)
    labels, conf = (torch.cat([chunk[i] for chunk in seen]) for i in (1, 3))
    places = torch.cat([chunk[2] + start * k for start, chunk in zip(starts, seen)])
    totals = torch.stack([chunk[0] for chunk in seen]).sum(0) - _wrapped(len(labels) * ROUNDING_BITS)
    wholes = torch.full_like(totals, len(labels)), totals, labels.bincount(minlength=k)
    for part, whole in zip(parts, wholes):
        part[:, 0] += whole
    classes = places % k
    first = classes * n_bins
    place = first + bin_of(conf, n_bins)
    entries = entries_of(conf, labels[places // k] == classes)
    for part, entry in zip(parts, entries):
        part.view(-1).scatter_add_(0, place, entry).scatter_add_(0, first, -entry)


def check_outcomes(confidence: ArrayLike, correct: ArrayLike) -> tuple[Tensor, Tensor]:
    """Confidences (N,) in 0..1 and whether each was correct (N,), or an error that says what is wrong with them."""
    conf, right = as_float_tensor(confidence, "confidence"), as_tensor(correct, "correct")
    if conf.ndim != 1:
        raise ValueError(f"confidence must have shape (N,), got {tuple(conf.shape)}")
    if not bool(((conf >= 0) & (conf <= 1)).all()):
        low, high = float(conf.min()), float(conf.max())
        raise ValueError(
            f"confidence must lie in 0..1 and be finite, got values from {low:.6g} to {high:.6g}"
        )
    want = "correct must be bool or whole numbers 0 and 1"
    if right.is_floating_point() or right.is_complex():
        raise TypeError(f"{want}, got {str(right.dtype).removeprefix('torch.')}")
    if right.dtype != torch.bool and not bool(((right == 0) | (right == 1)).all()):
        raise ValueError(f"{want}, got {int(right[(right != 0) & (right != 1)][0])}")
    if right.shape != conf.shape:
        raise ValueError(
            f"correct must have the shape of confidence {tuple(conf.shape)}, got {tuple(right.shape)}"
        )
    return conf, right.to(conf.device)
