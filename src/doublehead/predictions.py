"""Predictions: the one currency after the network. What the numbers mean is stated, never guessed."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from doublehead.atomic import replacing
from doublehead.logprobs import option_logprobs
from doublehead.tasks import IGNORE_INDEX, class_scores, recognise_task, targets_of
from doublehead.torch_tools import one_thread

T = TypeVar("T")
ArrayLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"

CHUNK_ENTRIES = 1 << 18  # entries looked at together: 1 MiB of float32 stays in a core's cache
CHUNK_ENTRIES_GPU = 1 << 24  # few launches, and still little beside the data itself
PIECE_CHUNKS = 4  # a thread takes this many chunks or more

# Where torch's softmax is faster than exp, a sum and a division: by instruction set and type. Without AVX2 it takes
# up to three times as long as they do.
FAST_SOFTMAX = {("AVX512", torch.float32), ("AVX512", torch.float64), ("AVX2", torch.float32)}
COARSEST = 0.01  # resolution of probabilities that are rounded to two digits
MAX_WEIGHT = 1e9  # of all samples together: bins count weights in units of 2^-32
FAR = 40.0  # exp neither overflows nor loses anything while the largest logit lies within -FAR..FAR


class Target(NamedTuple):
    """What is true of N samples: classes (N,), perhaps probabilities (N, K) and weights (N,) of mean 1."""

    labels: Tensor  # the likeliest class where there are probabilities
    probs: Tensor | None = None
    weights: Tensor | None = None

    def rows(self, at: Any) -> Target:
        """Of some of the samples; weights keep their scale."""
        return Target(*(None if part is None else part[at] for part in self))  # type: ignore[arg-type]

    def split(self, size: int) -> list[Target]:
        """So many samples at a time."""
        return [self.rows(slice(at, at + size)) for at in range(0, len(self.labels), size)]

    def of(self, values: Tensor) -> Tensor:
        """(N, ...) the value of the label's class, or its expectation, of values (N, K, ...)."""
        if self.probs is not None:
            shape = (*self.probs.shape, *[1] * (values.ndim - 2))
            return (values * self.probs.to(values.dtype).view(shape)).sum(1)
        return values[torch.arange(len(values), device=values.device), self.labels]

    def error(self, probs: Tensor) -> Tensor:
        """Probabilities (N, K) minus the truth, times the weights; in place."""
        if self.probs is not None:
            probs -= self.probs.to(probs.dtype)
        else:
            probs[torch.arange(len(probs), device=probs.device), self.labels] -= 1
        return self.weighted(probs)

    def weighted(self, values: Tensor) -> Tensor:
        """Values (N, ...) times the weights, if there are any."""
        if self.weights is None:
            return values
        return values * self.weights.to(values.dtype).view(-1, *[1] * (values.ndim - 1))


