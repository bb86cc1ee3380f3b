"""Arrays of scores (N, K) and what is true of them: taking them in, checking them, going through them in chunks."""

from __future__ import annotations

import math
import platform
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from doublehead.torch_tools import one_thread

T = TypeVar("T")
Array: TypeAlias = "np.ndarray[Any, Any]"
ArrayLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"

CHUNK_ENTRIES = 1 << 19  # float32 entries gone through together, half as many of float64: 2 MiB
BLOCK_ENTRIES = 1 << 17  # what stays in the cache of a core between a few short steps: 512 KiB
CHUNK_ENTRIES_GPU = 1 << 24  # few launches, and still little beside the data itself
PIECE_CHUNKS = 4  # a thread takes this many chunks or more

# Where numpy's exp takes less time than torch's, often half, by torch's instruction set and the type; not on Intel's
# CPUs, for which MKL, torch's library, is made: there numpy's takes twice the time or more.
FAST_NUMPY_EXP = {("AVX512", 4), ("AVX512", 8), ("AVX2", 4)}  # bytes of a float
EINSUM_BUFFER = 8192  # entries, numpy's default
BITS = {4: np.uint32, 8: np.uint64}  # by bytes
FAR = 40.0  # exp neither overflows nor loses anything while the largest logit lies within -FAR..FAR
ROUNDED = 0.05  # how far from 1 rows of probabilities may sum by rounding to few digits
MAX_WEIGHT = 1e9  # of all samples together: bins count weights in units of 2^-32


class Target(NamedTuple):
    """The labels of N samples: classes (N,), optional probabilities (N, K) and weights (N,) of mean 1."""

    labels: Tensor  # the likeliest class where there are probabilities
    probs: Tensor | None = None
    weights: Tensor | None = None

    def rows(self, at: Any) -> Target:
        """Of some of the samples; weights keep their scale."""
        return Target(*(None if part is None else part[at] for part in self))  # type: ignore[arg-type]

    def split(self, size: int) -> list[Target]:
        """In parts of `size` samples."""
        return [self.rows(slice(at, at + size)) for at in range(0, len(self.labels), size)]

    def of(self, values: Tensor) -> Tensor:
        """(N, ...) the value of the label's class, or its expectation, of values (N, K, ...)."""
        if self.probs is not None:
            shape = (*self.probs.shape, *[1] * (values.ndim - 2))
            return (values * self.probs.to(values.dtype).view(shape)).sum(1)
        return values[torch.arange(len(values), device=values.device), self.labels]

    def error(self, probs: Tensor) -> Tensor:
        """Probabilities (N, K) minus the labels', times the weights; in place."""
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


# --- taking in


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
    return tensor.to(read_as(tensor))


def _as_floats(values: ArrayLike, name: str) -> Tensor:
    tensor = as_tensor(values, name)
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name} must be of a floating type, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def read_as(scores: Tensor) -> torch.dtype:
    """The type in which scores are computed with: half precision is read as float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays `labels`, `logits` or `probs`, and `weights` if there are any; never a pickle."""
    if not zipfile.is_zipfile(path):
        path.open("rb").close()  # a missing or forbidden file says so itself
        raise ValueError(
            f"{path} must be an .npz file (a zip of arrays), got something else or a truncated file"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            names = sorted(file.files)
            arrays = {name: file[name] for name in ("logits", "probs", "labels", "weights") if name in names}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} must hold plain arrays in whole, got: {error}") from error
    if "labels" not in arrays or ("logits" in arrays) == ("probs" in arrays):
        raise ValueError(f"{path} must hold the arrays 'labels' and either 'logits' or 'probs', got {names}")
    return arrays


# --- checking


