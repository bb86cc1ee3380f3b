"""Predictions: the one currency after the network. What the numbers mean is stated, never guessed."""

from __future__ import annotations

import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

ArrayLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"

CHUNK_ENTRIES = 1 << 18  # entries looked at together: 1 MiB of float32 stays in a core's cache
CHUNK_ENTRIES_GPU = 1 << 24  # few launches, and still little beside the data itself


class Predictions:
    """The logits of a classifier and the true labels, checked once, on entry.

    `Predictions(logits, labels)` takes logits; probabilities enter only through `from_probs`, a binary model's
    single score only through `from_binary`. Half precision is widened to float32, float64 is kept.

    >>> p = Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 0])
    >>> len(p), p.n_classes, p.correct.tolist()
    (2, 2, [True, False])
    >>> [round(c, 3) for c in p.confidence.tolist()]
    [0.881, 0.731]
    """

    def __init__(self, logits: ArrayLike, labels: ArrayLike) -> None:
        self._scores = _check_scores(logits, "logits")  # (N, K)
        self._are_probs = False
        self.labels = _check_labels(labels, self._scores, "logits")  # (N,) int64

    @classmethod
    def from_probs(cls, probs: ArrayLike, labels: ArrayLike, *, tolerance: float = 1e-3) -> Predictions:
        """Take class probabilities (N, K): in 0..1, each row summing to 1 within `tolerance`.

        The probabilities are kept as they came, so a confidence that lies on the edge of a bin stays there.
        Rows that sum to 1 only roughly (rounded files, half precision) are not rescaled.
        """
        scores = _check_shape(probs, "probs")
        low, high, sums = _bounds_and_sums(scores)
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
        made = cls.__new__(cls)
        made._scores = scores.clamp(max=1.0) if high > 1 else scores
        made._are_probs = True
        made.labels = _check_labels(labels, scores, "probs")
        return made

    @classmethod
    def from_binary(cls, scores: ArrayLike, labels: ArrayLike, *, are_probs: bool = False) -> Predictions:
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
        return cls.from_probs(both, labels) if are_probs else cls(both, labels)

    def __len__(self) -> int:
        return self._scores.shape[0]

    def __repr__(self) -> str:
        kind, dtype = "probs" if self._are_probs else "logits", str(self._scores.dtype).removeprefix("torch.")
        return f"Predictions({kind} of shape {tuple(self._scores.shape)}, {dtype})"

    def __getitem__(self, rows: Any) -> Predictions:
        """The predictions of some rows: a slice, an index array or a mask."""
        part = Predictions.__new__(Predictions)
        part._scores, part.labels = self._scores[rows], self.labels[rows]
        part._are_probs = self._are_probs
        if part._scores.ndim != 2:
            raise IndexError(f"rows must be a slice, an index array or a mask, got {rows!r}")
        if len(part) == 0:
            raise IndexError(f"rows must select at least one of {len(self)} rows, got none")
        return part

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
        return self._scores.dtype

    @property
    def device(self) -> torch.device:
        """Where the predictions lie."""
        return self._scores.device

    @property
    def logits(self) -> Tensor:
        """(N, K). For probabilities their logarithm, a probability of 0 taken as the smallest normal number."""
        if not self._are_probs:
            return self._scores
        return self._scores.clamp(min=torch.finfo(self._scores.dtype).tiny).log()

    @property
    def probs(self) -> Tensor:
        """(N, K), rows summing to 1."""
        return self._scores if self._are_probs else self._scores.softmax(1)

    @property
    def predicted(self) -> Tensor:
        """(N,) the class of the largest score, the first one where several are equal."""
        return self._scores.argmax(1)

    @property
    def correct(self) -> Tensor:
        """(N,) bool: whether the predicted class is the label."""
        return self.predicted == self.labels

    @property
    def confidence(self) -> Tensor:
        """(N,) the probability of the predicted class."""
        return self.top_label()[0]

    def top_label(self) -> tuple[Tensor, Tensor]:
        """(N,) `confidence` and (N,) `correct`, from one pass in which each chunk stays in the cache."""
        rows = [_label_and_others(*chunk, spare=not self._are_probs) for chunk in self.probs_chunks()]
        at_label, others = (torch.cat(parts) for parts in zip(*rows))
        return torch.maximum(at_label, others), self._is_correct(at_label, others)

    def probs_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`probs` and `labels` of some rows after the other, in memory that does not grow with N."""
        for scores, labels in self.score_chunks():
            # softmax works row by row in one kernel: a row gives the same bits in whatever batch it stands
            yield (scores if self._are_probs else scores.softmax(1)), labels

    def score_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The logits (or probs, as they came in) and labels of some rows after the other."""
        rows = _rows_at_once(self._scores)
        for scores, labels in zip(self._scores.split(rows), self.labels.split(rows)):
            yield scores.contiguous(), labels

    def _is_correct(self, at_label: Tensor, others: Tensor) -> Tensor:
        """`correct`, from the probability of the label and the largest of the others (N,).

        On a CPU argmax costs more than the softmax, so it only settles rows in which the two are equal or so near
        that rounding may have made them so.
        """
        if self._scores.is_cuda:
            return self.correct
        correct = at_label > others
        close = ((at_label - others).abs() <= 1e-6).nonzero()[:, 0]
        correct[close] = self._scores[close].argmax(1) == self.labels[close]
        return correct

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .npz without pickles; the file appears whole or not at all."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"path must end in .npz, got {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        name = "probs" if self._are_probs else "logits"
        arrays = {name: self._scores.cpu().numpy(), "labels": self.labels.cpu().numpy()}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            os.chmod(temporary, 0o644)  # temporary files are private, results are not
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, tolerance: float = 1e-3) -> Predictions:
        """Read what `save` wrote: arrays `labels` and either `logits` or `probs` (`tolerance` as in `from_probs`)."""
        arrays = _read_npz(Path(path))
        if "logits" in arrays:
            return cls(arrays["logits"], arrays["labels"])
        return cls.from_probs(arrays["probs"], arrays["labels"], tolerance=tolerance)


