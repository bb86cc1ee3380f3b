"""Splits: sizes as published, no row in two splits, each class in its share, the same draw for ever."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from doublehead.data import DATASETS, load
from doublehead.data.class_names import OF
from doublehead.data.own import complete
from doublehead.data.splits import (
    Images,
    Splits,
    Texts,
    carve,
    carve_rows,
    check_disjoint,
    count_duplicates,
    stratified_draw,
)

PAPER = {  # train, calib, test
    "cifar10": (45_000, 5_000, 10_000),
    "cifar100": (45_000, 5_000, 10_000),
    "svhn": (60_000, 13_257, 26_032),
    "imagenet": (1_281_167, 25_000, 25_000),
    "sst-fine": (8_544, 1_101, 2_210),
    "sst-binary": (6_920, 872, 1_821),
    "20newsgroups": (15_098, 900, 3_999),
}


def texts(labels):
    return Texts(tuple(f"text {i}" for i in range(len(labels))), np.asarray(labels, np.int64))


@pytest.mark.parametrize("name", PAPER)
def test_sizes_of_the_paper(name):
    assert DATASETS[name].sizes == PAPER[name]


@pytest.mark.parametrize("name", OF)
def test_as_many_names_as_classes(name):
    assert len(set(OF[name])) == DATASETS[name].n_classes


@pytest.mark.parametrize(
    ("n", "n_classes", "n_carved"), [(50_000, 10, 5_000), (50_000, 100, 5_000), (73_257, 10, 13_257)]
)
def test_carved_rows_share_nothing_and_miss_nothing(n, n_classes, n_carved):
    labels = np.random.default_rng(0).integers(0, n_classes, n)
    rest, carved = carve_rows(labels, n_carved)
    check_disjoint(train=rest, calib=carved)
    assert (len(rest), len(carved)) == (n - n_carved, n_carved)
    assert np.array_equal(np.sort(np.concatenate([rest, carved])), np.arange(n))
    share = np.bincount(labels) * n_carved / n
    assert np.abs(np.bincount(labels[carved]) - share).max() < 1


def test_draw_by_largest_remainder():
    labels = np.array([0] * 5 + [1] * 3 + [2] * 2)  # shares of 4 draws: 2.0, 1.2, 0.8 -> 2, 1, 1
    drawn = stratified_draw(labels, 4, seed=3)
    assert np.bincount(labels[drawn]).tolist() == [2, 1, 1]
    assert len(set(drawn.tolist())) == 4


def test_draw_is_frozen():
    """The published split of CIFAR-10: 500 of each class, in an order of labels that anyone can make."""
    rows = stratified_draw(np.arange(50_000) % 10, 5_000)
    digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    assert digest == FROZEN


FROZEN = "86efdcbc562a9dda49fa63b9c01e11b850788aa5521c555eb6624ff1ed2cd92a"


def test_draws_differ_by_seed():
    labels = np.arange(100) % 5
    assert set(stratified_draw(labels, 20, 0).tolist()) != set(stratified_draw(labels, 20, 1).tolist())


def test_draw_none_and_all():
    labels = np.array([0, 1, 1])
    assert stratified_draw(labels, 0).tolist() == []
    assert sorted(stratified_draw(labels, 3).tolist()) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"n must lie in 0..3, got 4"):
        stratified_draw(labels, 4)


def test_overlap_is_named():
    with pytest.raises(ValueError, match=r"got row 7 in both calib and test"):
        check_disjoint(train=np.array([1, 2]), calib=np.array([7]), test=np.array([8, 7]))
    with pytest.raises(ValueError, match=r"got row 2 in both train and train"):
        check_disjoint(train=np.array([2, 2]))


def test_carve_keeps_samples_with_their_labels():
    samples = texts(np.arange(40) % 4)
    rest, carved = carve(samples, 8)
    for part in (rest, carved):
        assert all(int(text.split()[1]) % 4 == label for text, label in zip(part.texts, part.labels))
    assert len(set(rest.texts) | set(carved.texts)) == 40


def test_missing_splits_are_carved_from_train():
    splits = complete("mine", {"train": texts(np.arange(100) % 2)}, ["no", "yes"])
    assert splits.sizes == (72, 8, 20)  # a fifth for test, a tenth of the rest for calib
    everything = {text for part in (splits.train, splits.calib, splits.test) for text in part.texts}
    assert len(everything) == 100
    own = complete("mine", {"train": texts([0, 1] * 10), "test": texts([0, 1])}, ["no", "yes"])
    assert own.sizes == (18, 2, 2)
    with pytest.raises(ValueError, match=r"mine must have training data, got only \['test'\]"):
        complete("mine", {"test": texts([0])}, ["no"])
    with pytest.raises(ValueError, match=r"at least one sample in each split, calib is empty"):
        complete("mine", {"train": texts([0, 1]), "test": texts([0])}, ["no", "yes"])


def test_duplicates_are_counted():
    first, second, third = (
        np.zeros((3, 2, 2, 1), np.uint8),
        np.ones((2, 2, 2, 1), np.uint8),
        np.ones((4, 2, 2, 1), np.uint8),
    )
    third[0] = 9
    parts = [Images(images, np.zeros(len(images), np.int64)) for images in (first, second, third)]
    assert count_duplicates(Splits("toy", *parts, ("one",))) == {
        ("train", "calib"): 0,
        ("train", "test"): 0,
        ("calib", "test"): 3,
    }


def test_first_samples():
    small = load("fashion").first(100, 20, 50)
    assert small.sizes == (100, 20, 50)
    assert small.n_classes == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Images(np.zeros((2, 3, 3)), np.zeros(2, np.int64)),
            r"images must be uint8 of shape \(N, H, W, C\)",
        ),
        (
            lambda: Images(np.zeros((2, 3, 3, 1), np.uint8), np.zeros(3, np.int64)),
            r"labels of 2 images must be int64",
        ),
        (lambda: Texts(("a",), np.zeros(1, np.int32)), r"labels of 1 texts must be int64 .* got int32"),
        (
            lambda: Splits("toy", texts([0]), texts([3]), texts([0]), ("a", "b")),
            r"labels of toy calib must lie in 0..1, got 3..3",
        ),
    ],
)
def test_bad_samples_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_name():
    with pytest.raises(ValueError, match=r"data set must be one of fashion, cifar10, .* got 'mnist'"):
        load("mnist")