def check_scores(values: ArrayLike, name: str) -> Tensor:
    """Scores (N, K) as a tensor, or an error about their type or shape."""
    scores = _as_floats(values, name)
    if scores.ndim != 2 or scores.shape[1] < 2:
        hint = "; a binary model's single score enters through from_binary" if scores.ndim in (1, 2) else ""
        raise ValueError(f"{name} must have shape (N, K) with K >= 2, got {tuple(scores.shape)}{hint}")
    if scores.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(scores.shape)}")
    return scores


@one_thread()
def check_finite(scores: Tensor, sums: Tensor, name: str) -> None:
    """An error where scores are not finite; those with a finite sum are, and the sum of finite ones may overflow."""
    if not bool(sums.isfinite().all()) and not bool(scores.isfinite().all()):
        raise_not_finite(scores, name)


def raise_not_finite(scores: Tensor, name: str) -> NoReturn:
    """The error about entries that are not finite."""
    bad = ~torch.isfinite(scores)
    row, column = (int(i) for i in bad.nonzero()[0])
    raise ValueError(
        f"{name} must be finite, got {int(bad.sum())} non-finite values, "
        f"the first one ({float(scores[row, column])}) in row {row}, column {column}"
    )


@one_thread()
def check_labels(values: ArrayLike, scores: Tensor, name: str) -> Tensor:
    """Classes (N,) as int64, or rows of probabilities (N, K), on the device of the scores (N, K) called `name`."""
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


def check_weights(values: ArrayLike | None, scores: Tensor) -> Tensor | None:
    """Weights (N,) in float64, on the device of the scores (N, K)."""
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


@one_thread()
def check_probs(scores: Tensor, tops: Tensor, sums: Tensor, low: float, tolerance: float) -> float:
    """The largest of `tops` (N,), or an error when entries or sums are not those of probabilities."""
    high = float(tops.max())
    if not math.isfinite(low + high):
        raise_not_finite(scores, "probs")
    if low < 0 or high > 1 + 1e-6:
        raise ValueError(
            f"probs must lie in 0..1, got values from {float(scores.min()):.6g} to {high:.6g}; "
            "logits enter through Predictions(logits, labels)"
        )
    off = (sums - 1).abs()
    if float(off.max()) > tolerance:
        rows = (off > tolerance).nonzero()[:, 0]
        unexplained = off[rows].double().cpu().numpy() - rounding_error(scores[rows].double().cpu().numpy())
        if unexplained.max() > 0:
            row = int(rows[int(unexplained.argmax())])
            raise ValueError(
                f"each row of probs must sum to 1 within {tolerance:g}, got {float(sums[row]):.6g} in row {row}"
            )
    return high


