"""The corruptions of CIFAR-10-C that need no extra asset, at severities 1 to 5, on batches and on any device.

Families and constants are those of Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations" (ICLR 2019) for 32 x 32 images. The random draws differ from the official files, the
distributions are the same. Glass and zoom blur, snow, frost, fog and spatter can only be read from the official files.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead.data.readers import naming
from doublehead.data.splits import Images
from doublehead.system import require

Generator: TypeAlias = torch.Generator | None  # None is torch's own of the device
Corruption: TypeAlias = Callable[[Tensor, Any, Generator], Tensor]


def corrupt(images: Tensor, family: str, severity: int, generator: Generator = None) -> Tensor:
    """Corrupt images (N, C, H, W) with pixels in 0..1; returns a new tensor on the same device, in 0..1.

    `generator` must be on the device of the images; None is torch's own. JPEG compression runs on the CPU.

    >>> grey = torch.full((2, 3, 8, 8), 0.5)
    >>> corrupt(grey, "brightness", 5, torch.Generator())[0, 0, 0, 0].item()
    0.800000011920929
    """
    if family not in SEVERITIES:
        raise ValueError(f"family must be one of {', '.join(SEVERITIES)}, got {family!r}")
    _check_severity(severity)
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(f"images must be floating (N, C, H, W), got {images.dtype} {tuple(images.shape)}")
    function, constants = SEVERITIES[family]
    return function(images, constants[severity - 1], generator).clamp(0, 1)


def read_cifar10c(root: str | os.PathLike[str], family: str, severity: int) -> Images:
    """The 10,000 images of one severity from the official files `root/<family>.npy` and `root/labels.npy`."""
    _check_severity(severity)
    arrays = []
    for name, shape in ((f"{family}.npy", (50_000, 32, 32, 3)), ("labels.npy", (50_000,))):
        file = Path(root) / name
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing: unpack CIFAR-10-C.tar (zenodo.org/records/2535967) there"
            )
        with naming(file):
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        if array.shape != shape:
            raise ValueError(f"{file} must hold an array of shape {shape}, got {array.shape}")
        arrays.append(array)
    rows = slice((severity - 1) * 10_000, severity * 10_000)
    return Images(np.array(arrays[0][rows], np.uint8), np.array(arrays[1][rows], np.int64))


def _check_severity(severity: int) -> None:
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}")


def _impulse_noise(x: Tensor, amount: float, generator: Generator) -> Tensor:
    """Set each channel of each pixel to 0 or 1, with probability `amount` / 2 each."""
    draw = _rand(x.shape, x, generator)
    return torch.where(draw < amount, (draw < amount / 2).to(x.dtype), x)


def _gaussian_blur(x: Tensor, sigma: float, _: object) -> Tensor:
    rows, columns = (blur_matrix(size, sigma, truncate=4, border="nearest").to(x) for size in x.shape[2:])
    return rows @ x @ columns.T


def _defocus_blur(x: Tensor, constants: tuple[float, float], _: object) -> Tensor:
    kernel = disk_kernel(*constants).to(x)
    margin = kernel.shape[0] // 2
    padded = F.pad(x, (margin,) * 4, mode="reflect").flatten(0, 1)[:, None]
    return F.conv2d(padded, kernel[None, None]).view_as(x)


def _motion_blur(x: Tensor, constants: tuple[int, float], generator: Generator) -> Tensor:
    """A one-sided Gaussian along a direction drawn per image from -45..45 degrees, as in ImageMagick.

    Steps are rounded to whole pixels; the border is repeated.
    """
    radius, sigma = constants
    steps = torch.arange(2 * radius + 1, device=x.device, dtype=x.dtype)
    weights = (-(steps**2) / (2 * sigma**2)).exp()
    weights /= weights.sum()
    angle = (_rand((len(x), 1), x, generator) - 0.5) * (math.pi / 2)  # (N, 1)
    down, across = (torch.ceil(steps * f(angle) - 0.5).long() for f in (torch.sin, torch.cos))  # (N, steps)
    sample = torch.arange(len(x), device=x.device)[:, None, None]
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[2:])
    channels_last, out = x.permute(0, 2, 3, 1), torch.zeros_like(x)
    for i in range(len(steps)):
        row = (rows + down[:, i, None]).clamp(0, len(rows) - 1)[:, :, None]  # (N, H, 1)
        column = (columns + across[:, i, None]).clamp(0, len(columns) - 1)[:, None, :]  # (N, 1, W)
        out += weights[i] * channels_last[sample, row, column].permute(0, 3, 1, 2)
    return out


def _contrast(x: Tensor, factor: float, _: object) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def _brightness(x: Tensor, shift: float, _: object) -> Tensor:
    """Raise V in HSV: all channels grow by the same factor; black becomes grey."""
    value = x.amax(1, keepdim=True)
    factor = (value + shift).clamp(max=1) / value.clamp(min=1e-12)
    return torch.where(value > 0, x * factor, torch.full_like(x, shift))


def _saturate(x: Tensor, constants: tuple[float, float], _: object) -> Tensor:
    """Change S in HSV; grey pixels have hue 0, so they turn red."""
    if x.shape[1] != 3:
        raise ValueError(f"images must have 3 channels for saturate, got {x.shape[1]}")
    value = x.amax(1, keepdim=True)
    distance = value - x  # from the largest channel
    spread = distance.amax(1, keepdim=True)
    saturation = spread / value.clamp(min=1e-12)
    wanted = (saturation * constants[0] + constants[1]).clamp(0, 1)
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device, dtype=x.dtype).view(1, 3, 1, 1)
    direction = torch.where(spread > 0, distance / spread.clamp(min=1e-12), red)
    return value * (1 - wanted * direction)


def _jpeg_compression(x: Tensor, quality: int, _: object) -> Tensor:
    """Encode and decode each image with Pillow, on the CPU; pixels are truncated to grey levels first."""
    pillow = require("PIL.Image", extra="data")
    pixels = (x * 255 + 1e-3).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    out = []
    for image in pixels:
        buffer = io.BytesIO()
        pillow.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(
            buffer, "JPEG", quality=quality
        )
        out.append(np.asarray(pillow.open(buffer)).reshape(image.shape))
    return torch.from_numpy(np.stack(out)).to(x.device).permute(0, 3, 1, 2).to(x.dtype) / 255


def _pixelate(x: Tensor, factor: float, _: object) -> Tensor:
    """Box-filter down to `factor` of the size and up again; rounded after each axis, as in Pillow."""
    height, width = x.shape[2:]
    for sizes in ((int(height * factor), int(width * factor)), (height, width)):
        rows, columns = (box_matrix(old, new).to(x) for old, new in zip(x.shape[2:], sizes))
        x = _round(x @ columns.T)
        x = _round(rows @ x)
    return x


def _round(x: Tensor) -> Tensor:
    """To the nearest grey level, halves up; the small term makes up for float32 rounding of halves."""
    return (x * 255 + 0.5 + 1e-4).floor() / 255


def _elastic_transform(x: Tensor, constants: tuple[float, float, float], generator: Generator) -> Tensor:
    """A random affine map, then a smooth random displacement; constants are relative to the image size."""
    n, _, height, width = x.shape
    size = min(height, width)
    strength, sigma, jitter = (c * size for c in constants)
    moved = sample_at(x, *_affine_sources(x, jitter, generator), border="mirror")
    if strength == 0:
        return moved
    noise = 2 * _rand((2, n, height, width), x, generator) - 1
    rows, columns = (blur_matrix(s, sigma, truncate=3, border="reflect").to(x) for s in (height, width))
    across, down = (rows @ noise @ columns.T) * strength
    row = torch.arange(height, device=x.device, dtype=x.dtype)[:, None] + down
    column = torch.arange(width, device=x.device, dtype=x.dtype) + across
    return sample_at(moved, row, column, border="reflect")


def _affine_sources(x: Tensor, jitter: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Source rows and columns (N, H, W) of the affine map that moves three points by random jitter."""
    n, _, height, width = x.shape
    x0, y0, side = width // 2, height // 2, min(height, width) // 3  # points are (x, y) as in OpenCV
    corners = [(x0 + side, y0 + side), (x0 + side, y0 - side), (x0 - side, y0 - side)]
    before = torch.tensor([[*corner, 1.0] for corner in corners], device=x.device, dtype=x.dtype)  # (3, 3)
    shift = (2 * _rand((n, 3, 2), x, generator) - 1) * jitter
    after = torch.cat([before[:, :2] + shift, before[:, 2:].expand(n, 3, 1)], 2)  # (N, 3, 3), rows are points
    back = torch.linalg.solve(after, before.expand_as(after))  # destination -> source, (N, 3, 3)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1).to(x)  # (H * W, 2)
    source = F.pad(places, (0, 1), value=1)[None] @ back  # (N, H * W, 3)
    column, row, _ = source.view(n, height, width, 3).unbind(-1)
    return row, column


