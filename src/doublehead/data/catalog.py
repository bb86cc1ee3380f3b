"""The table of data sets, `assets/datasets.json`: what each is, its splits, its files. Reading, downloading.

A subset of Fashion-MNIST is included: real images for the demo in 6.5 MB, without a download. Fashion-MNIST (c) 2017
Zalando SE, MIT licence; its text is next to the asset, which also names the rows of the original files (`rows`).
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from doublehead.data import readers
from doublehead.data.batches import Normalise
from doublehead.data.splits import (
    SPLIT_SEED,
    ImageFiles,
    Images,
    Samples,
    Splits,
    Trees,
    count_duplicates,
    split_samples,
)
from doublehead.system import did_you_mean, require

ASSETS = Path(__file__).parent / "assets"
ASSET = "fashion_mnist_subset.npz"


@dataclass(frozen=True)
class Source:
    """A file to download into the folder of a data set; an archive is unpacked there and then deleted."""

    url: str
    file: str
    checksum: str | None = None  # "md5:..." or "sha256:..."; None if none is published
    contains: str | None = None  # what the archive must contain


@dataclass(frozen=True)
class DataSet:
    """One row of the table. `layout` describes the files under root."""

    name: str
    kind: Literal["images", "files", "texts", "trees"]
    n_classes: int
    sizes: tuple[int, int, int]  # train, calib, test
    layout: str
    folder: str  # under root, for downloads; two data sets may share one
    class_names: tuple[str, ...]  # in the order of the labels; empty where the files have them
    normalise: Normalise | None  # published channel means and standard deviations of the train images
    downloads: tuple[Source, ...]  # empty if it needs an account or is included; addresses are torchvision's
    checksums: dict[str, str]  # of files that torchvision publishes them for

    @classmethod
    def of(cls, row: dict[str, Any]) -> DataSet:
        """From an entry of `assets/datasets.json`."""
        mean, std = (tuple(row.pop(name, ())) for name in ("mean", "std"))
        usual: dict[str, Any] = {"folder": row["name"], "checksums": {}}
        usual["normalise"] = Normalise(mean, std) if mean else None
        usual["downloads"] = tuple(Source(**source) for source in row.pop("downloads", ()))
        usual["class_names"] = tuple(row.pop("class_names", ()))
        return cls(**{**usual, **row, "sizes": tuple(row["sizes"])})


DATASETS = {
    row["name"]: DataSet.of(row) for row in json.loads((ASSETS / "datasets.json").read_text(encoding="utf-8"))
}


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
    return _read(find(name), data_root(root), split_seed)


def load_test(name: str, root: str | os.PathLike[str] | None = None) -> Samples:
    """The test split alone, for example as out-of-distribution data; CIFAR and SVHN need only their test files."""
    spec, folder = find(name), data_root(root)
    if name in ("cifar10", "cifar100", "svhn"):
        return _image_split(spec, folder, "test")
    return _read(spec, folder, SPLIT_SEED).test


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of data sets: `root`, the environment variable DOUBLEHEAD_DATA, or `data`."""
    return Path(root if root is not None else os.environ.get("DOUBLEHEAD_DATA", "data"))


def find(name: str) -> DataSet:
    """The row of a data set by name."""
    if name not in DATASETS:
        raise ValueError(
            f"data set must be one of {', '.join(DATASETS)}, or arrays:PATH, folder:PATH, table:PATH, "
            f"got {name!r}{did_you_mean(name, DATASETS)}"
        )
    return DATASETS[name]


