"""The shipped Fashion-MNIST subset: real, whole, disjoint, small."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from doublehead.data import fashion
from doublehead.data.fashion import ASSET, decode_images, encode_images, fashion_subset

ASSETS = Path(fashion.__file__).parent / "assets"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist


@pytest.fixture(scope="module")
def splits():
    return fashion_subset()


def test_sizes_and_balance(splits):
    assert splits.sizes == (8_500, 2_500, 6_000)
    for part in (splits.train, splits.calib, splits.test):
        counts = np.bincount(part.labels)
        assert counts.tolist() == [len(part) // 10] * 10
        assert part.images.dtype == np.uint8
        assert part.images.shape[1:] == (28, 28, 1)
    assert splits.n_classes == 10


def test_asset_is_small_and_carries_its_licence():
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) < 6_000_000
    assert "Copyright (c) 2017 Zalando SE" in (ASSETS / "LICENSE-fashion-mnist.txt").read_text()


def test_no_original_image_is_drawn_twice():
    with np.load(ASSETS / ASSET) as arrays:
        rows = arrays["rows"]
    assert len(np.unique(rows[:11_000])) == 11_000  # train and calib, from the training images
    assert len(np.unique(rows[11_000:])) == 6_000


def test_order_is_not_by_class(splits):
    assert all(len(np.unique(part.labels[:100])) == 10 for part in (splits.train, splits.calib, splits.test))


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_images_are_the_originals(splits):
    with np.load(ASSETS / ASSET) as arrays:
        rows = np.split(arrays["rows"], [8_500, 11_000])
    for part, drawn, half in zip((splits.train, splits.calib, splits.test), rows, ("train", "train", "t10k")):
        pixels = gzip.decompress((DEBIAN / f"{half}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((DEBIAN / f"{half}-labels-idx1-ubyte.gz").read_bytes())[8:]
        images = np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1)
        assert (images[drawn] == part.images).all()
        assert (np.frombuffer(labels, np.uint8)[drawn] == part.labels).all()


def test_coding_keeps_any_image():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (5, 28, 28)).astype(np.uint8)
    images[1] = 0
    images[2] = 255
    images[3, :14] = 0
    assert (decode_images(*encode_images(images), n=5) == images).all()


def test_a_damaged_asset_is_named(monkeypatch):
    decode = fashion.decode_images

    def flip_a_pixel(*args):
        images = decode(*args)
        images[0, 14, 14] ^= 1
        return images

    monkeypatch.setattr(fashion, "decode_images", flip_a_pixel)
    with pytest.raises(ValueError, match=r"fashion_mnist_subset.npz is damaged"):
        fashion_subset()