class Predictions:
    """The logits of a classifier and the true labels, checked once, on entry.

    `Predictions(logits, labels)` takes logits; probabilities enter only through `from_probs`, a binary model's
    single score only through `from_binary`. Half precision is kept as it came and read as float32. Labels are classes
    (N,), or soft: rows of probabilities (N, K). `weights` (N,) say how much each sample counts. What takes neither soft
    labels nor weights into account raises an error. Samples with several labels enter through `multilabel`.

    >>> p = Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 0])
    >>> len(p), p.n_classes, p.correct.tolist()
    (2, 2, [True, False])
    >>> [round(c, 3) for c in p.confidence.tolist()]
    [0.881, 0.731]
    """

    n_labels: int | None = (
        None  # of each sample, where every pair of a sample and a label is a row: see `multilabel`
    )

    def __init__(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        self._scores = _check_shape(logits, "logits")  # (N, K)
        self._are_probs = False
        self._smallest = 1.0
        self._predicted, sums, _ = _look_through(self._scores, want_low=False)  # (N,) int64
        # A sum is finite when its entries are; overflow aside, which the second look settles.
        with one_thread():
            suspect = not bool(sums.isfinite().all())
        if suspect and not bool(self._scores.isfinite().all()):
            _raise_not_finite(self._scores, "logits")
        self._truth = _check_labels(labels, self._scores, "logits")  # (N,) int64, or (N, K)
        self.weights = _check_weights(weights, self._scores)  # (N,) float64, or None

    @classmethod
    def from_probs(
        cls,
        probs: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        tolerance: float = 1e-3,
    ) -> Predictions:
        """Take class probabilities (N, K): in 0..1, each row summing to 1 within `tolerance`.

        The probabilities are kept as they came, so a confidence that lies on the edge of a bin stays there.
        Rows that sum to 1 only roughly (rounded files, half precision) are not rescaled. What a 0 stands for in a
        logarithm is `zero_floor`.
        """
        scores = _check_shape(probs, "probs")
        predicted, sums, low = _look_through(scores, want_low=True)
        high = _check_probs(scores, predicted, sums, low, tolerance)
        made = cls.__new__(cls)
        made._are_probs = True
        made._smallest = low if low > 0 else _smallest_positive(scores)
        made._scores, made._predicted = scores, predicted
        if high > 1:
            made._scores = scores.clamp(max=1.0)
            made._predicted = made._scores.argmax(1)  # what was larger may be equal now
        made._truth = _check_labels(labels, scores, "probs")
        made.weights = _check_weights(weights, scores)
        return made

    @classmethod
    def from_binary(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        are_probs: bool = False,
    ) -> Predictions:
        """Take a binary model's single score per sample, (N,) or (N, 1): the logit of class 1, or its probability.

        >>> Predictions.from_binary([0.0, 2.0], [0, 1]).probs[0].tolist()
        [0.5, 0.5]
        """
        name = "probs" if are_probs else "logits"
        column = as_float_tensor(scores, name)
        if column.ndim == 2 and column.shape[1] == 1:
            column = column[:, 0]
        if column.ndim != 1:
            raise ValueError(f"binary {name} must have shape (N,) or (N, 1), got {tuple(column.shape)}")
        other = 1 - column if are_probs else torch.zeros_like(column)
        both = torch.stack([other, column], 1)
        return cls.from_probs(both, labels, weights) if are_probs else cls(both, labels, weights)

    @classmethod
    def multilabel(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        are_probs: bool = False,
    ) -> Predictions:
        """Take logits (or probabilities) and 0 or 1 of L independent labels for each sample, (N, L) both.

        Each pair of a sample and a label becomes a row with the classes no and yes, so every metric is about the pairs
        pooled; `of_label` gives those of one label, and a `Summary` has them as groups. `weights` are (N,) or (N, L).

        >>> p = Predictions.multilabel([[2.0, -1.0, 0.5]], [[1, 0, 0]])
        >>> len(p), p.n_labels, p.correct.tolist()
        (3, 3, [True, True, False])
        """
        table, truth = as_float_tensor(scores, "scores"), as_tensor(labels, "labels")
        if table.ndim != 2 or truth.shape != table.shape:
            raise ValueError(
                f"scores and labels of several labels must both have shape (N, L), got {tuple(table.shape)} and "
                f"{tuple(truth.shape)}"
            )
        if not bool(((truth == 0) | (truth == 1)).all()):
            raise ValueError("labels must be 0 and 1 where a sample may have several, got other values")
        if weights is not None:
            given = as_tensor(weights, "weights")
            weights = (given if given.ndim == 2 else given[:, None].expand(table.shape)).flatten()
        made = cls.from_binary(table.flatten(), truth.flatten().long(), weights, are_probs=are_probs)
        made.n_labels = table.shape[1]
        return made

    @classmethod
    def positions(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        *,
        ignore_index: int = IGNORE_INDEX,
        are_probs: bool = False,
    ) -> Predictions:
        """Take every position of tokens (B, T, K) with labels (B, T), or of pixels (B, K, H, W) with labels (B, H, W).

        Positions whose label is `ignore_index` are left out. `Stream` takes batches without holding them.

        >>> len(Predictions.positions([[[2.0, 0.0], [0.0, 1.0]]], [[0, -100]]))
        1
        """
        values, truth = as_float_tensor(scores, "scores"), as_tensor(labels, "labels")
        task = recognise_task(values, truth)
        if task not in ("tokens", "pixels"):
            raise ValueError(
                f"scores must have more than two axes, (B, T, K) or (B, K, H, W), got {tuple(values.shape)}"
            )
        rows = class_scores(values, task).flatten(0, -2)
        targets = targets_of(truth, task, rows.shape[1], ignore_index).to(rows.device)
        counts = targets >= 0
        return (cls.from_probs if are_probs else cls)(rows[counts], targets[counts])

    @classmethod
    def from_logprobs(
        cls,
        top_k: Sequence[Any],
        labels: Sequence[str],
        options: Sequence[str] | None = None,
        *,
        rest: Literal["share", "other"] = "share",
        weights: ArrayLike | None = None,
    ) -> Predictions:
        """Take a language model's log-probabilities of the likeliest tokens, where the answer is one of some options.

        An entry of `top_k` is one question's answer as a server returns it: a dict of log-probabilities by token, or
        the forms of `logprobs.token_logprobs`. `options` are the tokens to choose from, by default those of the labels.
        Options that are not listed share the probability that is left. `rest="share"` reads probabilities given that
        the answer is an option; with "other" any other answer is a class of its own, the last.

        >>> p = Predictions.from_logprobs([{"A": -0.2, "B": -2.0}, {"B": -0.1}], ["A", "C"], options=["A", "B", "C"])
        >>> p.n_classes, p.correct.tolist()
        (3, [True, False])
        """
        chosen = sorted(set(labels)) if options is None else list(options)
        unknown = sorted({str(label) for label in labels} - {str(option) for option in chosen})
        if unknown:
            raise ValueError(f"labels must be among the options {chosen}, got {unknown[0]!r}")
        if len(labels) != len(top_k):
            raise ValueError(f"labels must be one for each of {len(top_k)} answers, got {len(labels)}")
        numbers = {option: i for i, option in enumerate(chosen)}
        table = option_logprobs(top_k, chosen, rest)
        return cls(table, [numbers[label] for label in labels], weights)

    def of_label(self, label: int) -> Predictions:
        """The predictions of one label, by its number."""
        if self.n_labels is None or not 0 <= label < self.n_labels:
            raise IndexError(f"label must be one of {self.n_labels or 'no'} labels, got {label}")
        return self[label :: self.n_labels]

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        """The predictions of several parts, one after the other; all of one kind."""
        made = cls.__new__(cls)
        made._are_probs = parts[0]._are_probs
        made._smallest = min(part._smallest for part in parts)
        made._scores, made._predicted, made._truth = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("_scores", "_predicted", "_truth")
        )
        weights = [part.weights for part in parts if part.weights is not None]
        made.weights = torch.cat(weights) if weights else None
        made.n_labels = parts[0].n_labels
        return made

    def __len__(self) -> int:
        return self._scores.shape[0]

    def __repr__(self) -> str:
        kind, dtype = "probs" if self._are_probs else "logits", str(self._scores.dtype).removeprefix("torch.")
        return f"Predictions({kind} of shape {tuple(self._scores.shape)}, {dtype})"

    def __getitem__(self, rows: Any) -> Predictions:
        """The predictions of some rows: a slice, an index array or a mask."""
        part = Predictions.__new__(Predictions)
        part._scores, part._predicted = self._scores[rows], self._predicted[rows]
        part._truth, part._are_probs, part._smallest = self._truth[rows], self._are_probs, self._smallest
        part.weights = None if self.weights is None else self.weights[rows]
        if part._scores.ndim != 2:
            raise IndexError(f"rows must be a slice, an index array or a mask, got {rows!r}")
        if len(part) == 0:
            raise IndexError(f"rows must select at least one of {len(self)} rows, got none")
        return part

    @property
    def labels(self) -> Tensor:
        """(N,) int64, the true classes; an error for soft labels."""
        if self.are_soft:
            raise TypeError(
                "the labels are soft (rows of probabilities), and this needs a class for each sample"
            )
        return self._truth

    @property
    def are_soft(self) -> bool:
        """Whether the labels are rows of probabilities."""
        return self._truth.ndim == 2

    @property
    def target(self) -> Target:
        """Labels and weights in the form that calibrators fit to."""
        weights = None if self.weights is None else self.weights / self.weights.mean()
        return (
            Target(self._truth.argmax(1), self._truth, weights)
            if self.are_soft
            else Target(self._truth, None, weights)
        )

    def with_logits(self, logits: ArrayLike) -> Predictions:
        """Other logits for the same labels and weights."""
        made = Predictions(logits, self._truth, self.weights)
        made.n_labels = self.n_labels
        return made

    @property
    def n_classes(self) -> int:
        """K, the number of classes."""
        return self._scores.shape[1]

    @property
    def are_probs(self) -> bool:
        """Whether these predictions came in as probabilities."""
        return self._are_probs

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return _read_as(self._scores)

    @property
    def device(self) -> torch.device:
        """Where the predictions lie."""
        return self._scores.device

    @property
    def zero_floor(self) -> float:
        """What a probability of 0 is taken as in a logarithm: the smallest positive one (at most 0.01), divided by K.

        A 0 says only that a probability lies below the resolution of a rounded file or of half precision.
        """
        return max(min(self._smallest, COARSEST) / self.n_classes, torch.finfo(self.dtype).tiny)

    @property
    def logits(self) -> Tensor:
        """(N, K). For probabilities their logarithm, a 0 taken as `zero_floor`."""
        scores = self._scores.to(self.dtype)
        return scores.clamp(min=self.zero_floor).log() if self._are_probs else scores

    @property
    def probs(self) -> Tensor:
        """(N, K), rows summing to 1."""
        scores = self._scores.to(self.dtype)
        return scores if self._are_probs else _softmax(scores, self._predicted, torch.empty_like(scores))

    @property
    def predicted(self) -> Tensor:
        """(N,) the class of the largest score, the first one where several are equal."""
        return self._predicted

    @property
    def correct(self) -> Tensor:
        """(N,) bool: whether the predicted class is the label. For soft labels its probability, in float64."""
        with one_thread():
            return (
                _at(self._truth, self._predicted).double()
                if self.are_soft
                else self._predicted == self._truth
            )

    @property
    def confidence(self) -> Tensor:
        """(N,) the probability of the predicted class."""
        if self._are_probs:
            with one_thread():
                return _at(self._scores, self._predicted).to(self.dtype)
        confidence = torch.empty(len(self), dtype=self.dtype, device=self.device)

        def fill(rows: slice) -> None:
            spare = confidence.new_empty(0)
            predicted, to_fill = self._predicted[rows], confidence[rows]
            for part, scores in _chunks(self._scores[rows]):
                to_fill[part] = _top_probability(scores, predicted[part], spare.resize_(scores.shape))

        in_threads(fill, self._scores.shape, self.device)
        return confidence

    def top_label(self) -> tuple[Tensor, Tensor]:
        """(N,) `confidence` and (N,) `correct`, for what takes neither weights nor soft labels into account."""
        if self.weights is not None or self.are_soft:
            got = "soft labels" if self.are_soft else "sample weights"
            raise TypeError(f"predictions must have class labels and no weights here, got {got}")
        return self.confidence, self.correct

    def probs_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`probs` and labels, soft ones too, of some rows after the other, in memory that does not grow with N.

        A chunk may lie in the memory of the one before.
        """
        spare = torch.empty(0, dtype=self.dtype, device=self.device)
        for part, scores in _chunks(self._scores):
            if self._are_probs:
                yield scores, self._truth[part]
            else:
                probs = _softmax(scores, self._predicted[part], spare.resize_(scores.shape))
                yield probs, self._truth[part]

    def score_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The logits (or probs, as they came in) and labels of some rows after the other, as `probs_chunks`."""
        for part, scores in _chunks(self._scores):
            yield scores, self._truth[part]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .npz without pickles; the file appears whole or not at all."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"path must end in .npz, got {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        name = "probs" if self._are_probs else "logits"
        arrays = {name: self._scores.to(self.dtype).cpu().numpy(), "labels": self._truth.cpu().numpy()}
        arrays |= {} if self.weights is None else {"weights": self.weights.cpu().numpy()}
        with replacing(path) as temporary:
            np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, tolerance: float = 1e-3) -> Predictions:
        """Read what `save` wrote: arrays `labels` and either `logits` or `probs` (`tolerance` as in `from_probs`)."""
        arrays = _read_npz(Path(path))
        known = arrays["labels"], arrays.get("weights")
        if "logits" in arrays:
            return cls(arrays["logits"], *known)
        return cls.from_probs(arrays["probs"], *known, tolerance=tolerance)


