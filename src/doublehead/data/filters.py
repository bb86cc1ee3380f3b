"""Small linear filters as matrices, and sampling between pixels: what the corruptions are made of."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply `rows` (H', H) along the height and `columns` (W', W) along the width of (..., H, W)."""
    return rows @ images @ columns.T


def blur_matrix(size: int, sigma: float, truncate: float, border: Literal["nearest", "reflect"]) -> Tensor:
    """(size, size): a Gaussian along one axis, cut at `truncate` deviations, with scipy.ndimage's borders.

    "nearest" repeats the last pixel, "reflect" mirrors the image with its last pixel (d c b a | a b c d | d c b a).
    """
    radius = int(truncate * sigma + 0.5)
    steps = torch.arange(-radius, radius + 1)
    weights = (-0.5 * (steps / max(sigma, 1e-12)).double() ** 2).exp()
    weights /= weights.sum()
    source = torch.arange(size)[:, None] + steps  # (size, taps)
    if border == "nearest":
        source = source.clamp(0, size - 1)
    else:
        source = source % (2 * size)
        source = torch.where(source < size, source, 2 * size - 1 - source)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, source, weights.expand(size, -1))


def box_matrix(old: int, new: int) -> Tensor:
    """(new, old): Pillow's box filter. Each new pixel is the mean of the old ones whose centres it covers."""
    scale = old / new
    support = max(scale, 1.0) / 2
    matrix = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        centre = (i + 0.5) * scale
        low, high = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), old)
        distance = (torch.arange(low, high) + 0.5 - centre) / max(scale, 1.0)
        inside = ((distance > -0.5) & (distance <= 0.5)).double()
        matrix[i, low:high] = inside / inside.sum()
    return matrix


def disk_kernel(radius: float, sigma: float) -> Tensor:
    """A disk of whole pixels, smoothed by a 3 x 3 Gaussian; as small a square as holds it."""
    reach = int(radius) + 1
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).double()
    weights = (-0.5 * (torch.arange(-1, 2) / sigma).double() ** 2).exp()
    weights /= weights.sum()
    smooth = weights[:, None] * weights
    return F.conv2d((disk / disk.sum())[None, None], smooth[None, None], padding=1)[0, 0]


def sample_at(images: Tensor, row: Tensor, column: Tensor, border: Literal["mirror", "reflect"]) -> Tensor:
    """Images (N, C, H, W) at places (N, H', W') between pixels, linearly.

    Beyond the border the image is mirrored: "mirror" without repeating the last pixel (d c b | a b c d | c b a),
    "reflect" with it.
    """
    height, width = images.shape[2:]
    corners = border == "mirror"
    if corners:
        y, x = 2 * row / max(height - 1, 1) - 1, 2 * column / max(width - 1, 1) - 1
    else:
        y, x = (2 * row + 1) / height - 1, (2 * column + 1) / width - 1
    return F.grid_sample(images, torch.stack([x, y], -1), padding_mode="reflection", align_corners=corners)
