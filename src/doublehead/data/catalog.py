"""The table of data sets: what each is, its splits, the files it needs and how they are read.

A subset of Fashion-MNIST is included: real images for the demo in 5.9 MB, without a download. Fashion-MNIST (c) 2017
Zalando SE, MIT licence; its text is next to the asset. Compression is lossless: one bit per pixel tells whether it is
0, and each other pixel is stored as its difference from a prediction by its left and upper neighbours. Both streams
are LZMA-compressed. The asset also names the rows of the original files (`rows`).
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from doublehead.data import readers
from doublehead.data.batches import Normalise
from doublehead.data.splits import SPLIT_SEED, Images, Samples, Splits, Trees, split_samples

Array = npt.NDArray[Any]
ASSET = "fashion_mnist_subset.npz"
CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905 (a hundred quoted strings read worse)
)
# In the order of the labels.
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "fashion": (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": CIFAR100,
    "svhn": tuple("0123456789"),
    "sst-fine": ("very negative", "negative", "neutral", "positive", "very positive"),
    "sst-binary": ("negative", "positive"),
}


@dataclass(frozen=True)
class DataSet:
    """One row of the table. `read(row, root, split_seed)` gives the splits; `layout` describes the files under root."""

    name: str
    about: str
    kind: Literal["images", "files", "texts", "trees"]
    n_classes: int
    sizes: tuple[int, int, int]  # train, calib, test
    layout: str
    read: Callable[[DataSet, Path, int], Splits]
    normalise: Normalise | None = None  # published channel means and standard deviations of the train images

    @property
    def folder(self) -> str:
        """The folder under root that downloads go to; two data sets may share one."""
        shared = {"sst-fine": "sst", "sst-binary": "sst", "20newsgroups-bydate": "20newsgroups"}
        return shared.get(self.name, self.name)


def load(name: str, root: str | os.PathLike[str] | None = None, *, split_seed: int = SPLIT_SEED) -> Splits:
    """The splits of a data set in the table, or of your own data.

    `root` contains the files, directly or in a folder named like the data set. The default is the environment
    variable DOUBLEHEAD_DATA, then the folder `data`. Your own data is `arrays:PATH`, `folder:PATH` (images) or
    `table:PATH` (texts), see `load_own`.

    >>> load("fashion").sizes
    (8500, 2500, 6000)
    """
    if ":" in name:
        return readers.load_own(name, split_seed=split_seed)
    spec = find(name)
    return spec.read(spec, data_root(root), split_seed)


def load_test(name: str, root: str | os.PathLike[str] | None = None) -> Samples:
    """The test split alone, for example as out-of-distribution data; CIFAR and SVHN need only their test files."""
    spec, folder = find(name), data_root(root)
    if name in ("cifar10", "cifar100", "svhn"):
        return _image_split(spec, folder, "test")
    return spec.read(spec, folder, SPLIT_SEED).test


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of data sets: `root`, the environment variable DOUBLEHEAD_DATA, or `data`."""
    return Path(root if root is not None else os.environ.get("DOUBLEHEAD_DATA", "data"))


def list_datasets() -> list[dict[str, object]]:
    """One row per data set: name, about, kind, n_classes, train, calib, test, layout."""
    rows: list[dict[str, object]] = []
    for spec in DATASETS.values():
        row = {name: getattr(spec, name) for name in ("name", "about", "kind", "n_classes")}
        rows.append({**row, **dict(zip(("train", "calib", "test"), spec.sizes)), "layout": spec.layout})
    return rows


def find(name: str) -> DataSet:
    """The row of a data set by name."""
    if name not in DATASETS:
        raise ValueError(
            f"data set must be one of {', '.join(DATASETS)}, or arrays:PATH, folder:PATH, table:PATH, got {name!r}"
        )
    return DATASETS[name]


