"""Tell whether calibration data is also training data, where that can be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from doublehead.plumbing import unpack

ENTRIES = 1024  # of each sample's inputs, evenly spaced, that tell it from others


def check_disjoint(calib: Any, train: Any) -> None:
    """Raise where the calibration data and the training data, loaders or data sets, certainly share samples.

    Seen are: one and the same data set, Subsets of one with indices in common, and tensors that lie in the same
    memory. Silence is no proof: copies of the same samples are not noticed.

    >>> import torch
    >>> data = TensorDataset(torch.arange(10))
    >>> check_disjoint(Subset(data, [8, 9]), Subset(data, range(8)))
    >>> check_disjoint(Subset(data, [7, 8]), Subset(data, range(8)))
    Traceback (most recent call last):
    ValueError: calibration data must not be training data: at least 1 of 2 calibration samples are in both
    """
    shared, n = n_shared(calib, train), _length(_dataset(calib))
    if shared:
        raise ValueError(
            f"calibration data must not be training data: at least {shared} of {n} calibration samples are in both"
        )


def n_shared(calib: Any, train: Any) -> int:
    """How many calibration samples are certainly also in `train`."""
    theirs = _pieces(_dataset(train))
    shared = 0
    for base, rows in _pieces(_dataset(calib)):
        both: set[int] = set()
        for other, other_rows in theirs:
            both |= _common(base, rows, other, other_rows)
        shared += len(both)
    return shared


def until_repeated(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches of (inputs, labels) up to the first of which half or more came before: there a stream begins again.

    Samples are the same if their labels and inputs are, bit for bit; augmented or padded otherwise they are new.

    >>> batch = torch.arange(6.0).view(3, 2), torch.arange(3)
    >>> len(list(until_repeated([batch, batch])))
    1
    """
    seen: set[int] = set()
    for batch in batches:
        keys = _keys(batch)
        if 2 * sum(key in seen for key in keys) >= len(keys) > 0:
            return
        seen.update(keys)
        yield batch


def _keys(batch: Any) -> list[int]:
    """A number for each sample that stands for its label and its tensors; none where no input is a tensor."""
    args, kwargs, labels = unpack(batch, torch.device("cpu"))
    parts = [
        part for part in (*args, *kwargs.values()) if isinstance(part, Tensor) and len(part) == len(labels)
    ]
    if not parts:
        return []
    rows = []
    for part in (*parts, labels):
        flat = part.detach().reshape(len(labels), -1)
        flat = flat[:, :: max(1, flat.shape[1] // ENTRIES)].contiguous()
        rows.append(flat.view(torch.uint8).numpy())
    return [hash(b"".join(row.tobytes() for row in sample)) for sample in zip(*rows)]


def _dataset(data: Any) -> Any:
    return getattr(data, "dataset", data) if not isinstance(data, Subset) else data


def _pieces(data: Any) -> list[tuple[Any, Any]]:
    """Data as (base data set, rows of it): Subsets are followed to their base, concatenations taken apart."""
    if isinstance(data, ConcatDataset):
        return [piece for part in data.datasets for piece in _pieces(part)]
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, (list, tuple)) and all(hasattr(part, "dataset") for part in data):  # several loaders
        return [piece for part in data for piece in _pieces(_dataset(part))]
    rows: Any = None
    while isinstance(data, Subset):
        indices = [int(row) for row in data.indices]
        rows = indices if rows is None else [indices[row] for row in rows]
        data = data.dataset
    return [(data, range(_length(data)) if rows is None else rows)]


def _common(base: Any, rows: Any, other: Any, other_rows: Any) -> set[int]:
    """The rows of `base` that are also in `other`."""
    if base is None or other is None:
        return set()
    if base is other or _is_view_of_the_same(base, other):
        return set(rows) & set(other_rows)
    if isinstance(base, TensorDataset) and isinstance(other, TensorDataset):
        offset = _rows_apart(base.tensors[0], other.tensors[0])
        if offset is not None:
            return set(rows) & {row + offset for row in other_rows}
    return set()


def _is_view_of_the_same(base: Any, other: Any) -> bool:
    """Two data sets of Hugging Face with the same content carry the same fingerprint."""
    print_of = getattr(base, "_fingerprint", None)
    return print_of is not None and print_of == getattr(other, "_fingerprint", None)


def _rows_apart(mine: Tensor, theirs: Tensor) -> int | None:
    """How many rows the second tensor starts after the first, where both are rows of one piece of memory."""
    if mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr():
        return None
    if mine.ndim == 0 or mine.shape[1:] != theirs.shape[1:] or mine.stride() != theirs.stride():
        return None
    rows, rest = divmod(int(theirs.storage_offset()) - int(mine.storage_offset()), max(1, mine.stride(0)))
    return None if rest else rows


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:  # a stream does not know
        return 0
