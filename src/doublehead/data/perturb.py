"""Perturbations of calibration batches (the paper's g), which lower the head's confidence under distribution shift.

They run on the device of the images and draw from torch's global generators. `GaussianNoise` and `Broad` share only
Gaussian noise with the families of `corruptions`, so the other families remain an independent test. `Shifts` is made
of those families; test on the ones it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead.data.batches import Normalise
from doublehead.data.corruptions import FAMILIES, corrupt

Perturbation: TypeAlias = Callable[[Tensor], Tensor]  # pixels (B, C, H, W) in 0..1 -> the same shape


def noise(pixels: Tensor, max_sigma: float = 0.15) -> Tensor:
    """Add Gaussian noise; its standard deviation is uniform in 0..max_sigma for each image."""
    return pixels + max_sigma * _uniform(pixels, 0, 1) * torch.randn_like(pixels)


def rotate_shear_scale(pixels: Tensor) -> Tensor:
    """Rotate by up to 30 degrees, shear by up to 0.3, scale by 0.7..1.3; the border is mirrored."""
    angle = _uniform(pixels, -math.pi / 6, math.pi / 6).flatten()
    shear, scale = _uniform(pixels, -0.3, 0.3).flatten(), _uniform(pixels, 0.7, 1.3).flatten()
    cos, sin, zero = angle.cos() / scale, angle.sin() / scale, torch.zeros_like(angle)
    matrix = torch.stack([cos, shear * cos - sin, zero, sin, shear * sin + cos, zero], 1)  # rotation @ shear
    grid = F.affine_grid(matrix.view(-1, 2, 3), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)


def erase(pixels: Tensor) -> Tensor:
    """Fill a rectangle, whose sides are 0.3..0.7 of the image's, with one grey level."""
    inside = torch.ones_like(pixels[:, :1], dtype=torch.bool)
    for axis in (2, 3):
        size = pixels.shape[axis]
        length = _uniform(pixels, 0.3, 0.7) * size
        start = _uniform(pixels, 0, 1) * (size - length)
        place = (
            torch.arange(size, device=pixels.device).view([-1 if a == axis else 1 for a in range(4)]) + 0.5
        )
        inside = inside & (place >= start) & (place <= start + length)
    return torch.where(inside, _uniform(pixels, 0, 1), pixels)


def mix(pixels: Tensor) -> Tensor:
    """Blend in another image of the batch with weight 0.2..0.5; the label stays that of the first."""
    weight = _uniform(pixels, 0.2, 0.5)
    other = torch.rand(len(pixels), device=pixels.device).argsort()
    return (1 - weight) * pixels + weight * pixels[other]


def jitter_channels(pixels: Tensor) -> Tensor:
    """Scale each channel by 0.6..1.4 and shift it by up to 0.2."""
    shape = (*pixels.shape[:2], 1, 1)
    gain, shift = (torch.rand(shape, device=pixels.device, dtype=pixels.dtype) for _ in range(2))
    return pixels * (0.6 + 0.8 * gain) + 0.4 * shift - 0.2


def posterise(pixels: Tensor) -> Tensor:
    """Round to 2..6 grey levels, drawn for each image."""
    steps = torch.randint(1, 6, (len(pixels), 1, 1, 1), device=pixels.device).to(pixels.dtype)
    return (pixels * steps).round() / steps