def _randn(x: Tensor, generator: Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def _rand(shape: Sequence[int], like: Tensor, generator: Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, device=like.device, dtype=like.dtype)


def blur_matrix(size: int, sigma: float, truncate: float, border: Literal["nearest", "reflect"]) -> Tensor:
    """(size, size): a Gaussian along one axis, cut at `truncate` standard deviations, with scipy's borders.

    "nearest" repeats the last pixel, "reflect" mirrors the image including it (d c b a | a b c d | d c b a).
    """
    blur = require("scipy.ndimage", extra="data").gaussian_filter1d
    return torch.from_numpy(blur(np.eye(size), sigma, axis=0, mode=border, truncate=truncate))


def box_matrix(old: int, new: int) -> Tensor:
    """(new, old): Pillow's box filter; a new pixel is the mean of the old ones whose centres it covers."""
    pillow = require("PIL.Image", extra="data")
    identity = pillow.fromarray(np.eye(old, dtype=np.float32))
    return torch.from_numpy(np.array(identity.resize((old, new), pillow.Resampling.BOX)))


def disk_kernel(radius: float, sigma: float) -> Tensor:
    """A disk smoothed by a 3 x 3 Gaussian, in the smallest square that contains it."""
    reach = int(radius) + 1
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).double()
    weights = (-0.5 * (torch.arange(-1, 2) / sigma).double() ** 2).exp()
    weights /= weights.sum()
    smooth = weights[:, None] * weights
    return F.conv2d((disk / disk.sum())[None, None], smooth[None, None], padding=1)[0, 0]


