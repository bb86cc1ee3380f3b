"""Splits: published sizes, no shared rows, stratification, frozen draws; split_off on torch datasets."""

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from doublehead.data import Images, Splits, Texts, split_off
from doublehead.data.readers import complete
from doublehead.data.splits import count_duplicates, split_rows, split_samples, stratified_draw
from doublehead.system import require
from samples import refused


def texts(labels):
    return Texts(tuple(f"text {i}" for i in range(len(labels))), np.asarray(labels, np.int64))


@pytest.mark.parametrize(
    ("n", "n_classes", "n_drawn"), [(50_000, 10, 5_000), (50_000, 100, 5_000), (73_257, 10, 13_257)]
)
def test_split_rows_are_disjoint_complete_and_stratified(n, n_classes, n_drawn):
    labels = np.random.default_rng(0).integers(0, n_classes, n)
    rest, drawn = split_rows(labels, n_drawn)
    assert (len(rest), len(drawn)) == (n - n_drawn, n_drawn)
    assert np.array_equal(np.sort(np.concatenate([rest, drawn])), np.arange(n))
    share = np.bincount(labels) * n_drawn / n
    assert np.abs(np.bincount(labels[drawn]) - share).max() < 1


def test_draw_by_largest_remainder():
    labels = np.array([0] * 5 + [1] * 3 + [2] * 2)  # shares of 4 draws: 2.0, 1.2, 0.8 -> 2, 1, 1
    drawn = stratified_draw(labels, 4, seed=3)
    assert np.bincount(labels[drawn]).tolist() == [2, 1, 1]
    assert len(set(drawn.tolist())) == 4
    assert stratified_draw(labels, 0).tolist() == []
    assert sorted(stratified_draw(labels, 10).tolist()) == list(range(10))
    refused(r"n must lie in 0..10, got 11", stratified_draw, labels, 11)


def test_draw_is_frozen():
    """The published split of CIFAR-10: 500 of each class, in an order of labels that anyone can make."""
    rows = stratified_draw(np.arange(50_000) % 10, 5_000)
    digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    assert digest == FROZEN


FROZEN = "86efdcbc562a9dda49fa63b9c01e11b850788aa5521c555eb6624ff1ed2cd92a"


def test_split_samples_keep_their_labels():
    samples = texts(np.arange(40) % 4)
    rest, drawn = split_samples(samples, 8)
    for part in (rest, drawn):
        assert all(int(text.split()[1]) % 4 == label for text, label in zip(part.texts, part.labels))
    assert len(set(rest.texts) | set(drawn.texts)) == 40


def test_missing_splits_are_split_off_train():
    splits = complete("mine", {"train": texts(np.arange(100) % 2)}, ["no", "yes"])
    assert splits.sizes == (72, 8, 20)  # a fifth for test, a tenth of the rest for calib
    everything = {text for part in (splits.train, splits.calib, splits.test) for text in part.texts}
    assert len(everything) == 100
    own = complete("mine", {"train": texts([0, 1] * 10), "test": texts([0, 1])}, ["no", "yes"])
    assert own.sizes == (18, 2, 2)
    refused(r"mine must .* \['test'\]", complete, "mine", {"test": texts([0])}, ["no"])
    refused("calib is empty", complete, "mine", {"train": texts([0, 1]), "test": texts([0])}, ["no", "yes"])


def test_duplicates_are_counted():
    pixels = ([0, 0, 0], [1, 1], [9, 1, 1, 1])  # one image each
    parts = [Images(np.array(p, np.uint8).reshape(-1, 1, 1, 1), np.zeros(len(p), np.int64)) for p in pixels]
    found = count_duplicates(Splits("toy", *parts, ("one",)))
    assert found == {("train", "calib"): 0, ("train", "test"): 0, ("calib", "test"): 3}


def test_bad_samples_are_named():
    for kind, given, message in (
        (Images, (np.zeros((2, 3, 3)), np.zeros(2, int)), r"images must be uint8 .* \(N, H, W, C\)"),
        (Images, (np.zeros((2, 3, 3, 1), "u1"), np.zeros(3, int)), "labels of 2 images must be int64"),
        (Texts, (("a",), np.zeros(1, np.int32)), r"labels of 1 texts must be int64 .* got int32"),
        (Splits, ("a", texts([0]), texts([3]), texts([0]), "ab"), "a calib must lie in 0..1, got 3..3"),
    ):
        refused(message, kind, *given)


