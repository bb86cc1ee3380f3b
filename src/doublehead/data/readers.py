"""Readers of standard files and of the user's own data. Errors name the file that is missing or damaged.

The CIFAR batches are pickles; they are read by an unpickler that builds only numpy arrays and plain values, so no
code in them runs.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doublehead.data.splits import SPLIT_SEED, ImageFiles, Images, Splits, Texts, Trees, split_samples
from doublehead.data.trees import parse_tree
from doublehead.system import require

Array = npt.NDArray[Any]
Own = tuple[dict[str, Any], Sequence[str]]  # samples by split, and the names of the classes
CALIB_SHARE = 0.1  # of the training data, if there is no calib split
TEST_SHARE = 0.2  # of all data, if there is no test split
SPLIT_NAMES = {"val": "calib", "valid": "calib", "validation": "calib", "dev": "calib"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff")


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn any error of a parser into one that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} is missing") from error
    except ImportError:
        raise
    except (Exception, MemoryError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{file} is truncated or damaged: {said}") from error


class ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and plain values; any other global in the file is an error, so no code runs."""

    rebuild_array = np.zeros(0).__reduce__()[0]  # its module differs between numpy versions

    def find_class(self, module: str, name: str) -> Any:
        """The parts of a numpy array; anything else is an error."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return ArraysOnly.rebuild_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed in a data file")


def read_cifar_batch(file: Path, label_key: str) -> Images:
    """One batch of `cifar-10-batches-py` (label_key "labels") or `cifar-100-python` ("fine_labels")."""
    with naming(file):
        with file.open("rb") as handle:
            batch = ArraysOnly(handle, encoding="latin1").load()
        pixels = np.asarray(batch["data"], np.uint8)  # (N, 3072), channel by channel
        images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return Images(images, np.asarray(batch[label_key], np.int64))


def read_cifar_split(folder: Path, split: str) -> Images:
    """Train or test images of a folder `cifar-10-batches-py` or `cifar-100-python`, in their canonical order."""
    if folder.name == "cifar-100-python":
        return read_cifar_batch(folder / split, "fine_labels")
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [read_cifar_batch(folder / name, "labels") for name in names]
    return Images(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


def read_svhn(folder: Path, split: str) -> Images:
    """`train_32x32.mat` or `test_32x32.mat`; the file's label 10 is the digit 0."""
    file = folder / f"{split}_32x32.mat"
    with naming(file):
        content = require("scipy.io", extra="data").loadmat(file, variable_names=["X", "y"])
        images = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        return Images(images, content["y"].reshape(-1).astype(np.int64) % 10)


def read_arrays(folder: Path, split: str) -> Images:
    """`<split>_images.npy`, uint8 (N, H, W, C) or (N, H, W), and `<split>_labels.npy`, integers (N,)."""
    arrays = []
    for part in ("images", "labels"):
        file = folder / f"{split}_{part}.npy"
        with naming(file):
            arrays.append(np.load(file, allow_pickle=False))
    images, labels = arrays
    with naming(folder / f"{split}_labels.npy"):
        if labels.dtype.kind not in "iu":
            raise ValueError(f"labels must be integers, got {labels.dtype}")
        return Images(images[..., None] if images.ndim == 3 else images, labels.astype(np.int64))