def _label_and_others(probs: Tensor, labels: Tensor, spare: bool) -> tuple[Tensor, Tensor]:
    """(B,) the probability of the label and the largest of the other classes; a `spare` tensor may be written to."""
    column = labels[:, None]
    at_label = probs.gather(1, column)[:, 0]
    others = probs.scatter_(1, column, -1.0) if spare else probs.scatter(1, column, -1.0)
    return at_label, others.amax(1)


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
            arrays = {name: file[name] for name in wanted}
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
    tensor = as_tensor(values, name)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be of a floating type, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def _check_scores(values: ArrayLike, name: str) -> Tensor:
    scores = _check_shape(values, name)
    # One pass: the sum is finite when the entries are (overflow aside, which the second look settles).
    if not bool(torch.isfinite(scores.sum())) and not bool(torch.isfinite(scores).all()):
        _raise_not_finite(scores, name)
    return scores


def _check_shape(values: ArrayLike, name: str) -> Tensor:
    scores = as_float_tensor(values, name)
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


def _bounds_and_sums(scores: Tensor) -> tuple[float, float, Tensor]:
    """The smallest and the largest entry and (N,) the sums of the rows; each chunk is read from memory once."""
    parts = [(*chunk.aminmax(), chunk.sum(1)) for chunk in scores.split(_rows_at_once(scores))]
    lows, highs, sums = zip(*parts)
    return float(torch.stack(lows).min()), float(torch.stack(highs).max()), torch.cat(sums)


def _rows_at_once(scores: Tensor) -> int:
    entries = CHUNK_ENTRIES_GPU if scores.is_cuda else CHUNK_ENTRIES
    return min(max(8, entries // scores.shape[1] // 8 * 8), 1 << 20)


def _check_labels(values: ArrayLike, scores: Tensor, name: str) -> Tensor:
    labels = as_tensor(values, "labels")
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be whole numbers, got {str(labels.dtype).removeprefix('torch.')}")
    n, k = scores.shape
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