def _read(spec: DataSet, root: Path, split_seed: int) -> Splits:
    if spec.name == "fashion":
        return fashion_subset()
    read = {"images": _read_images, "files": _read_imagenet, "trees": _read_sst, "texts": _read_newsgroups}
    return read[spec.kind](spec, root, split_seed)


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
    return Splits(spec.name, train, calib, _image_split(spec, root, "test"), spec.class_names)


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
        # Negative (0, 1) against positive (3, 4); neutral sentences are dropped, neutral phrases get no label.
        parts = [part.take((part.labels != 2).nonzero()[0]) for part in parts]
        for i, part in enumerate(parts):
            trees = tuple(tree.relabel((0, 0, -100, 1, 1)) for tree in part.trees)
            parts[i] = Trees(trees, (part.labels > 2).astype("int64"))
    return Splits(spec.name, parts[0], parts[1], parts[2], spec.class_names)


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
    spec = DATASETS["fashion"]
    with readers.naming(ASSETS / ASSET), np.load(ASSETS / ASSET, allow_pickle=False) as arrays:
        samples = Images(arrays["images"], arrays["labels"].astype(np.int64))
    rows = np.split(np.arange(len(samples)), np.cumsum(spec.sizes)[:-1])
    train, calib, test = (samples.take(part) for part in rows)
    return Splits("fashion", train, calib, test, spec.class_names)


# --- download and check: `doublehead data get | check`


def get(name: str, root: str | os.PathLike[str] | None = None, progress: Any = False) -> Path:
    """Download a data set into root/<folder> with pooch and return that folder.

    Files that are already there are not downloaded again; a failed download leaves no partial files. A
    ValueError describes the files to provide if the data set cannot be downloaded. `progress` is pooch's: True for a
    bar of tqdm, or an object with `total`, `update`, `reset` and `close`.
    """
    spec = find(name)
    folder = data_root(root) / spec.folder
    if name == "fashion":
        return ASSETS
    if not spec.downloads:
        raise ValueError(f"{name} cannot be downloaded to {folder} without an account: {spec.layout}")
    for source in spec.downloads:
        if source.contains is None:
            download(source, folder, progress)
        elif not (folder / source.contains).exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".partial.", dir=folder) as temporary:
                content = Path(temporary) / "content"
                unpack(download(source, Path(temporary), progress), content)
                if not (content / source.contains).exists():
                    raise ValueError(f"{source.url} must contain {source.contains}, but does not")
                for entry in sorted(content.iterdir()):
                    os.replace(entry, folder / entry.name)
    return folder


def download(source: Source, folder: Path, progress: Any = False) -> Path:
    """Download one file with pooch; it appears only when it is complete and its checksum is right."""
    pooch = require("pooch", extra="data")
    pooch.get_logger().setLevel("WARNING")
    http = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 20, timeout=60)
    try:
        file = Path(pooch.retrieve(source.url, source.checksum, source.file, folder, downloader=http))
    except OSError as error:  # includes the errors of requests
        raise ConnectionError(f"{source.url} could not be downloaded: {error}") from error
    with suppress(PermissionError):  # the file is someone else's, from an earlier download
        file.chmod(0o644)  # pooch keeps the mode of its temporary file, 0600
    return file


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.* or .zip into `folder`; no member can write outside it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(folder)  # keeps members inside, makes no links, checks each CRC
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")  # refuses members and links that lead outside
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{archive.name} is truncated, damaged or unsafe: {error}") from error


def check(name: str, root: str | os.PathLike[str] | None = None) -> tuple[Splits, list[str]]:
    """A data set, and a note on each pair of its splits that share samples.

    A ValueError names files with a wrong checksum and splits of a wrong size.
    """
    spec = DATASETS.get(name)
    problems = [
        f"{path} must have the checksum {known}: download it again"
        for file, known in (spec.checksums.items() if spec else ())
        for path in (data_root(root) / name / file, data_root(root) / file)
        if path.exists() and require("pooch", extra="data").file_hash(path, alg="md5") != known[4:]
    ]
    if problems:
        raise ValueError("; ".join(problems))
    splits = load(name, root)
    if spec and splits.sizes != spec.sizes:
        raise ValueError(f"{name} must have train/calib/test of {spec.sizes}, got {splits.sizes}")
    # Comparing a million image files would take hours.
    duplicates = {} if isinstance(splits.train, ImageFiles) else count_duplicates(splits)
    return splits, [
        f"{n} of the {b} samples are also in {a}, byte for byte" for (a, b), n in duplicates.items() if n
    ]
