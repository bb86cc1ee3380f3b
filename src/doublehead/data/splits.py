"""Labelled samples, their train, calib and test splits, and how splits are drawn."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset, TensorDataset

if TYPE_CHECKING:
    from typing_extensions import Self

    from doublehead.data.trees import Tree

Array: TypeAlias = npt.NDArray[Any]
SPLIT_SEED = 0  # default seed of every split drawn here


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Samples, whose field the subclass names first, with labels int64 (N,)."""

    @property
    def samples(self) -> Any:
        """What is labelled: an array, or a tuple."""
        return getattr(self, fields(self)[0].name)

    def __post_init__(self) -> None:
        labels, n, name = self.labels, len(self.samples), fields(self)[0].name  # type: ignore[attr-defined]
        if labels.dtype != np.int64 or labels.shape != (n,):
            raise ValueError(
                f"labels of {n} {name} must be int64 of shape ({n},), got {labels.dtype} {labels.shape}"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, rows: Array) -> Self:
        """The samples of some rows; arrays are copied."""
        samples = self.samples
        taken = tuple(samples[row] for row in rows) if isinstance(samples, tuple) else samples[rows]
        return type(self)(taken, self.labels[rows])  # type: ignore[attr-defined, call-arg]


@dataclass(frozen=True, eq=False)
class Images(_Labelled):
    """Images uint8 (N, H, W, C) with labels int64 (N,)."""

    images: Array
    labels: Array

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"images must be uint8 of shape (N, H, W, C), got {self.images.dtype} {self.images.shape}"
            )
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class Texts(_Labelled):
    """Texts (str, unprocessed) with labels int64 (N,)."""

    texts: tuple[str, ...]
    labels: Array


@dataclass(frozen=True, eq=False)
class Trees(_Labelled):
    """Parsed sentences (`Tree`) with the label of the whole sentence, int64 (N,)."""

    trees: tuple[Tree, ...]
    labels: Array

    def phrases(self) -> Trees:
        """Every labelled phrase, whole sentences among them, once with each of its labels."""
        found = {(p.tokens, int(p.labels[-1])): p for tree in self.trees for p in tree.phrases()}
        return Trees(tuple(found.values()), np.array([label for _, label in found], np.int64))


@dataclass(frozen=True, eq=False)
class ImageFiles(_Labelled):
    """Paths of image files with labels int64 (N,), for sets that do not fit in memory; read by `FileBatches`."""

    files: tuple[Path, ...]
    labels: Array


