"""Download, check and convert data sets: `doublehead data get | check | convert`."""

from __future__ import annotations

import csv
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from doublehead.atomic import replacing
from doublehead.data.catalog import DATASETS, data_root, find, load
from doublehead.data.readers import read_image_files
from doublehead.data.splits import ImageFiles, Images, Samples, Splits, Trees, count_duplicates
from doublehead.optional import require

Progress: TypeAlias = Callable[[str, int, int], None]  # file name, bytes so far, total bytes (0: unknown)


@dataclass(frozen=True)
class Source:
    """A file to download into the folder of a data set; an archive is unpacked there and then deleted."""

    url: str
    file: str
    checksum: str | None = None  # "md5:..." or "sha256:..."; None if none is published
    contains: str | None = None  # what the archive must contain


def sources(name: str) -> tuple[Source, ...]:
    """The files of a data set to download; empty if it needs an account or is included in the package.

    Addresses and checksums of the image sets are torchvision's.
    """
    if name in ("cifar10", "cifar100"):
        cifar = getattr(require("torchvision.datasets", extra="data"), name.upper())
        return (Source(cifar.url, cifar.filename, f"md5:{cifar.tgz_md5}", cifar.base_folder),)
    if name == "svhn":
        files = require("torchvision.datasets", extra="data").SVHN.split_list
        return tuple(Source(url, file, f"md5:{md5}") for url, file, md5 in (files["train"], files["test"]))
    if name in ("sst-fine", "sst-binary"):
        url = "https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
        return (Source(url, "sst.zip", None, "trees"),)
    home = "http://qwone.com/~jason/20Newsgroups"
    if name == "20newsgroups":
        return (Source(f"{home}/20news-19997.tar.gz", "20news-19997.tar.gz", None, "20_newsgroups"),)
    if name == "20newsgroups-bydate":
        # scikit-learn publishes this checksum for its copy of the archive.
        sha = "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610"
        return (Source(f"{home}/20news-bydate.tar.gz", "20news-bydate.tar.gz", sha, "20news-bydate-train"),)
    return ()


