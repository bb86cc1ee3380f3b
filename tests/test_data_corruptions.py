"""Corruptions against slow references: moments for noise, scipy for blurs, colorsys for colours, Pillow."""

import colorsys
import io
import math
from functools import partial

import numpy as np
import pytest
import torch

from doublehead.data import corruptions
from doublehead.data.corruptions import FAMILIES, SEVERITIES, corrupt, read_cifar10c
from samples import refused

ndimage = pytest.importorskip("scipy.ndimage")
pillow = pytest.importorskip("PIL.Image")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n=3, size=32):
    """Smooth colour pictures with some contrast, in 0..1, whole grey levels."""
    noise = np.random.default_rng(5).random((n, 3, size, size))
    smooth = ndimage.gaussian_filter(noise, (0, 0, 2, 2), mode="wrap")
    low, high = smooth.min((1, 2, 3), keepdims=True), smooth.max((1, 2, 3), keepdims=True)
    return torch.from_numpy(np.round((smooth - low) / (high - low) * 255) / 255)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("severity", [1, 5])
def test_every_family_keeps_shape_range_and_input(family, severity):
    clean = pictures()
    kept = clean.clone()
    out = corrupt(clean, family, severity, generator())
    assert out.shape == clean.shape
    assert out.min() >= 0
    assert out.max() <= 1
    assert torch.equal(clean, kept)
    assert (out - clean).abs().mean() > 1e-3
    assert torch.equal(out, corrupt(clean, family, severity, generator()))


# The published constants, and the variance that they give to a pixel of level x.
NOISES = {
    "gaussian_noise": ([0.04, 0.06, 0.08, 0.09, 0.10], lambda x, sigma: sigma**2),
    "shot_noise": ([500, 250, 100, 75, 50], lambda x, photons: x / photons),  # Poisson
    "speckle_noise": ([0.06, 0.1, 0.12, 0.16, 0.2], lambda x, sigma: (sigma * x) ** 2),
    # 0 or 1 instead of the pixel, each with half of the probability
    "impulse_noise": ([0.01, 0.02, 0.03, 0.05, 0.07], lambda x, p: p / 2 * (x**2 + (1 - x) ** 2)),
}


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("family", NOISES)
def test_moments_of_noise(family, severity):
    constants, variance = NOISES[family]
    for level in (0.4, 0.5):
        out = corrupt(torch.full((160, 3, 32, 32), level).double(), family, severity, generator())
        wanted = variance(level, constants[severity - 1])
        assert (out - level).square().mean().item() == pytest.approx(wanted, rel=0.1)
        bias = constants[severity - 1] * (0.5 - level) if family == "impulse_noise" else 0.0
        assert out.mean().item() == pytest.approx(level + bias, abs=2e-3)
    if family == "impulse_noise":
        assert ((out == level) | (out == 0) | (out == 1)).all()
    if family == "shot_noise":
        counts = out * constants[severity - 1]
        torch.testing.assert_close(counts, counts.round(), atol=1e-9, rtol=0)


def published_disk(radius, alias_blur):
    """The 17 x 17 disk of the published description, blurred by a 3 x 3 Gaussian."""
    place = np.arange(-8, 9)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).astype(float)
    weights = np.exp(-np.array([1, 0, 1]) / (2 * alias_blur**2))
    kernel = np.outer(weights, weights) / weights.sum() ** 2
    return ndimage.convolve(disk / disk.sum(), kernel, mode="constant")


def defocused(images, radius, alias_blur):
    kernel = published_disk(radius, alias_blur)
    return np.stack([[ndimage.convolve(c, kernel, mode="mirror") for c in image] for image in images])


def blurred(images, sigma):
    return ndimage.gaussian_filter(images, (0, 0, sigma, sigma), mode="nearest", truncate=4)


def through_hsv(images, change):
    out = np.empty_like(images)
    for n, r, c in np.ndindex(images.shape[0], *images.shape[2:]):
        out[n, :, r, c] = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*images[n, :, r, c])))
    return out


def clip(value):
    return min(max(value, 0.0), 1.0)


def brightened(images, shift):
    return through_hsv(images, lambda h, s, v: (h, s, clip(v + shift)))


def saturated(images, factor, shift):
    return through_hsv(images, lambda h, s, v: (h, clip(s * factor + shift), v))


def colourful():
    images = pictures(2, 16)
    images[0, :, 0, :4] = 0.0  # black
    images[0, :, 1, :4] = 1.0  # white
    images[0, :, 2, :4] = 0.5  # grey
    images[0, 0, 3, :4] = 1.0
    return images


