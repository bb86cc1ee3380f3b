"""Classifiers that were calibrated only after all settings of the staged head had been fixed.

    python experiments/blind.py ROOT   # trains them on public data sets in ROOT and stores their logits

They are of other kinds than the networks of experiments/logits: networks on words and on tables, boosted trees and
random forests (scikit-learn's), and a published VGG-16. ROOT holds the files named in `LOADERS` as their authors
published them. experiments/blind/<name>.npz holds quantised logits of the calibration and the test part; it is not
committed, since the labels belong to the data sets.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from results import HERE, Split, pack, read_split, write_npz
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from doublehead.data.readers import ArraysOnly

FOLDER = HERE / "blind"
FLOOR = 1e-7  # of probabilities, where a forest says 0
Rows = Any  # what a scikit-learn model reads


class Parts(NamedTuple):
    """Inputs and labels of the training, calibration and test part."""

    train: tuple[Rows, np.ndarray[Any, Any]]
    calib: tuple[Rows, np.ndarray[Any, Any]]
    test: tuple[Rows, np.ndarray[Any, Any]]


def cut(x: Rows, y: Any, *sizes: int) -> list[tuple[Rows, np.ndarray[Any, Any]]]:
    """Random parts of these sizes, and the rest."""
    y = np.unique(np.asarray(y), return_inverse=True)[1]
    parts = np.split(np.random.default_rng(0).permutation(len(y)), np.cumsum(sizes))
    return [(x[at], y[at]) for at in parts]


def words(train: Any, *others: Any) -> list[Any]:
    """Counts of words and pairs of words."""
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), max_features=20_000, sublinear_tf=True).fit(train)
    return [vectorizer.transform(texts).astype(np.float32) for texts in (train, *others)]


def clinc(root: Path) -> Parts:
    found = json.loads((root / "clinc150.json").read_text())
    parts = [found[name] for name in ("train", "val", "test")]
    classes = sorted({label for _, label in found["train"]})
    inputs = words(*([text for text, _ in part] for part in parts))
    return Parts(*((x, np.array([classes.index(label) for _, label in p])) for x, p in zip(inputs, parts)))


def emoji(root: Path) -> Parts:
    """The test tweets are of another time than the training tweets, so they calibrate too."""
    texts, labels = (
        [(root / "emoji" / f"{part}_{what}.txt").read_text().splitlines() for part in ("train", "test")]
        for what in ("text", "labels")
    )
    train, test = words(*texts)
    calib, rest = cut(test, [int(label) for label in labels[1]], 5000)
    return Parts(
        (train, np.array([int(label) for label in labels[0]])), calib, (rest[0][:20_000], rest[1][:20_000])
    )


def ag_news(root: Path) -> Parts:
    with (root / "ag_news.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    parts = cut(np.array([f"{row[1]} {row[2]}" for row in rows]), [row[0] for row in rows], 3000, 2000)
    return Parts(*((x, part[1]) for x, part in zip(words(*(part[0] for part in parts)), parts)))


def adult(root: Path) -> Parts:
    tables = []
    for name in ("adult-train.csv", "adult-test.csv"):
        lines = [line for line in (root / name).read_text().splitlines() if line.count(",") == 14]
        tables.append(
            np.array([[cell.strip(" .") for cell in line.split(",")] for line in lines], dtype=object)
        )
    numbers = [0, 2, 4, 10, 11, 12]
    rest = [column for column in range(14) if column not in numbers]
    made = make_column_transformer(
        (StandardScaler(), numbers), (OneHotEncoder(handle_unknown="ignore", sparse_output=False), rest)
    )
    inputs = [made.fit_transform(tables[0][:, :14]), made.transform(tables[1][:, :14])]
    labels = [(table[:, 14] == ">50K").astype(int) for table in tables]
    return Parts((inputs[0], labels[0]), *cut(inputs[1], labels[1], 5000))


def letter(root: Path) -> Parts:
    lines = (root / "letter.arff").read_text().splitlines()
    rows = [line.split(",") for line in lines if line.count(",") == 16 and line[0].isdigit()]
    inputs = np.array([[float(cell) for cell in row[:16]] for row in rows])
    return Parts(*cut((inputs - inputs.mean(0)) / inputs.std(0), [row[16] for row in rows], 10_000, 5000))


def wine(root: Path) -> Parts:
    table = np.loadtxt(root / "winequality-white.csv", delimiter=",")
    table = table[(table[:, -1] >= 4) & (table[:, -1] <= 8)]  # few have other grades
    return Parts(*cut(table[:, :-1], table[:, -1], 2000, 1000))


def vgg(root: Path) -> Parts:
    """Published test probabilities of a VGG-16 on CIFAR-10 (Kumar et al. 2019)."""
    with (root / "cifar10_vgg.dat").open("rb") as file:
        probs, labels = ArraysOnly(file).load()
    calib, test = cut(probs, np.asarray(labels).reshape(-1), 5000)
    return Parts((None, np.zeros(0)), calib, test)


def network(epochs: int) -> MLPClassifier:
    """One hidden layer, trained until it is overconfident."""
    return MLPClassifier((256,), max_iter=epochs, alpha=1e-5, random_state=0)


LOADERS: dict[str, tuple[Callable[[Path], Parts], Any]] = {
    "cifar10-vgg16": (vgg, None),
    "clinc150-words": (clinc, network(15)),
    "emoji-words": (emoji, network(4)),
    "ag_news-words": (ag_news, network(15)),
    "adult-network": (adult, network(40)),
    "adult-boosting": (adult, HistGradientBoostingClassifier(max_iter=400, random_state=0)),
    "letter-network": (letter, network(60)),
    "letter-forest": (letter, RandomForestClassifier(100, random_state=0)),
    "wine-forest": (wine, RandomForestClassifier(100, random_state=0)),
}


def load(name: str) -> tuple[Split, Split]:
    """The calibration and the test part."""
    file = FOLDER / f"{name}.npz"
    return read_split(file, "calib"), read_split(file, "test")


def train(name: str, root: Path) -> None:
    """Train a classifier and store its logits."""
    loader, model = LOADERS[name]
    parts = loader(root)
    if model is not None:
        model.fit(*parts.train)
    splits = []
    for x, labels in (parts.calib, parts.test):
        probs = x if model is None else model.predict_proba(x)
        logits = torch.from_numpy(np.log(np.clip(probs, FLOOR, None)))
        splits.append(Split(torch.from_numpy(labels), logits))
    write_npz(FOLDER / f"{name}.npz", pack(*splits))
    print(name, *splits[1].main.shape, len(parts.train[1]), len(splits[0].labels), flush=True)


if __name__ == "__main__":
    for name in LOADERS:
        train(name, Path(sys.argv[1]))
