"""Read a network at some of its layers, and measure how far what they see is from the calibration data's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.torch_tools import uncompiled

N_LAYERS = 9  # over the whole depth of the network
CHANNELS = 128  # of a layer at most, evenly spaced: more would take more data to know their usual values
SHRINK = 0.02  # of a covariance towards the identity
TINY = 1e-6


class StageTap:
    """Catches what goes into some normalisation layers while a model runs, as a mean and a deviation per channel.

    `layers` names them; without it the model is cut into `n_layers` equal parts, and the first layer of each is taken.
    A model without normalisation layers is read at its last linear layer. Of a layer with more than 128
    channels every second one is read, or every third, and so on. `widths` are the sizes of what is caught.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] | None = None, n_layers: int = N_LAYERS
    ) -> None:
        found = layers_to_read(model)
        names = list(found)
        if layers is None:
            places = [round(i * (len(names) - 1) / n_layers) for i in range(n_layers)]
            layers = names if len(names) <= n_layers else [names[place] for place in places]
        unknown = [name for name in layers if name not in found]
        if unknown or not layers:
            raise ValueError(
                f"layers must name normalisation layers, such as {names[:3]}, got {unknown or layers}"
            )
        self.layers = list(layers)
        read = [-(-n // _stride(n)) for n in (_width(found[name]) for name in self.layers)]
        self.widths = [width for width in read for _ in ("mean", "deviation")]
        self._recording = False
        self._caught: dict[int, Tensor] = {}
        for number, name in enumerate(self.layers):
            found[name].register_forward_hook(partial(self._catch, number))
        if any(module is not uncompiled(module) for module in model.modules()):
            torch.compiler.reset()  # what was compiled so far does not know the hooks and would pass them by

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Catch while the model runs in here; `take` gives what was caught."""
        self._recording, self._caught = True, {}
        try:
            yield
        finally:
            self._recording = False

    def take(self, n: int) -> Tensor:
        """The stages (n, S) of the last run, which was over `n` samples; they are let go."""
        caught, self._caught = self._caught, {}
        missing = [name for number, name in enumerate(self.layers) if number not in caught]
        if missing:
            raise RuntimeError(f"layers must be run in the model's forward, but these were not: {missing}")
        strange = [name for number, name in enumerate(self.layers) if caught[number].shape[0] != n]
        if strange:
            raise RuntimeError(
                f"layers must see one row for each of the {n} samples, but these do not: {strange}; "
                "name others with layers=[...]"
            )
        return torch.cat([caught[number] for number in range(len(self.layers))], 1)

    def _catch(self, number: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._recording:
            maps, last = args[0].detach(), _channels_last(layer, args[0])
            stride = _stride(_width(layer))
            self._caught[number] = moments(maps[..., ::stride] if last else maps[:, ::stride], last)


def moments(maps: Tensor, channels_last: bool = False) -> Tensor:
    """The mean and the deviation of each channel over all places, (B, C, ...) or (B, ..., C) -> (B, 2 C).

    >>> moments(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]])).tolist()
    [[2.0, 5.0, 1.0, 0.0]]
    """
    with torch.autocast(maps.device.type, enabled=False):
        maps = maps.float().flatten(1, -2) if channels_last and maps.ndim > 2 else maps.float()
        maps = maps.mT if channels_last and maps.ndim > 2 else maps
        flat = maps.flatten(2) if maps.ndim > 2 else maps[:, :, None]  # (B, C, places)
        if flat.shape[0] == 0:  # torch would warn of a deviation of nothing
            return flat.new_zeros(0, 2 * flat.shape[1])
        return torch.cat([flat.mean(-1), flat.std(-1, correction=0)], 1)


def _stride(n_channels: int) -> int:
    """Every how many channels one is read."""
    return max(1, math.ceil(n_channels / CHANNELS))


def layers_to_read(model: nn.Module) -> dict[str, nn.Module]:
    """The normalisation layers of a model by name, or the last linear layer of a model without any."""
    model = uncompiled(model)
    modules = dict(model.named_modules())
    found = {name: module for name, module in modules.items() if channels_of(module)}
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    if not found and not linear:
        raise ValueError(
            "model must have normalisation layers (BatchNorm, GroupNorm, LayerNorm) or a linear layer for a guard to "
            f"read, got {type(model).__name__} without any"
        )
    return found or dict([linear.popitem()])


def channels_of(layer: nn.Module) -> int | None:
    """How many channels a normalisation layer has; None for any other module."""
    if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    return layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm) else None


def _width(layer: nn.Module) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else channels_of(layer) or 1


def _channels_last(layer: nn.Module, maps: Tensor) -> bool:
    """As LayerNorm has them; but ConvNeXt's kind of it, in torchvision and timm, takes maps (B, C, H, W)."""
    of_maps = type(layer) is not nn.LayerNorm and maps.ndim == 4 and maps.shape[1] == channels_of(layer)
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.LayerNorm) and not of_maps)


class Distance(nn.Module):
    """Values (B, W) -> how far each row is from the usual ones, (B, 1): the logarithm of a mean squared distance.

    It is measured in units in which the usual values vary by 1 in every direction (Mahalanobis' distance), so a shift
    that breaks the usual relations between channels counts, even where each channel alone looks usual.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("root", torch.eye(width))  # of the inverse covariance
        self.mean: Tensor
        self.root: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """The distance of each row."""
        squares = ((values.float() - self.mean) @ self.root).square()
        return squares.mean(-1, keepdim=True).clamp(min=TINY).log()

    @torch.no_grad()
    def set_usual(self, values: Tensor) -> Tensor:
        """Take (N, W) for what is usual; the distance of each row from all the others, (N, 1).

        From statistics that it is part of a row is nearer than a new one would be: with few rows by far.
        """
        device, n, values = values.device, len(values), values.cpu().double()  # some devices have no float64
        mean, deviation = values.mean(0), values.std(0, correction=0).clamp(min=TINY)
        unit = (values - mean) / deviation
        eye = torch.eye(len(mean), dtype=unit.dtype)
        covariance = torch.lerp(unit.mT @ unit / n, eye, SHRINK)
        lower: Tensor = torch.linalg.cholesky(covariance)
        root = torch.linalg.solve_triangular(lower, eye, upper=False).mT
        self.mean.copy_(mean)
        self.root.copy_(root / deviation[:, None])
        # Sherman and Morrison's formula takes a row out of the covariance; its mean moves away from the row too.
        squares, grown = (unit @ root).square().sum(1, keepdim=True), n / max(1, n - 1)
        squares = grown**2 * squares / (1 - (1 - SHRINK) * squares / n).clamp(min=TINY)
        far: Tensor = (squares / len(mean)).clamp(min=TINY).log()
        return far.float().to(device)
