"""The one table of data sets: what each is, its splits, where its files must lie and how they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from doublehead.data import class_names, readers
from doublehead.data.fashion import fashion_subset
from doublehead.data.normalise import Normalise
from doublehead.data.own import load_own
from doublehead.data.splits import SPLIT_SEED, Images, Samples, Splits, Trees, carve


@dataclass(frozen=True)
class DataSet:
    """One row of the table. `read(root, split_seed)` gives the splits; `layout` says what must lie under root."""

    name: str
    about: str
    kind: Literal["images", "files", "texts", "trees"]
    n_classes: int
    sizes: tuple[int, int, int]  # train, calib, test
    layout: str
    read: Callable[[Path, int], Splits]
    normalise: Normalise | None = None  # of the train images: the published channel means and deviations


def load(name: str, root: str | os.PathLike[str] | None = None, *, split_seed: int = SPLIT_SEED) -> Splits:
    """The splits of a data set of the table, or of your own data.

    `root` is the folder that holds the files, directly or in a folder named like the data set; without it the
    environment variable DOUBLEHEAD_DATA or else the folder `data` is taken. Your own data is named by a prefix
    and a path: `arrays:PATH`, `folder:PATH` (images) or `table:PATH` (texts), see `load_own`.

    >>> load("fashion").sizes
    (8500, 2500, 6000)
    """
    if ":" in name:
        return load_own(name, split_seed=split_seed)
    return _find(name).read(data_root(root), split_seed)


def load_test(name: str, root: str | os.PathLike[str] | None = None) -> Samples:
    """The test split alone: out-of-distribution data for a network trained on another set needs no more.

    Of the image sets only the test files have to be there.
    """
    spec, folder = _find(name), data_root(root)
    if name in ("cifar10", "cifar100", "svhn"):
        return _image_split(spec, folder, "test")
    return spec.read(folder, SPLIT_SEED).test


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of data sets: `root`, or the environment variable DOUBLEHEAD_DATA, or `data`."""
    return Path(root if root is not None else os.environ.get("DOUBLEHEAD_DATA", "data"))


def _find(name: str) -> DataSet:
    if name not in DATASETS:
        raise ValueError(
            f"data set must be one of {', '.join(DATASETS)}, or arrays:PATH, folder:PATH, table:PATH, got {name!r}"
        )
    return DATASETS[name]


def _under(root: Path, name: str, *paths: str) -> Path | None:
    """The first of `paths` that exists in root/name or in root."""
    tried = (folder / path for path in paths for folder in (root / name, root))
    return next((path for path in tried if path.exists()), None)


def _missing(name: str, root: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{name} was not found in {root}: {DATASETS[name].layout}. `doublehead data get {name}` fetches what may be "
        "fetched"
    )