Samples: TypeAlias = Images | Texts | Trees | ImageFiles
S = TypeVar("S", Images, Texts, Trees, ImageFiles)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Splits:
    """The three splits of a data set.

    The network trains on `train`, the calibration head on `calib`; results are measured on `test`.

    >>> parts = [Images(np.zeros((n, 2, 2, 3), np.uint8), np.arange(n) % 2) for n in (4, 2, 2)]
    >>> Splits("toy", *parts, class_names=("cat", "dog")).n_classes
    2
    """

    name: str
    train: Samples
    calib: Samples
    test: Samples
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for split, part in self.parts.items():
            labels = part.labels
            if len(labels) and (labels.min() < 0 or labels.max() >= self.n_classes):
                raise ValueError(
                    f"labels of {self.name} {split} must lie in 0..{self.n_classes - 1}, "
                    f"got {labels.min()}..{labels.max()}"
                )

    @property
    def parts(self) -> dict[str, Samples]:
        """The splits by name."""
        return {"train": self.train, "calib": self.calib, "test": self.test}

    @property
    def n_classes(self) -> int:
        """K, the number of classes."""
        return len(self.class_names)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of samples in train, calib and test."""
        return len(self.train), len(self.calib), len(self.test)

    def first(self, n_train: int, n_calib: int, n_test: int) -> Splits:
        """A smaller copy with the first samples of each split, for quick trials."""
        train, calib, test = (
            part.take(np.arange(min(n, len(part))))
            for part, n in zip(self.parts.values(), (n_train, n_calib, n_test))
        )
        return replace(self, train=train, calib=calib, test=test)


def stratified_draw(labels: Array, n: int, seed: int = SPLIT_SEED) -> Array:
    """Row numbers of `n` samples drawn without replacement, in random order, each class in proportion.

    Fractions are settled by largest remainder. NumPy's legacy generator is used because its stream is frozen: the
    same seed draws the same rows in every version.

    >>> rows = stratified_draw(np.array([0, 0, 0, 0, 1, 1]), 3)
    >>> sorted(np.array([0, 0, 0, 0, 1, 1])[rows].tolist())
    [0, 0, 1]
    """
    if not 0 <= n <= len(labels):
        raise ValueError(f"n must lie in 0..{len(labels)}, got {n}")
    random = np.random.RandomState(seed)
    classes, counts = np.unique(labels, return_counts=True)
    shares = counts * n / max(len(labels), 1)
    quota = np.floor(shares).astype(int)
    leftover = np.argsort(quota - shares, kind="stable")[: n - quota.sum()]
    quota[leftover] += 1
    drawn = [random.permutation(np.flatnonzero(labels == label))[:k] for label, k in zip(classes, quota) if k]
    return random.permutation(np.concatenate(drawn)) if drawn else np.zeros(0, np.int64)


def split_rows(labels: Array, n: int, seed: int = SPLIT_SEED) -> tuple[Array, Array]:
    """Row numbers of the rest and of `n` stratified samples, both in rising order."""
    drawn = np.sort(stratified_draw(labels, n, seed))
    return np.setdiff1d(np.arange(len(labels)), drawn, assume_unique=True), drawn


def split_samples(samples: S, n: int, seed: int = SPLIT_SEED) -> tuple[S, S]:
    """The rest of the samples and `n` stratified ones, both in their old order.

    >>> rest, drawn = split_samples(Texts(("a", "b", "c", "d"), np.array([0, 0, 1, 1])), 2)
    >>> len(rest), sorted(drawn.labels.tolist())
    (2, [0, 1])
    """
    rest, drawn = split_rows(samples.labels, n, seed)
    return samples.take(rest), samples.take(drawn)


def split_off(
    dataset: Dataset[T],
    share_or_n: float,
    *,
    labels: Sequence[int] | Array | None = None,
    transform: Callable[..., Any] | None = None,
    seed: int = SPLIT_SEED,
) -> tuple[Subset[T], Subset[T]]:
    """Split calibration data off a torch Dataset; returns (train, calib).

    `share_or_n` is a share of the samples (float in 0..1) or their number (int). The split is stratified by `labels`.
    Without them, those of `dataset.targets`, `dataset.labels` or a TensorDataset are used; a dataset that has none
    is split at random. No sample is loaded.

    `transform` replaces the dataset's own `transform` in `calib`, on a shallow copy. Pass the transform of the test
    data here: calibration data should not have the training augmentation. None keeps the dataset's transform.

    >>> import torch
    >>> train, calib = split_off(TensorDataset(torch.randn(50, 3), torch.arange(50) % 5), 0.2)
    >>> len(train), sorted(int(y) for _, y in calib)
    (40, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    """
    total = len(dataset)  # type: ignore[arg-type]
    n = share_or_n if isinstance(share_or_n, int) else round(share_or_n * total)
    if isinstance(share_or_n, bool) or not 0 < n < total:
        raise ValueError(f"share_or_n must leave both parts some of the {total} samples, got {share_or_n!r}")
    held = _known_labels(dataset) if labels is None else labels
    known = np.zeros(total, np.int64) if held is None else np.asarray(held)
    if known.shape != (total,):
        raise ValueError(f"labels must have shape ({total},) like the dataset, got {known.shape}")
    rest, drawn = split_rows(known, n, seed)
    plain = dataset if transform is None else _with_transform(dataset, transform)
    return Subset(dataset, rest.tolist()), Subset(plain, drawn.tolist())


def _known_labels(dataset: Dataset[Any]) -> Array | None:
    """(N,) the class numbers a dataset holds besides its samples, or None."""
    if isinstance(dataset, Subset):
        labels = _known_labels(dataset.dataset)
        return None if labels is None else labels[np.asarray(dataset.indices)]
    held = [getattr(dataset, name, None) for name in ("targets", "labels")]
    if isinstance(dataset, TensorDataset):
        held = [dataset.tensors[-1]]
    for values in held:
        if values is not None and len(values) == len(dataset):  # type: ignore[arg-type]
            array = np.asarray(values)
            if array.ndim == 1 and array.dtype.kind in "iub":
                return array
    return None


def _with_transform(dataset: Dataset[T], transform: Callable[..., Any]) -> Dataset[T]:
    """A shallow copy of a dataset whose `transform` is replaced."""
    changed: Any = copy.copy(dataset)
    if isinstance(dataset, Subset):
        changed.dataset = _with_transform(dataset.dataset, transform)
        return changed  # type: ignore[no-any-return]
    pair = getattr(dataset, "transforms", None)  # torchvision's pair of transform and target_transform
    if not hasattr(dataset, "transform") or not (pair is None or hasattr(pair, "transform")):
        raise TypeError(
            "transform needs a dataset whose `transform` attribute can be replaced, as torchvision's have, "
            f"got {type(dataset).__name__}"
        )
    changed.transform = transform
    if pair is not None:
        changed.transforms = copy.copy(pair)
        changed.transforms.transform = transform
    return changed  # type: ignore[no-any-return]


def count_duplicates(splits: Splits) -> dict[tuple[str, str], int]:
    """For each pair of splits, how many samples of the second are also in the first, byte for byte.

    Splits never share a row, but some data sets hold the same image or text twice.
    """
    digests = {name: _digests(part) for name, part in splits.parts.items()}
    found = {name: set(part) for name, part in digests.items()}
    return {(a, b): sum(digest in found[a] for digest in digests[b]) for a, b in combinations(digests, 2)}


def _digests(samples: Samples) -> list[bytes]:
    content: dict[type, Callable[[Any], bytes]] = {
        Images: lambda image: image.tobytes(),
        ImageFiles: lambda file: file.read_bytes(),
        Texts: lambda text: text.encode(),
        Trees: lambda tree: tree.text.encode(),
    }
    return [hashlib.sha256(content[type(samples)](sample)).digest() for sample in samples.samples]