def _find_file(spec: DataSet, root: Path, *paths: str) -> Path:
    """The first of `paths` that exists in the folder of the data set or in root."""
    tried = (folder / path for path in paths for folder in (root / spec.folder, root / spec.name, root))
    found = next((path for path in tried if path.exists()), None)
    if found is None:
        raise FileNotFoundError(
            f"{spec.name} was not found in {root}: {spec.layout}. `doublehead data get {spec.name}` downloads it where "
            "that is allowed"
        )
    return found


def _image_split(spec: DataSet, root: Path, split: str) -> Images:
    """Train or test images of CIFAR or SVHN, from plain arrays or from the original files."""
    name, wanted = spec.name, sum(spec.sizes[:2]) if split == "train" else spec.sizes[2]
    original = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
    found = _find_file(spec, root, f"{split}_images.npy", original.get(name, f"{split}_32x32.mat"))
    if found.suffix == ".npy":
        images = readers.read_arrays(found.parent, split)
    elif name == "svhn":
        images = readers.read_svhn(found.parent, split)
    else:
        images = readers.read_cifar_split(found, split)
    if len(images) != wanted:
        raise ValueError(f"{name} must have {wanted} {split} images, got {len(images)} in {root}")
    return images


def _read_images(spec: DataSet, root: Path, split_seed: int) -> Splits:
    train, calib = split_samples(_image_split(spec, root, "train"), spec.sizes[1], split_seed)
    return Splits(spec.name, train, calib, _image_split(spec, root, "test"), CLASS_NAMES[spec.name])


def _read_imagenet(spec: DataSet, root: Path, split_seed: int) -> Splits:
    """Folders train and val with one folder per class; a stratified half of val is calib."""
    folder = _find_file(spec, root, "train")
    train, names = readers.read_image_folder(folder)
    val, _ = readers.read_image_folder(folder.parent / "val", names)
    test, calib = split_samples(val, len(val) // 2, split_seed)
    return Splits(spec.name, train, calib, test, names)


def _read_sst(spec: DataSet, root: Path, split_seed: int) -> Splits:
    """The data set's own splits; `dev` is calib."""
    found = _find_file(spec, root, "trees/train.txt", "train.txt")
    parts = [readers.read_sst(found.parent / f"{part}.txt") for part in ("train", "dev", "test")]
    if spec.name == "sst-binary":
        parts = [_binary(part) for part in parts]
    return Splits(spec.name, parts[0], parts[1], parts[2], CLASS_NAMES[spec.name])


def _binary(samples: Trees) -> Trees:
    """Negative (0, 1) against positive (3, 4); neutral sentences are dropped, neutral phrases get no label."""
    kept = samples.take((samples.labels != 2).nonzero()[0])
    trees = tuple(tree.relabel((0, 0, -100, 1, 1)) for tree in kept.trees)
    return Trees(trees, (kept.labels > 2).astype("int64"))


def _read_newsgroups(spec: DataSet, root: Path, split_seed: int) -> Splits:
    """All documents, or those of the early folder: test is drawn, or the late folder; calib is drawn from the rest."""
    early = "20news-bydate-train"
    names = (early,) if spec.name.endswith("bydate") else ("20_newsgroups", "20news-19997")
    folder = _find_file(spec, root, *names)
    rest, groups = readers.read_newsgroups(folder)
    if folder.name == early:
        test, _ = readers.read_newsgroups(folder.parent / "20news-bydate-test")
    else:
        rest, test = split_samples(rest, spec.sizes[2], split_seed)
    train, calib = split_samples(rest, spec.sizes[1], split_seed)
    return Splits(spec.name, train, calib, test, groups)


def fashion_subset() -> Splits:
    """The included subset of Fashion-MNIST: 8,500 / 2,500 / 6,000 images of 28 x 28 x 1, ten equally frequent classes.

    train and calib come from the original training images, test from the original test images. The order within each
    split is random. Decoding takes about half a second.

    >>> splits = fashion_subset()
    >>> len(splits.train), len(splits.calib), len(splits.test), splits.train.images.shape[1:]
    (8500, 2500, 6000, (28, 28, 1))
    """
    sizes = DATASETS["fashion"].sizes
    asset = resources.files("doublehead.data") / "assets" / ASSET
    with np.load(io.BytesIO(asset.read_bytes()), allow_pickle=False) as arrays:
        images = decode_images(arrays["mask"].tobytes(), arrays["residuals"].tobytes(), sum(sizes))
        labels = arrays["labels"].astype(np.int64)
        digest = arrays["sha256"].tobytes()
    if hashlib.sha256(images.tobytes() + labels.tobytes()).digest() != digest:
        raise ValueError(f"{ASSET} in the package is damaged (wrong checksum): reinstall doublehead")
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(images[..., None], ends), np.split(labels, ends))
    train, calib, test = (Images(i, y) for i, y in parts)
    return Splits("fashion", train, calib, test, CLASS_NAMES["fashion"])