def sample_at(images: Tensor, row: Tensor, column: Tensor, border: Literal["mirror", "reflect"]) -> Tensor:
    """Images (N, C, H, W) sampled at `row`, `column` (N, H', W') by linear interpolation.

    Beyond the border the image is mirrored: "mirror" excludes the last pixel (d c b | a b c d | c b a), "reflect"
    includes it.
    """
    height, width = images.shape[2:]
    corners = border == "mirror"
    if corners:
        y, x = 2 * row / max(height - 1, 1) - 1, 2 * column / max(width - 1, 1) - 1
    else:
        y, x = (2 * row + 1) / height - 1, (2 * column + 1) / width - 1
    return F.grid_sample(images, torch.stack([x, y], -1), padding_mode="reflection", align_corners=corners)


# The published CIFAR constants, severity 1 to 5.
SEVERITIES: dict[str, tuple[Corruption, tuple[Any, ...]]] = {
    "gaussian_noise": (lambda x, sigma, g: x + sigma * _randn(x, g), (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (lambda x, photons, g: torch.poisson(x * photons, g) / photons, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": (lambda x, sigma, g: x + x * sigma * _randn(x, g), (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    # radius, standard deviation of the smoothing
    "defocus_blur": (_defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    # radius, standard deviation along the motion
    "motion_blur": (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    # factor, shift
    "saturate": (_saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
    "jpeg_compression": (_jpeg_compression, (80, 65, 58, 50, 40)),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    # displacement, its smoothing, jitter of the affine map
    "elastic_transform": (
        _elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
}
FAMILIES = tuple(SEVERITIES)