def rows_of(*parts):
    return [list(part.indices) for part in parts]


@pytest.mark.parametrize("share_or_n", [0.2, 10])
def test_split_off_is_disjoint_stratified_and_follows_the_seed(share_or_n):
    data = TensorDataset(torch.arange(50), torch.arange(50) % 5)
    train, calib = split_off(data, share_or_n)
    assert sorted(rows_of(train)[0] + rows_of(calib)[0]) == list(range(50))
    assert torch.stack([y for _, y in calib]).bincount().tolist() == [2] * 5
    assert rows_of(train, calib) == rows_of(*split_off(data, share_or_n))
    assert rows_of(calib) != rows_of(split_off(data, share_or_n, seed=1)[1])


class Unlabelled(Dataset):
    """A dataset without labels or transform of its own."""

    def __len__(self):
        return 30

    def __getitem__(self, i):
        raise AssertionError("split_off must not load samples")


def test_split_off_takes_labels_and_does_without():
    _, calib = split_off(Unlabelled(), 6, labels=[0, 0, 0, 0, 1] * 6)
    assert sum(row % 5 == 4 for row in calib.indices) == 1
    train, calib = split_off(Unlabelled(), 0.1)
    assert (len(train), len(calib)) == (27, 3)
    inner = Subset(TensorDataset(torch.arange(50), torch.arange(50) % 5), range(0, 50, 5))  # class 0 only
    assert len(split_off(Subset(inner, range(8)), 3)[1]) == 3


def test_split_off_of_images_in_folders(tmp_path):
    """calib is read without the augmentation of train; each split gets its share of every class."""
    pillow = pytest.importorskip("PIL.Image")
    datasets = require("torchvision.datasets", extra="data")
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for i in range(10 + 10 * label):
            pillow.new("RGB", (2, 2), (label, i, 0)).save(tmp_path / name / f"{i}.png")
    data = datasets.ImageFolder(str(tmp_path), transform=lambda image: ("augmented", image.getpixel((0, 0))))
    train, calib = split_off(data, 0.2, transform=lambda image: ("plain", image.getpixel((0, 0))))
    assert np.bincount([label for _, label in calib]).tolist() == [2, 4]
    assert {kind for (kind, _), _ in train} == {"augmented"}
    assert {kind for (kind, _), _ in calib} == {"plain"}
    pixels = [pixel for part in (train, calib) for (_, pixel), _ in part]
    assert len(set(pixels)) == 30
    assert all(pixel[0] == label for part in (train, calib) for (_, pixel), label in part)
    assert split_off(data, 0.2)[1][0][0][0] == "augmented"  # without a transform the dataset's own is kept
    nested = split_off(train, 6, transform=lambda image: "plain")[1]
    assert {kind for kind, _ in nested} == {"plain"}
    assert {kind for (kind, _), _ in train} == {"augmented"}


def test_split_off_replaces_both_transforms_of_torchvision():
    datasets = require("torchvision.datasets", extra="data")
    transforms = {"transform": lambda image: 1, "target_transform": lambda label: -label}
    data = datasets.FakeData(20, (3, 4, 4), 2, **transforms)
    train, calib = split_off(data, 5, transform=lambda image: 2)
    assert [image for image, _ in calib] == [2] * 5
    assert calib.dataset.transforms("image", 1) == (2, -1)
    assert [image for image, _ in train] == [1] * 15
    assert train.dataset.transforms("image", 1) == (1, -1)


@pytest.mark.parametrize("share_or_n", [0.0, 1.0, 0, 30, -1, 0.001, True, 1.5])
def test_split_off_needs_samples_in_both_parts(share_or_n):
    refused(f"share_or_n must .* 30 samples, got {share_or_n}", split_off, Unlabelled(), share_or_n)


def test_split_off_names_what_it_cannot_use():
    refused(r"labels must have shape \(30,\) .* got \(3,\)", split_off, Unlabelled(), 6, labels=[0, 1, 2])
    joint = Unlabelled()
    joint.transform, joint.transforms = None, lambda image, label: (image, label)  # one transform of both
    for data in (Unlabelled(), joint):
        with pytest.raises(TypeError, match="transform .* got Unlabelled"):
            split_off(data, 6, transform=lambda image: image)