def rounding_error(probs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(N,) how far from 1 rounding to 1 to 4 digits may have moved the sums of rows (N, K), at most ROUNDED."""
    moved, places = np.zeros(len(probs)), np.arange(len(probs))
    for digits in (1, 2, 3, 4):
        scaled = probs[places].astype(np.float64) * 10**digits
        rounded = np.abs(scaled - scaled.round()).max(1, initial=0.0) < 1e-3  # float32 is off by less
        moved[places[rounded]] = min(ROUNDED, 0.5 * probs.shape[1] / 10**digits + 1e-6)
        places = places[~rounded]
    return moved


# --- going through


def in_threads(work: Callable[[slice], T], shape: Sequence[int], device: torch.device) -> list[T]:
    """`work` of consecutive pieces of the rows of scores of a shape (N, ...), in as many threads as torch may use.

    A thread computes alone on its piece. Threads that share operations as short as those on a chunk, or on one number
    per row, wait for each other; on a machine that is busy with other work the waiting takes longer than the work.
    """
    n, entries = shape[0], math.prod(shape)
    if device.type != "cpu":
        return [work(slice(0, n))]
    threads = torch.get_num_threads()
    pieces = min(2 * threads, entries // (PIECE_CHUNKS * CHUNK_ENTRIES), n) if threads > 1 else 1
    with one_thread():
        if pieces < 2:
            return [work(slice(0, n))]
        size = -(-n // pieces)
        with ThreadPoolExecutor(min(threads, pieces)) as pool:
            return list(pool.map(work, [slice(start, start + size) for start in range(0, n, size)]))


def chunks(scores: Tensor, entries: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Which rows, and those rows of `scores`, contiguous; half precision is widened into the same memory each time."""
    rows, dtype = _rows_at_once(scores, entries or CHUNK_ENTRIES), read_as(scores)
    wide = torch.empty(0, dtype=dtype, device=scores.device)
    for start, chunk in zip(range(0, len(scores), rows), scores.split(rows)):
        part = slice(start, start + rows)
        yield part, chunk.contiguous() if chunk.dtype == dtype else wide.resize_(chunk.shape).copy_(chunk)


def beside(chunk: Tensor, scores: Tensor, spare: Tensor) -> Tensor:
    """Where to write what becomes of a chunk (B, K) of scores: to itself where it was widened, else to `spare`."""
    return chunk if chunk.dtype != scores.dtype else spare.resize_(chunk.shape)


class Look(NamedTuple):
    """What one pass over scores (N, K) finds."""

    classes: Tensor  # (N,) the first of the largest
    confidence: Tensor  # (N,) the largest probabilities, those of logits as in `softmax_of`, to the bit
    sums: Tensor  # (N,) of the rows
    low: float  # the smallest entry of probabilities where one is negative, else 0


def look_through(scores: Tensor, are_probs: bool) -> Look:
    """One pass, in which each chunk is read from memory once. A nan counts as the largest.

    On a CPU it is numpy's, whose reductions are fast under every instruction set; torch's take up to ten times as long
    without AVX2.
    """
    if scores.device.type != "cpu":
        return _look_at_gpu(scores, are_probs)
    found = in_threads(lambda rows: _look_at(scores[rows], are_probs), scores.shape, scores.device)
    if len(found) == 1:
        return found[0]
    with one_thread():
        classes, confidence, sums = (torch.cat(column) for column in list(zip(*found))[:3])
    return Look(classes, confidence, sums, min(part.low for part in found))


def _look_at(scores: Tensor, are_probs: bool, by_bits: bool = True) -> Look:
    """The bits of floats >= 0, read as whole numbers, are in their order, and those of any below 0 are larger.

    So the search for the largest entries of probabilities finds the negative ones as well, without another pass.
    """
    by_bits = by_bits and are_probs
    classes = np.empty(len(scores), dtype=np.intp)
    found = torch.empty(2, len(scores), dtype=read_as(scores))
    spare, ones = found.new_empty(0), found.new_ones(scores.shape[1]).numpy()
    confidence, sums = found.numpy()
    for part, chunk in chunks(scores, BLOCK_ENTRIES):
        array, places = chunk.numpy(), classes[part]
        np.dot(array, ones, out=sums[part])  # first: it waits least for the memory
        (array.view(BITS[array.itemsize]) if by_bits else array).argmax(1, out=places)
        top = _at(array, places)
        if not are_probs:
            exps = beside(chunk, scores, spare).numpy()
            totals, top = _exp_and_sum(array, top, exps), _at(exps, places)
            top /= totals
        confidence[part] = top
    if by_bits and np.signbit(confidence).any():
        return _look_at(scores, True, by_bits=False)._replace(low=min(0.0, float(scores.min())))
    return Look(torch.from_numpy(classes), found[0], found[1], 0.0)


def _look_at_gpu(scores: Tensor, are_probs: bool) -> Look:
    parts = []
    for _, chunk in chunks(scores):
        top, classes = chunk.max(1)
        confidence = top if are_probs else at_classes(torch.softmax(chunk, 1), classes)
        parts.append((classes, confidence, chunk.sum(1), chunk.amin()))
    classes, confidence, sums = (torch.cat(column) for column in list(zip(*parts))[:3])
    low = min(0.0, *(float(part[3]) for part in parts)) if are_probs else 0.0
    return Look(classes, confidence, sums, low)


def _rows_at_once(scores: Tensor, entries: int) -> int:
    entries = CHUNK_ENTRIES_GPU if scores.is_cuda else entries * 4 // read_as(scores).itemsize
    return min(max(8, entries // scores.shape[1] // 8 * 8), 1 << 20)


class SmallestPositive:
    """The smallest entry above 0 of probabilities, each row of which has one; found on first use."""

    def __init__(self, probs: Tensor | None, found: float | None = None) -> None:
        self._probs, self._found = probs, found

    def value(self) -> float:
        """The entry; safe to call from several threads."""
        probs = self._probs
        if self._found is None:
            assert probs is not None
            look = _smallest_of if probs.device.type == "cpu" else _smallest_of_gpu
            pieces = in_threads(
                lambda rows: min(look(chunk) for _, chunk in chunks(probs[rows])), probs.shape, probs.device
            )
            self._found = min(pieces)
        self._probs = None  # not needed any more, and maybe large
        return self._found


def _smallest_of(chunk: Tensor) -> float:
    """Minus 1, the bits of 0 are the largest whole number."""
    array = chunk.numpy()
    low = array.min()
    if low == 0:
        bits = array.view(BITS[array.itemsize])
        low = (np.minimum.reduce(bits - bits.dtype.type(1), axis=None) + bits.dtype.type(1)).view(array.dtype)
    return float(low)


def _smallest_of_gpu(chunk: Tensor) -> float:
    return float(chunk.where(chunk > 0, torch.inf).amin())


def at_classes(scores: Tensor, classes: Tensor) -> Tensor:
    """(N,) the entry of a class (N,) in each row."""
    return scores.gather(1, classes[:, None])[:, 0]


def softmax_of(scores: Tensor, predicted: Tensor, out: Tensor) -> Tensor:
    """`out`, filled with the probabilities of logits (B, K) whose largest classes are given (B,).

    The bits of a row depend on this row alone, not on its batch. `out` may be `scores`.
    """
    if scores.device.type != "cpu":
        return torch.softmax(scores, 1, out=out)
    array = scores.numpy()
    return out.div_(
        torch.from_numpy(_exp_and_sum(array, _at(array, predicted.numpy()), out.numpy()))[:, None]
    )


@np.errstate(over="ignore", invalid="ignore")  # infinite logits, which are refused afterwards
def _exp_and_sum(logits: Array, largest: Array, out: Array) -> Array:
    """(B,) sums of exp(logits), which are written to `out` (B, K); rows with a large maximum are shifted by it."""
    far = np.abs(largest) > FAR
    if far.any():
        logits = np.subtract(logits, np.where(far, largest, 0)[:, None], out=out)
    if _numpy_has_the_faster_exp(out.dtype.itemsize):
        np.exp(logits, out=out)
    else:
        torch.exp(torch.from_numpy(logits), out=torch.from_numpy(out))
    # einsum is faster, but adds up a longer row in parts where it is alone
    sums: Array = np.einsum("nk->n", out) if out.shape[1] <= EINSUM_BUFFER else np.add.reduce(out, axis=1)
    return sums


def _numpy_has_the_faster_exp(itemsize: int) -> bool:
    return not _made_by_intel() and (torch.backends.cpu.get_cpu_capability(), itemsize) in FAST_NUMPY_EXP


@cache
def _made_by_intel() -> bool:
    about = Path("/proc/cpuinfo")
    if not about.exists():
        return "GenuineIntel" in platform.processor()
    with about.open() as lines:  # long where there are many cores, and the vendor is in the second line
        return "GenuineIntel" in lines.read(100)


def _at(array: Array, classes: Array) -> Array:
    """`at_classes` of arrays, which takes less time for few rows."""
    found: Array = array[np.arange(len(array)), classes]
    return found