def get(name: str, root: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Download a data set into root/<folder> and return that folder.

    Files that are already there are not downloaded again; a failed download leaves no partial files. A
    ValueError describes the files to provide if the data set cannot be downloaded.
    """
    spec = find(name)
    folder = data_root(root) / spec.folder
    if name == "fashion":
        return data_root(root)
    files = sources(name)
    if not files:
        raise ValueError(f"{name} cannot be downloaded without an account: {spec.layout} (in {folder})")
    for source in files:
        if source.contains is None:
            download(source, folder, progress)
        elif not (folder / source.contains).exists():
            archive = download(source, folder, progress)
            unpack(archive, folder)
            archive.unlink()
            if not (folder / source.contains).exists():
                raise ValueError(f"{source.url} must contain {source.contains}, but does not")
    return folder


def download(source: Source, folder: Path, progress: Progress | None = None) -> Path:
    """Download one file with pooch; it appears only when it is complete and its checksum is right."""
    pooch = require("pooch", extra="data")
    pooch.get_logger().setLevel("WARNING")
    bar = _Bar(source.file, progress) if progress else False
    try:
        file = pooch.retrieve(
            source.url,
            source.checksum,
            source.file,
            folder,
            downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 20, timeout=60),
        )
    except OSError as error:  # includes the errors of requests
        raise ConnectionError(f"{source.url} could not be downloaded: {error}") from error
    with suppress(PermissionError):  # the file is someone else's, from an earlier download
        Path(file).chmod(0o644)  # pooch keeps the mode of its temporary file, 0600
    return Path(file)


class _Bar:
    """Passes pooch's progress on to a `Progress` function."""

    def __init__(self, file: str, progress: Progress) -> None:
        self.file, self.progress, self.total, self.done = file, progress, 0, 0

    def update(self, n: int) -> None:
        self.done += n  # pooch counts whole chunks, so the last one may exceed the total
        self.progress(self.file, min(self.done, self.total or self.done), self.total)

    def reset(self) -> None:
        """Do nothing: pooch adds the total once more after the last chunk."""

    def close(self) -> None:
        """Do nothing."""


def unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack a .tar.* or .zip into `folder`; returns the names of the new entries.

    A damaged archive leaves nothing behind, and no member can write outside the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial.", dir=folder) as temporary:
        try:
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(temporary)  # keeps members inside, makes no links, checks each CRC
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")  # refuses members and links that lead outside
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{archive} is truncated, damaged or unsafe: {error}") from error
        names = sorted(os.listdir(temporary))
        for name in names:
            if (folder / name).exists():
                raise FileExistsError(
                    f"{folder / name} already exists; move it away to unpack {archive.name}"
                )
        for name in names:
            os.replace(Path(temporary) / name, folder / name)
    return names


@dataclass(frozen=True)
class Report:
    """Result of `check`: sizes of the splits, problems that make the data unusable, and notes."""

    name: str
    sizes: tuple[int, int, int] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the data can be used."""
        return not self.problems


def check(name: str, root: str | os.PathLike[str] | None = None) -> Report:
    """Load a data set, compare sizes and checksums, and count duplicates across its splits."""
    problems = _wrong_checksums(name, data_root(root)) if ":" not in name else []
    try:
        splits = load(name, root)
    except (OSError, ValueError) as error:
        return Report(name, None, (*problems, str(error)), ())
    spec = DATASETS.get(name)
    if spec and splits.sizes != spec.sizes:
        problems.append(f"{name} must have train/calib/test of {spec.sizes}, got {splits.sizes}")
    # Comparing a million image files would take hours.
    duplicates = {} if isinstance(splits.train, ImageFiles) else count_duplicates(splits)
    notes = [
        f"{n} of the {b} samples are also in {a}, byte for byte" for (a, b), n in duplicates.items() if n
    ]
    return Report(name, splits.sizes, tuple(problems), tuple(notes))


def convert(name: str, root: str | os.PathLike[str] | None, dest: str | os.PathLike[str]) -> Path:
    """Write the splits as plain files that `arrays:DEST` or `table:DEST` reads; a failure leaves no partial folder.

    Images become `{train,calib,test}_{images,labels}.npy`, texts and trees `{train,calib,test}.csv` with the columns
    text and label; `classes.json` has the class names. Image files must all have the same size.
    """
    splits, dest = load(name, root), Path(dest)
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise FileExistsError(f"{dest} must be empty or not exist")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with replacing(dest) as temporary:
        temporary.mkdir()
        _write(splits, temporary)
    return dest


def _write(splits: Splits, folder: Path) -> None:
    names = json.dumps(list(splits.class_names), ensure_ascii=False)
    (folder / "classes.json").write_text(names, encoding="utf-8")
    for split in ("train", "calib", "test"):
        samples: Samples = getattr(splits, split)
        if isinstance(samples, (Images, ImageFiles)):
            images = samples if isinstance(samples, Images) else read_image_files(samples)
            np.save(folder / f"{split}_images.npy", images.images)
            np.save(folder / f"{split}_labels.npy", images.labels)
            continue
        texts = samples.as_texts() if isinstance(samples, Trees) else samples
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(["text", "label"])
            writer.writerows(zip(texts.texts, texts.labels.tolist()))


def _wrong_checksums(name: str, root: Path) -> list[str]:
    """Problems with the files of CIFAR and SVHN, whose checksums torchvision publishes."""
    if name not in ("cifar10", "cifar100", "svhn"):
        return []
    datasets = require("torchvision.datasets", extra="data")
    if name == "svhn":
        known = {file: md5 for _, file, md5 in datasets.SVHN.split_list.values()}
    else:
        cifar = getattr(datasets, name.upper())
        known = {f"{cifar.base_folder}/{file}": md5 for file, md5 in (*cifar.train_list, *cifar.test_list)}
    paths = [(folder / file, md5) for file, md5 in known.items() for folder in (root / name, root)]
    file_hash = require("pooch", extra="data").file_hash
    return [
        f"{path} must have the checksum md5:{md5}: download it again"
        for path, md5 in paths
        if path.exists() and file_hash(path, alg="md5") != md5
    ]