def shuffle_patches(pixels: Tensor) -> Tensor:
    """Permute the 4 x 4 patches of each image; 2 x 2 if 4 does not divide the size."""
    b, c, h, w = pixels.shape
    n = next(n for n in (4, 2, 1) if h % n == 0 and w % n == 0)
    patches = pixels.view(b, c, n, h // n, n, w // n).permute(0, 2, 4, 1, 3, 5).reshape(b, n * n, -1)
    order = torch.rand(b, n * n, device=pixels.device).argsort(1)
    patches = patches.gather(1, order[:, :, None].expand_as(patches))
    return patches.view(b, n, n, c, h // n, w // n).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)


BROAD: tuple[Perturbation, ...] = (
    rotate_shear_scale,
    erase,
    mix,
    jitter_channels,
    posterise,
    shuffle_patches,
)


@dataclass(frozen=True)
class Perturb:
    """Perturb the first `share` of each batch, each image by one of `functions`, in equal numbers.

    `together` perturbs all of them by one function, drawn for each batch. Batches should be shuffled. Images
    (B, C, H, W) are pixels in 0..1, or normalised by `normalise`. Pixels are clipped to 0..1 afterwards.
    """

    functions: Sequence[Perturbation]
    share: float = 0.5
    normalise: Normalise | None = None
    together: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie in 0..1, got {self.share}")
        if not self.functions:
            raise ValueError("functions must contain at least one perturbation, got none")

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """A perturbed copy of the batch."""
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a tensor (B, C, H, W), got {type(images).__name__}")
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(
                f"images must be floating (B, C, H, W), got {images.dtype} of shape {tuple(images.shape)}"
            )
        n, functions = round(self.share * len(images)), self._applicable(images.shape[1])
        pixels = images[:n].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        pixels = self.normalise.undo(pixels) if self.normalise else pixels
        turn = int(torch.randint(len(functions), ()))  # on the CPU, so as not to wait for a GPU
        functions, turn = ([functions[turn]], 0) if self.together else (functions, turn)
        for i, function in enumerate(functions):
            mine = slice((i + turn) % len(functions), n, len(functions))
            if mine.start < n:
                pixels[mine] = function(pixels[mine].contiguous())
        pixels.clamp_(0, 1)
        pixels = self.normalise(pixels) if self.normalise else pixels
        return torch.cat([pixels.to(images.dtype), images[n:]])

    def _applicable(self, n_channels: int) -> Sequence[Perturbation]:
        """The functions that apply to images with this many channels."""
        return self.functions


class GaussianNoise(Perturb):
    """Gaussian noise on `share` of each batch; its standard deviation is uniform in 0..max_sigma for each image.

    >>> clean = torch.full((4, 1, 8, 8), 0.5)
    >>> (GaussianNoise()(clean) != clean).flatten(1).any(1).tolist()
    [True, True, False, False]
    """

    def __init__(
        self, max_sigma: float = 0.15, share: float = 0.5, normalise: Normalise | None = None
    ) -> None:
        super().__init__((_noise_up_to(max_sigma),), share, normalise)


class Broad(Perturb):
    """Six perturbations on `share` of each batch: geometry, erasing, mixing, channels, posterising, patch shuffling.

    With `max_sigma` > 0, half of the perturbed images get Gaussian noise instead.
    """

    def __init__(
        self, share: float = 0.5, normalise: Normalise | None = None, max_sigma: float = 0.0
    ) -> None:
        noisy = _noise_up_to(max_sigma)
        pairs = [f for function in BROAD for f in (function, noisy)]
        super().__init__(pairs if max_sigma else BROAD, share, normalise)


class Shifts(Perturb):
    """The families of `corrupt` at random severities on `share` of each batch, except those in `leave_out`.

    Images without three channels skip `saturate`.

    >>> clean = torch.rand(26, 3, 32, 32)
    >>> (Shifts(share=1.0)(clean) != clean).flatten(1).any(1).sum().item() >= 24
    True
    """

    def __init__(
        self,
        share: float = 0.5,
        normalise: Normalise | None = None,
        leave_out: Sequence[str] = (),
        together: bool = False,
    ) -> None:
        unknown = sorted(set(leave_out) - set(FAMILIES))
        if unknown:
            raise ValueError(f"leave_out must be among {', '.join(FAMILIES)}, got {', '.join(unknown)}")
        kept = [family for family in FAMILIES if family not in leave_out]
        super().__init__([partial(_any_severity, family) for family in kept], share, normalise, together)

    def _applicable(self, n_channels: int) -> Sequence[Perturbation]:
        if n_channels == 3:
            return self.functions
        kept = [one for one in self.functions if getattr(one, "args", ()) != ("saturate",)]
        if not kept:
            raise ValueError(
                f"leave_out must keep a family other than saturate for images with {n_channels} channels"
            )
        return kept


def _noise_up_to(max_sigma: float) -> Perturbation:
    if max_sigma < 0:
        raise ValueError(f"max_sigma must be >= 0, got {max_sigma}")
    return partial(noise, max_sigma=max_sigma)


def _any_severity(family: str, pixels: Tensor) -> Tensor:
    severity = 1 + int(torch.randint(5, ()))  # on the CPU, so as not to wait for a GPU
    return corrupt(pixels, family, severity)


def _uniform(pixels: Tensor, low: float, high: float) -> Tensor:
    """(B, 1, 1, 1), one draw per image."""
    draw = torch.rand(len(pixels), 1, 1, 1, device=pixels.device, dtype=pixels.dtype)
    return low + (high - low) * draw
