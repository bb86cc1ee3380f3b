"""Splits(train, calib, test) and the labelled samples they hold; drawing and checking splits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from doublehead.data.trees import Tree

Array: TypeAlias = npt.NDArray[Any]
SPLIT_SEED = 0  # of every split this package draws


@dataclass(frozen=True, eq=False)
class Images:
    """Images uint8 (N, H, W, C) with labels int64 (N,)."""

    images: Array
    labels: Array

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"images must be uint8 of shape (N, H, W, C), got {self.images.dtype} {self.images.shape}"
            )
        _check_labels(self.labels, len(self.images), "images")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Array) -> Images:
        """The samples of some rows, copied."""
        return Images(self.images[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts as they came (str) with labels int64 (N,)."""

    texts: tuple[str, ...]
    labels: Array

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.texts), "texts")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Array) -> Texts:
        """The samples of some rows."""
        return Texts(tuple(self.texts[row] for row in rows), self.labels[rows])


@dataclass(frozen=True, eq=False)
class Trees:
    """Parsed sentences (`Tree`) with the label of the whole sentence, int64 (N,)."""

    trees: tuple[Tree, ...]
    labels: Array

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.trees), "trees")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Array) -> Trees:
        """The samples of some rows."""
        return Trees(tuple(self.trees[row] for row in rows), self.labels[rows])

    def as_texts(self) -> Texts:
        """The sentences without their structure, tokens joined by spaces."""
        return Texts(tuple(tree.text for tree in self.trees), self.labels)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files on disk with labels int64 (N,): for sets that do not fit in memory, read by `loader`."""

    files: tuple[Path, ...]
    labels: Array

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.files), "files")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Array) -> ImageFiles:
        """The samples of some rows."""
        return ImageFiles(tuple(self.files[row] for row in rows), self.labels[rows])


Samples: TypeAlias = Images | Texts | Trees | ImageFiles
S = TypeVar("S", Images, Texts, Trees, ImageFiles)


@dataclass(frozen=True, eq=False)
class Splits:
    """The three splits of a data set: the network trains on train, the calibration head on calib, test is for numbers.

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
        for split in ("train", "calib", "test"):
            labels = getattr(self, split).labels
            if len(labels) and (labels.min() < 0 or labels.max() >= self.n_classes):
                raise ValueError(
                    f"labels of {self.name} {split} must lie in 0..{self.n_classes - 1}, "
                    f"got {labels.min()}..{labels.max()}"
                )

    @property
    def n_classes(self) -> int:
        """K, the number of classes."""
        return len(self.class_names)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many samples train, calib and test hold."""
        return len(self.train), len(self.calib), len(self.test)

    def first(self, n_train: int, n_calib: int, n_test: int) -> Splits:
        """A smaller copy with the first samples of each split: for a quick try, not for numbers."""
        train, calib, test = (
            part.take(np.arange(min(n, len(part))))
            for part, n in zip((self.train, self.calib, self.test), (n_train, n_calib, n_test))
        )
        return replace(self, train=train, calib=calib, test=test)


def stratified_draw(labels: Array, n: int, seed: int = SPLIT_SEED) -> Array:
    """Row indices of `n` samples drawn without replacement, each class in its share of `labels`, in random order.

    A share that is no whole number is settled by largest remainder. NumPy's legacy generator is used because
    its stream is frozen: the same seed draws the same rows in every version.

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


def carve(samples: S, n_carved: int, seed: int = SPLIT_SEED) -> tuple[S, S]:
    """Split samples in two: all but `n_carved` in their old order, and `n_carved` drawn by class share.

    >>> rest, carved = carve(Texts(("a", "b", "c", "d"), np.array([0, 0, 1, 1])), 2)
    >>> len(rest), sorted(carved.labels.tolist())
    (2, [0, 1])
    """
    rest, carved = carve_rows(samples.labels, n_carved, seed)
    return samples.take(rest), samples.take(carved)


def carve_rows(labels: Array, n_carved: int, seed: int = SPLIT_SEED) -> tuple[Array, Array]:
    """The row numbers behind `carve`, both in rising order: those that stay and those that are carved out."""
    carved = np.sort(stratified_draw(labels, n_carved, seed))
    return np.setdiff1d(np.arange(len(labels)), carved, assume_unique=True), carved


def check_disjoint(**rows: Array) -> None:
    """Raise if a row number occurs twice in one split or in two of them.

    >>> check_disjoint(train=np.array([0, 1]), calib=np.array([2]))
    >>> check_disjoint(train=np.array([0, 1]), calib=np.array([1]))
    Traceback (most recent call last):
    ValueError: splits must share no row, got row 1 in both train and calib
    """
    owner: dict[int, str] = {}
    for name, numbers in rows.items():
        for row in numbers.tolist():
            if row in owner:
                raise ValueError(f"splits must share no row, got row {row} in both {owner[row]} and {name}")
            owner[row] = name


def count_duplicates(splits: Splits) -> dict[tuple[str, str], int]:
    """How many samples of the second split are, byte for byte, also in the first: leaks in the data itself.

    Splits never share a row; but many data sets hold the same image or text twice.
    """
    digests = {name: _digests(getattr(splits, name)) for name in ("train", "calib", "test")}
    pairs = (("train", "calib"), ("train", "test"), ("calib", "test"))
    return {
        (a, b): sum(digest in set_of_a for digest in digests[b])
        for a, b in pairs
        for set_of_a in [set(digests[a])]
    }


def _digests(samples: Samples) -> list[bytes]:
    if isinstance(samples, Images):
        parts = (image.tobytes() for image in samples.images)
    elif isinstance(samples, ImageFiles):
        parts = (file.read_bytes() for file in samples.files)
    else:
        texts = samples.as_texts().texts if isinstance(samples, Trees) else samples.texts
        parts = (text.encode() for text in texts)
    return [hashlib.sha256(part).digest() for part in parts]


def _check_labels(labels: Array, n: int, name: str) -> None:
    if labels.dtype != np.int64 or labels.shape != (n,):
        raise ValueError(
            f"labels of {n} {name} must be int64 of shape ({n},), got {labels.dtype} {labels.shape}"
        )
