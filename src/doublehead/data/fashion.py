"""The subset of Fashion-MNIST included in the package: real images for the demo in 5.8 MB, without a download.

Fashion-MNIST (c) 2017 Zalando SE, MIT licence; its text is next to the asset. Compression is lossless: one bit per
pixel tells whether it is 0, and each other pixel is stored as its difference from a prediction by its left and upper
neighbours. Both streams are LZMA-compressed. That is a fifth smaller than the original gzip files, and decoding needs
only numpy and the standard library.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doublehead.data.splits import Images, Splits, stratified_draw

Array = npt.NDArray[Any]

ASSET = "fashion_mnist_subset.npz"
SIZES = {"train": 8_500, "calib": 2_500, "test": 6_000}
SEED = 2017  # the drawn rows are also stored in the asset, as `rows`
CLASS_NAMES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def fashion_subset() -> Splits:
    """The included subset of Fashion-MNIST: 8,500 / 2,500 / 6,000 images of 28 x 28 x 1, ten equally frequent classes.

    train and calib come from the original training images, test from the original test images. The order within each
    split is random. Decoding takes about half a second.

    >>> splits = fashion_subset()
    >>> len(splits.train), len(splits.calib), len(splits.test), splits.train.images.shape[1:]
    (8500, 2500, 6000, (28, 28, 1))
    """
    asset = resources.files("doublehead.data") / "assets" / ASSET
    with np.load(io.BytesIO(asset.read_bytes()), allow_pickle=False) as arrays:
        images = decode_images(arrays["mask"].tobytes(), arrays["residuals"].tobytes(), sum(SIZES.values()))
        labels = arrays["labels"].astype(np.int64)
        digest = arrays["sha256"].tobytes()
    if hashlib.sha256(images.tobytes() + labels.tobytes()).digest() != digest:
        raise ValueError(f"{ASSET} in the package is damaged (wrong checksum): reinstall doublehead")
    ends = np.cumsum(list(SIZES.values()))[:-1]
    parts = zip(np.split(images[..., None], ends), np.split(labels, ends))
    train, calib, test = (Images(i, y) for i, y in parts)
    return Splits("fashion", train, calib, test, CLASS_NAMES)


def make_fashion_subset(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Draw the subset from the four original `*-ubyte.gz` files in `folder` and write the asset to `path`.

    The included file was made by this function.
    """
    source = {
        half: (_read_idx(folder, f"{half}-images-idx3"), _read_idx(folder, f"{half}-labels-idx1"))
        for half in ("train", "t10k")
    }
    drawn = stratified_draw(source["train"][1], SIZES["train"] + SIZES["calib"], SEED)
    in_calib = stratified_draw(source["train"][1][drawn], SIZES["calib"], SEED)
    rows = {
        "train": np.delete(drawn, in_calib),
        "calib": drawn[in_calib],
        "test": stratified_draw(source["t10k"][1], SIZES["test"], SEED),
    }
    halves = {"train": "train", "calib": "train", "test": "t10k"}
    images = np.concatenate([source[halves[s]][0][r] for s, r in rows.items()])
    labels = np.concatenate([source[halves[s]][1][r] for s, r in rows.items()])
    mask, residuals = encode_images(images)
    digest = hashlib.sha256(images.tobytes() + labels.astype(np.int64).tobytes()).digest()
    np.savez(
        path,
        mask=np.frombuffer(mask, np.uint8),
        residuals=np.frombuffer(residuals, np.uint8),
        labels=labels,
        rows=np.concatenate(list(rows.values())).astype(np.uint16),
        sha256=np.frombuffer(digest, np.uint8),
    )


def encode_images(images: Array) -> tuple[bytes, bytes]:
    """uint8 images (N, H, W) -> the compressed mask and residuals that `decode_images` reads."""
    padded = np.pad(images.astype(np.int16), ((0, 0), (1, 0), (1, 0)))
    predicted = _predict(padded[:, 1:, :-1], padded[:, :-1, 1:], padded[:, :-1, :-1])
    mask = images > 0
    residuals = (images - predicted).astype(np.uint8)[mask]  # modulo 256
    return _pack(np.packbits(mask).tobytes()), _pack(residuals.tobytes())


def decode_images(mask: bytes, residuals: bytes, n: int, side: int = 28) -> Array:
    """(n, side, side) uint8 images from the two compressed streams, pixel by pixel for all images at once."""
    bits = np.frombuffer(lzma.decompress(mask), np.uint8)
    is_set: Array = np.unpackbits(bits, count=n * side * side).reshape(n, side, side).astype(bool)
    difference: Array = np.zeros(is_set.shape, np.uint8)
    difference[is_set] = np.frombuffer(lzma.decompress(residuals), np.uint8)
    # (side, side, n), so that each step reads contiguous memory
    is_set, difference = (np.ascontiguousarray(a.transpose(1, 2, 0)) for a in (is_set, difference))
    padded = np.zeros((side + 1, side + 1, n), np.int16)
    for row in range(side):
        for column in range(side):
            left, up, corner = padded[row + 1, column], padded[row, column + 1], padded[row, column]
            value = (_predict(left, up, corner) + difference[row, column]) & 255
            padded[row + 1, column + 1] = value * is_set[row, column]
    return np.ascontiguousarray(padded[1:, 1:].transpose(2, 0, 1)).astype(np.uint8)


def _predict(left: Array, up: Array, corner: Array) -> Array:
    """The median of left, up and left + up - corner: the edge detector of JPEG-LS."""
    low, high = np.minimum(left, up), np.maximum(left, up)
    clipped: Array = np.clip(left + up - corner, low, high)
    return clipped


def _pack(data: bytes) -> bytes:
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


def _read_idx(folder: str | os.PathLike[str], name: str) -> Array:
    """One of the original files: a big-endian header (magic, sizes) and the bytes."""
    content = gzip.decompress((Path(folder) / f"{name}-ubyte.gz").read_bytes())
    n_axes = content[3]
    shape = np.frombuffer(content, ">i4", n_axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * n_axes).reshape(shape)
