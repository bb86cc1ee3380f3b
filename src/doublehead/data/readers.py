"""Readers of the files people already have. Each names the file that is missing, truncated or damaged.

No pickle is executed: the CIFAR batches, which are pickles, go through an unpickler that knows numpy arrays,
dtypes and plain Python values, and refuses everything else.
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

from doublehead.data.splits import ImageFiles, Images, Texts, Trees
from doublehead.data.trees import parse_tree
from doublehead.optional import require

Array = npt.NDArray[Any]
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff")


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn what a parser says about broken content into one sentence that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} is missing") from error
    except ImportError:
        raise
    except (Exception, MemoryError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{file} is truncated or damaged: {said}") from error


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and plain values; any other global in the file is an error, so nothing is run."""

    rebuild_array = np.zeros(0).__reduce__()[0]  # where it lives differs between versions

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _ArraysOnly.rebuild_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a data file has no use for")


def read_cifar_batch(file: Path, label_key: str) -> Images:
    """One batch of `cifar-10-batches-py` (label_key "labels") or `cifar-100-python` ("fine_labels")."""
    with naming(file):
        with file.open("rb") as handle:
            batch = _ArraysOnly(handle, encoding="latin1").load()
        pixels = np.asarray(batch["data"], np.uint8)  # (N, 3072), channel by channel
        images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return Images(images, np.asarray(batch[label_key], np.int64))


def read_cifar_split(folder: Path, split: str) -> Images:
    """Train or test images of a folder `cifar-10-batches-py` or `cifar-100-python`, in their canonical order."""
    if folder.name == "cifar-100-python":
        return read_cifar_batch(folder / split, "fine_labels")
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    return join([read_cifar_batch(folder / name, "labels") for name in names])


def read_svhn(folder: Path, split: str) -> Images:
    """`train_32x32.mat` or `test_32x32.mat`; the file's label 10 is the digit 0."""
    file = folder / f"{split}_32x32.mat"
    with naming(file):
        content = require("scipy.io", extra="data").loadmat(file, variable_names=["X", "y"])
        images = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        return Images(images, content["y"].reshape(-1).astype(np.int64) % 10)


def read_arrays(folder: Path, split: str) -> Images:
    """`<split>_images.npy`, uint8 (N, H, W, C) or (N, H, W), and `<split>_labels.npy`, whole numbers (N,)."""
    arrays = []
    for part in ("images", "labels"):
        file = folder / f"{split}_{part}.npy"
        with naming(file):
            arrays.append(np.load(file, allow_pickle=False))
    images, labels = arrays
    with naming(folder / f"{split}_labels.npy"):
        if labels.dtype.kind not in "iu":
            raise ValueError(f"labels must be whole numbers, got {labels.dtype}")
        return Images(images[..., None] if images.ndim == 3 else images, labels.astype(np.int64))


def read_image_folder(
    folder: Path, class_names: Sequence[str] | None = None
) -> tuple[ImageFiles, tuple[str, ...]]:
    """The files `<class>/**/<image>` of a folder, classes in alphabetical order, and the classes' names.

    With `class_names` given, labels follow it, and a folder it does not know is an error.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: it must hold one folder of images per class")
    found = sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
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


def read_image_files(samples: ImageFiles, size: tuple[int, int] | None = None) -> Images:
    """Decode image files into memory as RGB, resized to `size` (height, width) or all of one size already."""
    pillow = require("PIL.Image", extra="data")
    images = []
    for file in samples.files:
        with naming(file), pillow.open(file) as image:
            colour = image.convert("RGB")
            images.append(
                np.asarray(colour.resize(size[::-1], pillow.Resampling.BILINEAR) if size else colour)
            )
        if images[-1].shape != images[0].shape:
            raise ValueError(
                f"{file} has the shape {images[-1].shape}, others have {images[0].shape}: give a size to resize to"
            )
    return Images(np.stack(images), samples.labels)


def read_sst(file: Path) -> Trees:
    """One file of Penn Treebank trees, a line a sentence; the label is that of the whole sentence, 0 .. 4."""
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
    """The documents `<group>/<number>` without their header (up to the first empty line), and the groups' names."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: it must hold one folder of documents per newsgroup")
    groups = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    texts, labels = [], []
    for label, group in enumerate(groups):
        for file in sorted((folder / group).iterdir(), key=lambda f: (len(f.name), f.name)):
            with naming(file):
                content = file.read_text(encoding="latin-1")
            header, blank, body = content.partition("\n\n")
            texts.append(body if blank and ":" in header else content)
            labels.append(label)
    return Texts(tuple(texts), np.array(labels, np.int64)), groups


def read_table(
    file: Path, text: str = "text", label: str = "label"
) -> tuple[list[str], list[Any], list[str] | None]:
    """The columns `text`, `label` and, where there is one, `split` of a .csv or .parquet file."""
    with naming(file):
        if file.suffix == ".parquet":
            columns = require("pyarrow.parquet", extra="data").read_table(file).to_pydict()
        else:
            frame = require("pandas", extra="data").read_csv(file, keep_default_na=False)
            columns = {name: frame[name].tolist() for name in frame.columns}
    missing = [name for name in (text, label) if name not in columns]
    if missing:
        raise ValueError(
            f"{file} must have the columns {text!r} and {label!r}, got {sorted(map(str, columns))}"
        )
    empty = [
        i for i, (t, y) in enumerate(zip(columns[text], columns[label])) if t is None or y is None or y == ""
    ]
    if empty:
        raise ValueError(f"{file} must have a text and a label in each row, row {empty[0] + 1} has not")
    split = [str(name) for name in columns["split"]] if "split" in columns else None
    return [str(t) for t in columns[text]], columns[label], split


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """The list of names in `classes.json`, where there is one."""
    file = folder / "classes.json"
    if not file.exists():
        return None
    with naming(file):
        names = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it must hold a list of names")
        return tuple(names)


def join(parts: Sequence[Images]) -> Images:
    """Images of several files, one after the other."""
    return Images(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))