def in_threads(work: Callable[[slice], T], shape: Sequence[int], device: torch.device) -> list[T]:
    """`work` of consecutive pieces of the rows of scores of a shape (N, ...), in as many threads as torch may use.

    A thread computes alone on its piece. Threads that share operations as short as those on a chunk, or on one number
    per row, wait for each other; on a machine that is busy with other work the waiting takes longer than the work.
    """
    n, entries = shape[0], math.prod(shape)
    if device.type != "cpu":
        return [work(slice(0, n))]
    threads = torch.get_num_threads()
    pieces = min(4 * threads, entries // (PIECE_CHUNKS * CHUNK_ENTRIES), n) if threads > 1 else 1
    with one_thread():
        if pieces < 2:
            return [work(slice(0, n))]
        size = -(-n // pieces)
        with ThreadPoolExecutor(min(threads, pieces)) as pool:
            return list(pool.map(work, [slice(start, start + size) for start in range(0, n, size)]))


def _chunks(scores: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Which rows, and those rows of `scores`, contiguous; half precision is widened into the same memory each time."""
    rows, dtype = _rows_at_once(scores), _read_as(scores)
    wide = torch.empty(0, dtype=dtype, device=scores.device)
    for start in range(0, len(scores), rows):
        part = slice(start, start + rows)
        chunk = scores[part]
        yield part, chunk.contiguous() if chunk.dtype == dtype else wide.resize_(chunk.shape).copy_(chunk)


def _look_through(scores: Tensor, want_low: bool) -> tuple[Tensor, Tensor, float]:
    """(N,) the first of the largest classes, (N,) the sums of the rows and the smallest entry, 0 if not wanted.

    One pass, in which each chunk is read from memory once. On a CPU it is numpy's, whose reductions are fast under
    every instruction set; torch's take up to ten times as long without AVX2. A nan counts as the largest.
    """
    on_cpu = scores.device.type == "cpu"

    def look(rows: slice) -> tuple[Tensor, Tensor, float]:
        classes, sums, lows = [], [], []
        for _, chunk in _chunks(scores[rows]):
            if on_cpu:
                array = chunk.numpy()
                classes.append(torch.from_numpy(array.argmax(1)))
                sums.append(torch.from_numpy(np.einsum("nk->n", array)))
                lows.append(float(np.minimum.reduce(array, axis=None)) if want_low else 0.0)
            else:
                classes.append(chunk.argmax(1))
                sums.append(chunk.sum(1))
                lows.append(float(chunk.amin()) if want_low else 0.0)
        return torch.cat(classes), torch.cat(sums), min(lows)

    found = in_threads(look, scores.shape, scores.device)
    classes, sums, lows = zip(*found)
    with one_thread():
        return torch.cat(classes), torch.cat(sums), min(lows)


@one_thread()
def _check_probs(scores: Tensor, predicted: Tensor, sums: Tensor, low: float, tolerance: float) -> float:
    """The largest entry, or an error when entries or sums are not those of probabilities."""
    high = float(_at(scores, predicted).max())
    if not math.isfinite(low + high):
        _raise_not_finite(scores, "probs")
    if low < 0 or high > 1 + 1e-6:
        raise ValueError(
            f"probs must lie in 0..1, got values from {low:.6g} to {high:.6g}; "
            "logits enter through Predictions(logits, labels)"
        )
    off = (sums - 1).abs()
    if float(off.max()) > tolerance:
        row = int(off.argmax())
        raise ValueError(
            f"each row of probs must sum to 1 within {tolerance:g}, got {float(sums[row]):.6g} in row {row}"
        )
    return high


def _smallest_positive(scores: Tensor) -> float:
    """The smallest entry above 0 of probabilities, each row of which has one."""
    return min(float(chunk[chunk > 0].min()) for _, chunk in _chunks(scores))


def _at(scores: Tensor, classes: Tensor) -> Tensor:
    """(N,) the entry of a class (N,) in each row."""
    return scores.gather(1, classes[:, None])[:, 0]


def _softmax(scores: Tensor, predicted: Tensor, out: Tensor) -> Tensor:
    """`out`, filled with the probabilities of logits (B, K) whose largest classes are given (B,).

    The bits of a row depend on this row alone, in whatever batch it stands.
    """
    if _softmax_is_fast(scores):
        return torch.softmax(scores, 1, out=out)
    return out.div_(_exp_and_sum(scores, predicted, out)[:, None])


def _top_probability(scores: Tensor, predicted: Tensor, spare: Tensor) -> Tensor:
    """(B,) the largest entry of each row of `_softmax`, to the bit; `spare` (B, K) is written to."""
    if _softmax_is_fast(scores):
        return _at(torch.softmax(scores, 1, out=spare), predicted)
    sums = _exp_and_sum(scores, predicted, spare)
    return _at(spare, predicted) / sums


def _exp_and_sum(scores: Tensor, predicted: Tensor, exps: Tensor) -> Tensor:
    """(B,) sums of exp(scores), which are written to `exps` (B, K); rows with a large maximum are shifted by it."""
    largest = _at(scores, predicted)
    shift = largest.where(largest.abs() > FAR, 0.0)
    if bool(shift.any()):
        torch.sub(scores, shift[:, None], out=exps).exp_()
    else:
        torch.exp(scores, out=exps)
    return torch.from_numpy(np.add.reduce(exps.numpy(), axis=1))


def _softmax_is_fast(scores: Tensor) -> bool:
    return (
        scores.device.type != "cpu" or (torch.backends.cpu.get_cpu_capability(), scores.dtype) in FAST_SOFTMAX
    )


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    if not zipfile.is_zipfile(path):
        path.open("rb").close()  # a missing or forbidden file says so itself
        raise ValueError(
            f"{path} must be an .npz file (a zip of arrays), got something else or a truncated file"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            wanted = names & {"logits", "probs", "labels"}
            arrays = {name: file[name] for name in wanted | (names & {"weights"})}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} must hold plain arrays in whole, got: {error}") from error
    if len(wanted) != 2 or "labels" not in wanted:
        raise ValueError(
            f"{path} must hold the arrays 'labels' and either 'logits' or 'probs', got {sorted(names)}"
        )
    return arrays


def as_tensor(values: ArrayLike, name: str) -> Tensor:
    """A tensor that shares the memory of `values` where torch can."""
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()  # torch takes neither as they are
        return torch.as_tensor(array)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be an array of numbers, got {type(values).__name__}: {error}"
        ) from error


def as_float_tensor(values: ArrayLike, name: str) -> Tensor:
    """`as_tensor` of floats: half precision widened to float32, whole numbers refused."""
    tensor = _as_floats(values, name)
    return tensor.to(_read_as(tensor))


def _as_floats(values: ArrayLike, name: str) -> Tensor:
    tensor = as_tensor(values, name)
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name} must be of a floating type, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def _read_as(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _check_shape(values: ArrayLike, name: str) -> Tensor:
    scores = _as_floats(values, name)
    if scores.ndim != 2 or scores.shape[1] < 2:
        hint = "; a binary model's single score enters through from_binary" if scores.ndim in (1, 2) else ""
        raise ValueError(f"{name} must have shape (N, K) with K >= 2, got {tuple(scores.shape)}{hint}")
    if scores.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(scores.shape)}")
    return scores


def _raise_not_finite(scores: Tensor, name: str) -> NoReturn:
    bad = ~torch.isfinite(scores)
    row, column = (int(i) for i in bad.nonzero()[0])
    raise ValueError(
        f"{name} must be finite, got {int(bad.sum())} non-finite values, "
        f"the first one ({float(scores[row, column])}) in row {row}, column {column}"
    )


def _rows_at_once(scores: Tensor) -> int:
    entries = CHUNK_ENTRIES_GPU if scores.is_cuda else CHUNK_ENTRIES
    return min(max(8, entries // scores.shape[1] // 8 * 8), 1 << 20)


@one_thread()
def _check_labels(values: ArrayLike, scores: Tensor, name: str) -> Tensor:
    labels = as_tensor(values, "labels")
    n, k = scores.shape
    if labels.is_floating_point() and labels.shape == (n, k):
        return _check_soft(labels.to(scores.device))
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels must be whole numbers, or rows of probabilities of shape {(n, k)}, got "
            f"{str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}"
        )
    if labels.shape != (n,):
        raise ValueError(
            f"labels must have shape ({n},) for {name} of shape {(n, k)}, got {tuple(labels.shape)}"
        )
    labels = labels.to(device=scores.device, dtype=torch.int64)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= k:
        extreme = f"a minimum of {low}" if low < 0 else f"a maximum of {high}"
        raise ValueError(f"labels must lie in 0..{k - 1} for {name} of shape {(n, k)}, got {extreme}")
    return labels


def _check_soft(labels: Tensor) -> Tensor:
    off = (labels.double().sum(1) - 1).abs()
    if not bool((labels >= 0).all()) or not float(off.max()) <= 1e-3:
        row = int((off.nan_to_num(torch.inf) + (labels < 0).any(1) * 1e9).argmax())
        raise ValueError(
            f"soft labels must be >= 0 and sum to 1 in each row, got {labels[row].tolist()} in row {row}; "
            "samples with several labels enter through Predictions.multilabel"
        )
    return labels


def _check_weights(values: ArrayLike | None, scores: Tensor) -> Tensor | None:
    if values is None:
        return None
    weights = as_tensor(values, "weights").to(scores.device, torch.float64)
    if weights.shape != (len(scores),):
        raise ValueError(
            f"weights must have shape ({len(scores)},), one for each sample, got {tuple(weights.shape)}"
        )
    if not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < MAX_WEIGHT:
        low, high = float(weights.min()), float(weights.max())
        raise ValueError(
            f"weights must be >= 0 with a sum in 0..{MAX_WEIGHT:g}, got values from {low:g} to {high:g}; only their "
            "ratios matter"
        )
    return weights