REFERENCES = {  # by scipy, or through colorsys; the constants as published
    "gaussian_blur": (blurred, [(0.4,), (0.6,), (0.7,), (0.8,), (1.0,)]),
    "defocus_blur": (defocused, SEVERITIES["defocus_blur"][1]),
    "brightness": (brightened, [(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)]),
    "saturate": (saturated, [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)]),
}


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("family", REFERENCES)
def test_against_a_slow_reference(family, severity):
    reference, constants = REFERENCES[family]
    clean = pictures() if "blur" in family else colourful()
    expected = reference(clean.numpy(), *constants[severity - 1])
    np.testing.assert_allclose(corrupt(clean, family, severity, generator()).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("degrees", [-45, -20, 0, 33, 45])
def test_motion_blur_follows_the_angle(degrees, monkeypatch):
    draw = torch.full((1, 1), degrees / 90 + 0.5, dtype=torch.float64)
    monkeypatch.setattr(corruptions, "_rand", lambda *_: draw)
    clean = pictures(1)
    out = corrupt(clean, "motion_blur", 4, generator())[0].numpy()
    radius, sigma = 8, 2
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    expected = np.zeros((3, 32, 32))
    for r in range(32):
        for c in range(32):
            for i, weight in enumerate(weights):
                row = r + math.ceil(i * math.sin(math.radians(degrees)) - 0.5)
                column = c + math.ceil(i * math.cos(math.radians(degrees)) - 0.5)
                source = clean[0, :, min(max(row, 0), 31), min(max(column, 0), 31)].numpy()
                expected[:, r, c] += weight / sum(weights) * source
    np.testing.assert_allclose(out, expected, atol=1e-9)


def test_contrast_by_hand():
    image = torch.tensor([0.0, 1.0, 1.0, 0.0]).view(1, 1, 2, 2)
    out = corrupt(image, "contrast", 5, generator()).flatten().tolist()
    assert out == pytest.approx([0.425, 0.575, 0.575, 0.425])  # 0.5 -+ 0.15 * 0.5


def as_bytes(images):
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def compressed(image, quality):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return pillow.open(buffer)


def pixelated(image, factor):
    small = int(32 * factor)
    return image.resize((small, small), pillow.Resampling.BOX).resize((32, 32), pillow.Resampling.BOX)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("family", "reference", "constants"),
    [
        ("jpeg_compression", compressed, (80, 65, 58, 50, 40)),
        ("pixelate", pixelated, (0.95, 0.9, 0.85, 0.75, 0.65)),
    ],
)
def test_against_pillow(family, reference, constants, severity):
    clean = pictures(2)
    for before, after in zip(as_bytes(clean), as_bytes(corrupt(clean, family, severity, generator()))):
        assert (np.asarray(reference(pillow.fromarray(before), constants[severity - 1])) == after).all()


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_elastic_transform_is_scipys(severity, monkeypatch):
    drawn = []
    draw = corruptions._rand
    monkeypatch.setattr(corruptions, "_rand", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    clean = pictures(2)
    out = corrupt(clean, "elastic_transform", severity, generator()).numpy()
    alpha, sigma, jitter = (32 * c for c in SEVERITIES["elastic_transform"][1][severity - 1])
    y, x = np.mgrid[:32, :32]
    before = np.array([[26, 26, 1], [26, 6, 1], [6, 6, 1]], float)
    for n, image in enumerate(clean.numpy()):
        after = before[:, :2] + (2 * drawn[0][n].numpy() - 1) * jitter
        forward = np.linalg.solve(before, after).T  # (2, 3): maps old points to new ones
        linear, shift = forward[:, :2], forward[:, 2]
        source = np.linalg.inv(linear) @ (np.stack([x.ravel(), y.ravel()]) - shift[:, None])
        places = source[::-1].reshape(2, 32, 32)
        moved = [ndimage.map_coordinates(c, places, order=1, mode="mirror") for c in image]
        if alpha:
            smooth = partial(ndimage.gaussian_filter, sigma=sigma, mode="reflect", truncate=3)
            across, down = (smooth(2 * d[n] - 1) * alpha for d in drawn[1].numpy())
            places = [y + down, x + across]
            moved = [ndimage.map_coordinates(c, places, order=1, mode="reflect") for c in moved]
        np.testing.assert_allclose(out[n], np.clip(moved, 0, 1), atol=1e-6)


def test_bad_arguments_are_named():
    images = torch.zeros(1, 3, 8, 8)
    for given, message in (
        ((images, "fog", 1), "family must be one of gaussian_noise, .* got 'fog'"),
        ((images, "contrast", 6), "severity must be 1, 2, 3, 4 or 5, got 6"),
        ((images[:, :1], "saturate", 1), "3 channels for saturate, got 1"),
        ((images.byte(), "contrast", 1), r"images must be floating \(N, C, H, W\), got torch.uint8"),
    ):
        refused(message, corrupt, *given, generator())


def test_official_files(tmp_path):
    stacked = np.lib.format.open_memmap(tmp_path / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
    stacked[30_000:40_000:1000] = 7  # sparse: the file takes no space on disk where it is zero
    stacked.flush()
    np.save(tmp_path / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    read = read_cifar10c(tmp_path, "fog", 4)
    assert len(read) == 10_000
    assert (read.images[::1000] == 7).all()
    assert read.images.sum() == 10 * 7 * 32 * 32 * 3
    assert read.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_official_files_that_are_missing_or_damaged(tmp_path):
    refused("snow.npy is missing", read_cifar10c, tmp_path, "snow", 1, error=FileNotFoundError)
    (tmp_path / "snow.npy").write_bytes(b"\x93NUMPY not really")
    refused("snow.npy", read_cifar10c, tmp_path, "snow", 1)
    np.save(tmp_path / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"snow.npy must hold .* of shape \(50000, 32, 32, 3\), got \(10,"):
        read_cifar10c(tmp_path, "snow", 1)