def _image_split(spec: DataSet, root: Path, split: str) -> Images:
    """Train or test images of CIFAR or SVHN, from plain arrays or from the original files."""
    name, wanted = spec.name, sum(spec.sizes[:2]) if split == "train" else spec.sizes[2]
    if arrays := _under(root, name, f"{split}_images.npy"):
        images = readers.read_arrays(arrays.parent, split)
    elif name == "svhn" and (file := _under(root, name, f"{split}_32x32.mat")):
        images = readers.read_svhn(file.parent, split)
    elif folder := _under(
        root, name, {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(name, "-")
    ):
        images = readers.read_cifar_split(folder, split)
    else:
        raise _missing(name, root)
    if len(images) != wanted:
        raise ValueError(f"{name} must have {wanted} {split} images, got {len(images)} in {root}")
    return images


def _read_images(name: str) -> Callable[[Path, int], Splits]:
    def read(root: Path, split_seed: int) -> Splits:
        spec = DATASETS[name]
        train, calib = carve(_image_split(spec, root, "train"), spec.sizes[1], split_seed)
        return Splits(name, train, calib, _image_split(spec, root, "test"), class_names.OF[name])

    return read


def _read_imagenet(root: Path, split_seed: int) -> Splits:
    """Folders train and val with a folder per class; half of val, drawn by class, is for calibration."""
    folder = _under(root, "imagenet", "train")
    if folder is None:
        raise _missing("imagenet", root)
    train, names = readers.read_image_folder(folder)
    val, _ = readers.read_image_folder(folder.parent / "val", names)
    test, calib = carve(val, len(val) // 2, split_seed)
    return Splits("imagenet", train, calib, test, names)


def _read_sst(name: str) -> Callable[[Path, int], Splits]:
    """The data set's own splits; `dev` is for calibration."""

    def read(root: Path, split_seed: int) -> Splits:
        found = _under(root, "sst", "trees/train.txt", "train.txt") or _under(
            root, name, "trees/train.txt", "train.txt"
        )
        if found is None:
            raise _missing(name, root)
        parts = [readers.read_sst(found.parent / f"{part}.txt") for part in ("train", "dev", "test")]
        if name == "sst-binary":
            parts = [_binary(part) for part in parts]
        return Splits(name, parts[0], parts[1], parts[2], class_names.OF[name])

    return read


def _binary(samples: Trees) -> Trees:
    """Negative (0, 1) against positive (3, 4); neutral sentences are dropped, neutral phrases carry no label."""
    kept = samples.take((samples.labels != 2).nonzero()[0])
    trees = tuple(tree.relabel((0, 0, -100, 1, 1)) for tree in kept.trees)
    return Trees(trees, (kept.labels > 2).astype("int64"))


def _read_newsgroups(root: Path, split_seed: int) -> Splits:
    """The 19,997 documents: 3,999 drawn for test, then 900 of the rest for calibration, each by class."""
    folder = _under(root, "20newsgroups", "20_newsgroups", "20news-19997")
    if folder is None:
        raise _missing("20newsgroups", root)
    documents, groups = readers.read_newsgroups(folder)
    _, n_calib, n_test = DATASETS["20newsgroups"].sizes
    rest, test = carve(documents, n_test, split_seed)
    train, calib = carve(rest, n_calib, split_seed)
    return Splits("20newsgroups", train, calib, test, groups)


def _read_newsgroups_bydate(root: Path, split_seed: int) -> Splits:
    """The later 40 % of the documents are the test set of this version; calib is drawn from the earlier ones."""
    folder = _under(root, "20newsgroups", "20news-bydate-train")
    if folder is None:
        raise _missing("20newsgroups-bydate", root)
    documents, groups = readers.read_newsgroups(folder)
    test, _ = readers.read_newsgroups(folder.parent / "20news-bydate-test")
    train, calib = carve(documents, DATASETS["20newsgroups-bydate"].sizes[1], split_seed)
    return Splits("20newsgroups-bydate", train, calib, test, groups)


_ARRAYS = "or {train,test}_{images,labels}.npy"
_ROWS = (
    DataSet(
        "fashion",
        "a subset of Fashion-MNIST that comes with the package",
        "images",
        10,
        (8_500, 2_500, 6_000),
        "nothing to put anywhere",
        lambda root, split_seed: fashion_subset(),
        Normalise((0.2860,), (0.3530,)),
    ),
    DataSet(
        "cifar10",
        "32 x 32 photographs of ten things",
        "images",
        10,
        (45_000, 5_000, 10_000),
        f"put the folder cifar-10-batches-py there, {_ARRAYS}",
        _read_images("cifar10"),
        Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    DataSet(
        "cifar100",
        "32 x 32 photographs of a hundred things",
        "images",
        100,
        (45_000, 5_000, 10_000),
        f"put the folder cifar-100-python there, {_ARRAYS}",
        _read_images("cifar100"),
        Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
    DataSet(
        "svhn",
        "32 x 32 house numbers",
        "images",
        10,
        (60_000, 13_257, 26_032),
        f"put train_32x32.mat and test_32x32.mat there, {_ARRAYS}",
        _read_images("svhn"),
        Normalise((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    ),
    DataSet(
        "imagenet",
        "ImageNet 2012; its validation images are halved into calib and test",
        "files",
        1000,
        (1_281_167, 25_000, 25_000),
        "put the folders train and val there, each with one folder of images per class (image-net.org asks for an "
        "account; the validation images must be sorted into class folders)",
        _read_imagenet,
        Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
    DataSet(
        "sst-fine",
        "Stanford Sentiment Treebank, five grades",
        "trees",
        5,
        (8_544, 1_101, 2_210),
        "put train.txt, dev.txt and test.txt (Penn Treebank trees) there or in a folder trees",
        _read_sst("sst-fine"),
    ),
    DataSet(
        "sst-binary",
        "Stanford Sentiment Treebank, negative or positive, neutral sentences dropped",
        "trees",
        2,
        (6_920, 872, 1_821),
        "put train.txt, dev.txt and test.txt (Penn Treebank trees) there or in a folder trees",
        _read_sst("sst-binary"),
    ),
    DataSet(
        "20newsgroups",
        "the 19,997 documents of the original collection, split as in the paper",
        "texts",
        20,
        (15_098, 900, 3_999),
        "put the folder 20_newsgroups (from 20news-19997.tar.gz) there",
        _read_newsgroups,
    ),
    DataSet(
        "20newsgroups-bydate",
        "the 18,846 documents sorted by date, with their own test set",
        "texts",
        20,
        (10_414, 900, 7_532),
        "put the folders 20news-bydate-train and 20news-bydate-test there",
        _read_newsgroups_bydate,
    ),
)
DATASETS: dict[str, DataSet] = {row.name: row for row in _ROWS}
