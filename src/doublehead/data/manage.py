"""What stands behind `doublehead data list | get | check | convert`."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from doublehead.data.catalog import DATASETS, _find, data_root, load
from doublehead.data.fetch import Progress, digest, download, unpack
from doublehead.data.readers import read_image_files
from doublehead.data.splits import ImageFiles, Images, Samples, Splits, Trees, count_duplicates
from doublehead.optional import require


@dataclass(frozen=True)
class Source:
    """A file to download into a data set's folder; an archive is unpacked there and then removed."""

    url: str
    file: str
    checksum: str | None = None  # None: none is published; the number of samples is checked instead
    into: str | None = None  # what the archive must leave in the folder


def sources(name: str) -> tuple[Source, ...]:
    """Where a data set may be downloaded from; empty where it must be fetched by hand or comes with the package.

    Addresses and checksums of the image sets are torchvision's.
    """
    if name in ("cifar10", "cifar100"):
        cifar = getattr(require("torchvision.datasets", extra="data"), name.upper())
        return (Source(cifar.url, cifar.filename, f"md5:{cifar.tgz_md5}", cifar.base_folder),)
    if name == "svhn":
        files = require("torchvision.datasets", extra="data").SVHN.split_list
        return tuple(Source(url, file, f"md5:{md5}") for url, file, md5 in (files["train"], files["test"]))
    if name in ("sst-fine", "sst-binary"):
        return (
            Source("https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip", "sst.zip", None, "trees"),
        )
    home = "http://qwone.com/~jason/20Newsgroups"
    if name == "20newsgroups":
        return (Source(f"{home}/20news-19997.tar.gz", "20news-19997.tar.gz", None, "20_newsgroups"),)
    if name == "20newsgroups-bydate":
        # The checksum scikit-learn keeps for its copy of the same archive.
        sha = "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610"
        return (Source(f"{home}/20news-bydate.tar.gz", "20news-bydate.tar.gz", sha, "20news-bydate-train"),)
    return ()


def list_datasets() -> list[dict[str, object]]:
    """One plain row per data set: name, about, kind, n_classes, train, calib, test, and where its files come from."""
    rows = []
    for spec in DATASETS.values():
        train, calib, test = spec.sizes
        row = {"name": spec.name, "about": spec.about, "kind": spec.kind, "n_classes": spec.n_classes}
        rows.append({**row, "train": train, "calib": calib, "test": test, "layout": spec.layout})
    return rows


def get(name: str, root: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Download a data set into root/<folder> with checksums, or raise LookupError that says what to put where.

    Nothing half-written stays behind, and what is there already is not fetched again.
    """
    spec = _find(name)
    folder = data_root(root) / _folder(name)
    if name == "fashion":
        return data_root(root)
    available = sources(name)
    if not available:
        raise LookupError(f"{name} cannot be downloaded without an account: {spec.layout} (in {folder})")
    for source in available:
        if source.into and (folder / source.into).exists():
            continue
        file = download(source.url, folder / source.file, source.checksum, progress)
        if source.into:
            unpack(file, folder)
            file.unlink()
            if not (folder / source.into).exists():
                raise ValueError(f"{source.url} must hold {source.into}, but does not")
    return folder


@dataclass(frozen=True)
class Report:
    """What `check` found: sizes of the splits, problems that must be mended, notes worth knowing."""

    name: str
    sizes: tuple[int, int, int] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the data can be used."""
        return not self.problems


def check(name: str, root: str | os.PathLike[str] | None = None) -> Report:
    """Read a data set as training would, compare sizes and checksums, and count duplicates across its splits."""
    problems = _wrong_checksums(name, data_root(root)) if ":" not in name else []
    try:
        splits = load(name, root)
    except (OSError, ValueError) as error:
        return Report(name, None, (*problems, str(error)), ())
    spec = DATASETS.get(name)
    if spec and splits.sizes != spec.sizes:
        problems.append(f"{name} must have train/calib/test of {spec.sizes}, got {splits.sizes}")
    # Reading a million image files to compare them would take hours.
    duplicates = {} if isinstance(splits.train, ImageFiles) else count_duplicates(splits)
    notes = [
        f"{count} of the {b} samples are also in {a}, byte for byte"
        for (a, b), count in duplicates.items()
        if count
    ]
    return Report(name, splits.sizes, tuple(problems), tuple(notes))


def convert(name: str, root: str | os.PathLike[str] | None, dest: str | os.PathLike[str]) -> Path:
    """Write the splits as plain files that `arrays:DEST` or `table:DEST` reads back; dest appears whole or not at all.

    Images become `{train,calib,test}_{images,labels}.npy`, texts and trees `{train,calib,test}.csv` with the columns
    text and label; `classes.json` holds the names. Image files must all have one size.
    """
    splits, dest = load(name, root), Path(dest)
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise FileExistsError(f"{dest} must be empty or not exist")
    dest.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        _write(splits, temporary)
        temporary.chmod(0o755)
        os.replace(temporary, dest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return dest


def _write(splits: Splits, folder: Path) -> None:
    (folder / "classes.json").write_text(
        json.dumps(list(splits.class_names), ensure_ascii=False), encoding="utf-8"
    )
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


def _folder(name: str) -> str:
    return {"sst-fine": "sst", "sst-binary": "sst", "20newsgroups-bydate": "20newsgroups"}.get(name, name)


def _wrong_checksums(name: str, root: Path) -> list[str]:
    """The published checksums of the files inside the CIFAR folders and of SVHN's, where they are there."""
    if name not in ("cifar10", "cifar100", "svhn"):
        return []
    datasets = require("torchvision.datasets", extra="data")
    if name == "svhn":
        known = {file: md5 for _, file, md5 in datasets.SVHN.split_list.values()}
    else:
        cifar = getattr(datasets, name.upper())
        known = {f"{cifar.base_folder}/{file}": md5 for file, md5 in (*cifar.train_list, *cifar.test_list)}
    wrong = []
    for file, md5 in known.items():
        for path in (root / name / file, root / file):
            if path.exists() and digest(path, "md5:") != f"md5:{md5}":
                wrong.append(f"{path} does not have its published checksum (md5 {md5}): fetch it again")
    return wrong