def decode_images(mask: bytes, residuals: bytes, n: int, side: int = 28) -> Array:
    """(n, side, side) uint8 images from the two compressed streams, pixel by pixel for all images at once."""
    bits = np.frombuffer(lzma.decompress(mask), np.uint8)
    is_set: Array = np.unpackbits(bits, count=n * side * side).reshape(n, side, side).astype(bool)
    difference: Array = np.zeros(is_set.shape, np.uint8)
    difference[is_set] = np.frombuffer(lzma.decompress(residuals), np.uint8)
    # (side, side, n), so that each step reads contiguous memory
    is_set, difference = (np.ascontiguousarray(a.transpose(1, 2, 0)) for a in (is_set, difference))
    padded = np.zeros((side + 1, side + 1, n), np.int16)
    for row in range(side):
        for column in range(side):
            left, up, corner = padded[row + 1, column], padded[row, column + 1], padded[row, column]
            value = (_predict(left, up, corner) + difference[row, column]) & 255
            padded[row + 1, column + 1] = value * is_set[row, column]
    return np.ascontiguousarray(padded[1:, 1:].transpose(2, 0, 1)).astype(np.uint8)


def _predict(left: Array, up: Array, corner: Array) -> Array:
    """The median of left, up and left + up - corner: the edge detector of JPEG-LS."""
    low, high = np.minimum(left, up), np.maximum(left, up)
    clipped: Array = np.clip(left + up - corner, low, high)
    return clipped


_ARRAYS = "or {train,test}_{images,labels}.npy"
_ROWS = (
    DataSet(
        "fashion",
        "a subset of Fashion-MNIST, included in the package",
        "images",
        10,
        (8_500, 2_500, 6_000),
        "included in the package",
        lambda spec, root, split_seed: fashion_subset(),
        Normalise((0.2860,), (0.3530,)),
    ),
    DataSet(
        "cifar10",
        "32 x 32 photographs, ten classes",
        "images",
        10,
        (45_000, 5_000, 10_000),
        f"put the folder cifar-10-batches-py there, {_ARRAYS}",
        _read_images,
        Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    DataSet(
        "cifar100",
        "32 x 32 photographs, a hundred classes",
        "images",
        100,
        (45_000, 5_000, 10_000),
        f"put the folder cifar-100-python there, {_ARRAYS}",
        _read_images,
        Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
    DataSet(
        "svhn",
        "32 x 32 house numbers",
        "images",
        10,
        (60_000, 13_257, 26_032),
        f"put train_32x32.mat and test_32x32.mat there, {_ARRAYS}",
        _read_images,
        Normalise((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    ),
    DataSet(
        "imagenet",
        "ImageNet 2012; the validation images are split in half into calib and test",
        "files",
        1000,
        (1_281_167, 25_000, 25_000),
        "put the folders train and val there, each with one folder of images per class (image-net.org requires an "
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
        _read_sst,
    ),
    DataSet(
        "sst-binary",
        "Stanford Sentiment Treebank, negative or positive, neutral sentences dropped",
        "trees",
        2,
        (6_920, 872, 1_821),
        "put train.txt, dev.txt and test.txt (Penn Treebank trees) there or in a folder trees",
        _read_sst,
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
        _read_newsgroups,
    ),
)
DATASETS: dict[str, DataSet] = {row.name: row for row in _ROWS}
