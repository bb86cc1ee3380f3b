"""Your own data as Splits: plain arrays, folders of images, tables of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from doublehead.data import readers
from doublehead.data.splits import SPLIT_SEED, ImageFiles, Images, S, Splits, Texts, carve

CALIB_SHARE = 0.1  # of the training data, where there is no calibration data of its own
TEST_SHARE = 0.2  # of all data, where there is no test data of its own


def load_own(name: str, *, split_seed: int = SPLIT_SEED) -> Splits:
    """The splits of `arrays:PATH`, `folder:PATH` or `table:PATH`.

    What the data does not split itself is drawn by class: a fifth of all for test, a tenth of the rest for calib.

    - `arrays:PATH` a folder with `train_images.npy`, `train_labels.npy` and so on; names in `classes.json` if you like
    - `folder:PATH` a folder with `train/<class>/<image>`, `test/...`, `calib/...` (`val` and `dev` mean calib), or
      with `<class>/<image>` at once
    - `table:PATH` a .csv or .parquet file with the columns text, label and, if you like, split; or a folder of
      `train.csv`, `test.csv` and so on
    """
    kind, _, where = name.partition(":")
    readers_of = {"arrays": _arrays, "folder": _folder, "table": _table}
    if kind not in readers_of:
        raise ValueError(f"your own data must be named arrays:PATH, folder:PATH or table:PATH, got {name!r}")
    path = Path(where).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing (named by {name!r})")
    return readers_of[kind](path, split_seed)


def complete(
    name: str, parts: dict[str, S], class_names: Sequence[str], split_seed: int = SPLIT_SEED
) -> Splits:
    """Splits from what there is under "train", "calib" and "test"; the missing ones are carved out of train."""
    if "train" not in parts:
        raise ValueError(f"{name} must have training data, got only {sorted(parts)}")
    train = parts["train"]
    if "test" not in parts:
        train, test = carve(train, round(TEST_SHARE * len(train)), split_seed)
        parts = {**parts, "test": test}
    if "calib" not in parts:
        train, calib = carve(train, round(CALIB_SHARE * len(train)), split_seed)
        parts = {**parts, "calib": calib}
    for split, part in (("train", train), ("calib", parts["calib"]), ("test", parts["test"])):
        if len(part) == 0:
            raise ValueError(f"{name} must have at least one sample in each split, {split} is empty")
    return Splits(name, train, parts["calib"], parts["test"], tuple(class_names))


def _arrays(folder: Path, split_seed: int) -> Splits:
    here = [split for split in ("train", "calib", "test") if (folder / f"{split}_images.npy").exists()]
    if "train" not in here:
        raise FileNotFoundError(f"{folder / 'train_images.npy'} is missing")
    parts: dict[str, Images] = {split: readers.read_arrays(folder, split) for split in here}
    names = readers.read_class_names(folder)
    highest = max(int(part.labels.max()) for part in parts.values())
    return complete(f"arrays:{folder}", parts, names or [str(i) for i in range(highest + 1)], split_seed)


def _folder(folder: Path, split_seed: int) -> Splits:
    aliases = {
        "train": "train",
        "calib": "calib",
        "val": "calib",
        "valid": "calib",
        "dev": "calib",
        "test": "test",
    }
    inside = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    if "train" not in inside:
        everything, names = readers.read_image_folder(folder)
        return complete(f"folder:{folder}", {"train": everything}, names, split_seed)
    train, names = readers.read_image_folder(folder / "train")
    parts: dict[str, ImageFiles] = {"train": train}
    for entry in sorted(inside & set(aliases)):
        if aliases[entry] in parts and entry != "train":
            raise ValueError(f"{folder} must have one folder for {aliases[entry]}, got {sorted(inside)}")
        parts[aliases[entry]] = readers.read_image_folder(folder / entry, names)[0]
    return complete(f"folder:{folder}", parts, names, split_seed)


def _table(path: Path, split_seed: int) -> Splits:
    texts, labels, splits = _rows(path)
    names = readers.read_class_names(path) if path.is_dir() else None
    values: list[Any] = (
        list(range(len(names))) if names else sorted(set(labels), key=lambda v: (str(type(v)), v))
    )
    number = {value: i for i, value in enumerate(values)}
    unknown = next((label for label in labels if label not in number), None)
    if unknown is not None:
        raise ValueError(f"labels in {path} must be 0..{len(values) - 1} as in classes.json, got {unknown!r}")
    samples = Texts(tuple(texts), np.array([number[label] for label in labels], np.int64))
    names = names or tuple(str(value) for value in values)
    if splits is None:
        return complete(f"table:{path}", {"train": samples}, names, split_seed)
    aliases = {"val": "calib", "valid": "calib", "validation": "calib", "dev": "calib"}
    of_row = np.array([aliases.get(split, split) for split in splits])
    strange = sorted(set(of_row.tolist()) - {"train", "calib", "test"})
    if strange:
        raise ValueError(f"the splits of {path} must be train, calib or test, got {strange[:5]}")
    parts = {str(split): samples.take(np.flatnonzero(of_row == split)) for split in np.unique(of_row)}
    return complete(f"table:{path}", parts, names, split_seed)


def _rows(path: Path) -> tuple[list[str], list[Any], list[str] | None]:
    """The rows of one table, or of the tables in a folder, each of which is named after its split."""
    if path.is_file():
        return readers.read_table(path)
    files = sorted(file for file in path.iterdir() if file.suffix in (".csv", ".parquet"))
    if not files:
        raise FileNotFoundError(f"{path} must hold .csv or .parquet files named after their splits, got none")
    texts: list[str] = []
    labels: list[Any] = []
    splits: list[str] = []
    for file in files:
        more_texts, more_labels, _ = readers.read_table(file)
        texts += more_texts
        labels += more_labels
        splits += [file.stem] * len(more_texts)
    return texts, labels, splits