def class_folders(folder: Path, what: str) -> list[str]:
    """The names of the folders in a folder, in alphabetical order, without hidden ones."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: it must hold one folder of {what}")
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")


def read_image_folder(
    folder: Path, class_names: Sequence[str] | None = None
) -> tuple[ImageFiles, tuple[str, ...]]:
    """The files `<class>/**/<image>` of a folder and the class names, in alphabetical order.

    If `class_names` is given, labels follow its order, and a folder that is not in it is an error.
    """
    found = class_folders(folder, "images per class")
    names = tuple(class_names or found)
    if not found or not set(found) <= set(names):
        unknown = sorted(set(found) - set(names))
        raise ValueError(f"{folder} must hold one folder of images per class, got {unknown[:5] or 'none'}")
    files, labels = [], []
    for name in found:
        images = sorted(f for f in (folder / name).rglob("*") if f.suffix.lower() in IMAGE_ENDINGS)
        files += images
        labels += [names.index(name)] * len(images)
    return ImageFiles(tuple(files), np.array(labels, np.int64)), names


def read_sst(file: Path) -> Trees:
    """One file of Penn Treebank trees, one sentence per line, labelled 0..4 as a whole."""
    with naming(file):
        lines = file.read_text(encoding="utf-8").split("\n")
    trees = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                trees.append(parse_tree(line))
            except ValueError as error:
                raise ValueError(f"{file} is truncated or damaged in line {number}: {error}") from error
    return Trees(tuple(trees), np.array([tree.labels[-1] for tree in trees], np.int64))


def read_newsgroups(folder: Path) -> tuple[Texts, tuple[str, ...]]:
    """The documents `<group>/<number>` without their headers (up to the first empty line), and the group names."""
    groups = tuple(class_folders(folder, "documents per newsgroup"))
    texts, labels = [], []
    for label, group in enumerate(groups):
        for file in sorted((folder / group).iterdir(), key=lambda f: (len(f.name), f.name)):
            with naming(file):
                content = file.read_text(encoding="latin-1")
            header, blank, body = content.partition("\n\n")
            texts.append(body if blank and ":" in header else content)
            labels.append(label)
    return Texts(tuple(texts), np.array(labels, np.int64)), groups


def read_table(path: Path) -> Any:
    """A .csv or .parquet file as a DataFrame, or all such files in a folder, each named after its split."""
    pandas = require("pandas", extra="data")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".csv", ".parquet"))
        if not files:
            raise FileNotFoundError(
                f"{path} must contain .csv or .parquet files named after their splits, got none"
            )
        return pandas.concat([read_table(file).assign(split=file.stem) for file in files])
    with naming(path):
        if path.suffix == ".parquet":
            table = pandas.read_parquet(path)
        else:
            table = pandas.read_csv(path, keep_default_na=False)
    if not {"text", "label"} <= set(table):
        raise ValueError(f"{path} must have the columns 'text' and 'label', got {sorted(map(str, table))}")
    empty = np.flatnonzero(table[["text", "label"]].isna().any(axis=1) | (table.label.astype(str) == ""))
    if len(empty):
        text, label = table[["text", "label"]].iloc[empty[0]]
        raise ValueError(
            f"{path} must have a text and a label in each row, got text {text!r} and label {label!r} in row "
            f"{empty[0] + 1}"
        )
    return table


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """The list of names in `classes.json`, or None if there is no such file."""
    file = folder / "classes.json"
    if not file.exists():
        return None
    with naming(file):
        names = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it must contain a list of names")
        return tuple(names)


def load_own(name: str, *, split_seed: int = SPLIT_SEED) -> Splits:
    """The splits of `arrays:PATH`, `folder:PATH` or `table:PATH`.

    - `arrays:PATH`: a folder with `train_images.npy`, `train_labels.npy` etc. and, optionally, `classes.json`
    - `folder:PATH`: a folder with `train/<class>/<image>`, `test/...`, `calib/...` (or `val`, `dev`), or with
      `<class>/<image>` only
    - `table:PATH`: a .csv or .parquet file with the columns text, label and, optionally, split; or a folder of
      `train.csv`, `test.csv` etc.

    Missing splits are drawn by class: a fifth of all samples for test, a tenth of the rest for calib.
    """
    kind, _, where = name.partition(":")
    readers = {"arrays": _arrays, "folder": _folder, "table": _table}
    if kind not in readers:
        raise ValueError(f"name must be arrays:PATH, folder:PATH or table:PATH, got {name!r}")
    path = Path(where).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing (from {name!r})")
    parts, class_names = readers[kind](path)
    return complete(f"{kind}:{path}", parts, class_names, split_seed)


def complete(
    name: str, parts: dict[str, Any], class_names: Sequence[str], split_seed: int = SPLIT_SEED
) -> Splits:
    """Splits from the parts "train", "calib" and "test"; missing ones are split off train."""
    if "train" not in parts:
        raise ValueError(f"{name} must have a train split, got only {sorted(parts)}")
    parts = dict(parts)
    for split, share in (("test", TEST_SHARE), ("calib", CALIB_SHARE)):
        if split not in parts:
            train = parts["train"]
            parts["train"], parts[split] = split_samples(train, round(share * len(train)), split_seed)
    for split in ("train", "calib", "test"):
        if len(parts[split]) == 0:
            raise ValueError(f"{name} must have at least one sample in each split, {split} is empty")
    return Splits(name, **parts, class_names=tuple(class_names))


def _arrays(folder: Path) -> Own:
    found = [split for split in ("train", "calib", "test") if (folder / f"{split}_images.npy").exists()]
    if "train" not in found:
        raise FileNotFoundError(f"{folder / 'train_images.npy'} is missing")
    parts = {split: read_arrays(folder, split) for split in found}
    highest = max(int(part.labels.max()) for part in parts.values())
    return parts, read_class_names(folder) or [str(i) for i in range(highest + 1)]


def _folder(folder: Path) -> Own:
    found = class_folders(folder, "images per class")
    if "train" not in found:
        everything, names = read_image_folder(folder)
        return {"train": everything}, names
    train, names = read_image_folder(folder / "train")
    parts = {"train": train}
    for entry in sorted({"calib", "test", *SPLIT_NAMES}.intersection(found)):
        split = SPLIT_NAMES.get(entry, entry)
        if split in parts:
            raise ValueError(f"{folder} must have one folder for {split}, got {found}")
        parts[split] = read_image_folder(folder / entry, names)[0]
    return parts, names


def _table(path: Path) -> Own:
    table = read_table(path)
    labels, names = table.label.tolist(), read_class_names(path) if path.is_dir() else None
    values = range(len(names)) if names else sorted(set(labels), key=lambda v: (str(type(v)), v))
    number = {value: i for i, value in enumerate(values)}
    unknown = next((label for label in labels if label not in number), None)
    if unknown is not None:
        raise ValueError(
            f"labels in {path} must lie in 0..{len(values) - 1} as in classes.json, got {unknown!r}"
        )
    samples = Texts(tuple(map(str, table.text)), np.array([number[label] for label in labels], np.int64))
    names = names or tuple(map(str, values))
    if "split" not in table:
        return {"train": samples}, names
    of_row = table.split.astype(str).replace(SPLIT_NAMES).to_numpy()
    unknown_splits = sorted(set(of_row) - {"train", "calib", "test"})
    if unknown_splits:
        raise ValueError(f"splits in {path} must be train, calib or test, got {unknown_splits[:5]}")
    return {str(split): samples.take(np.flatnonzero(of_row == split)) for split in np.unique(of_row)}, names
