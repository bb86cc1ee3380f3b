"""Image networks: a small CNN, torchvision's ResNets and DenseNets, Wide ResNets."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.system import require

SMALL = 64  # images up to this size get the stem for small images


class SmallCNN(nn.Module):
    """The demo's network: convolutions with BatchNorm, each halving the image, then one hidden layer.

    `channels` has one entry per convolution.

    >>> import torch
    >>> SmallCNN(n_classes=10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        n_classes: int,
        *,
        channels: Sequence[int] = (32, 64, 64),
        hidden: int = 128,
        size: tuple[int, int] = (28, 28),
        in_channels: int = 1,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        height, width = size
        for n_in, n_out in zip([in_channels, *channels], channels):
            convolution = nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(n_out), nn.ReLU()]
            height, width = (height + 1) // 2, (width + 1) // 2
        self.maps = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Linear(channels[-1] * height * width, hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, K)."""
        logits: Tensor = self.classifier(self.hidden(self.maps(images).flatten(1)))
        return logits


def from_torchvision(
    arch: str,
    n_classes: int,
    *,
    size: tuple[int, int] = (32, 32),
    in_channels: int = 3,
    weights: str | None = None,
) -> nn.Module:
    """A torchvision ResNet, whose last layer is `fc`, or DenseNet, whose last layer is `classifier`.

    Images up to 64 pixels a side get a 3x3 stem of stride 1 without pooling instead of the 7x7 stem. `weights` is the
    path of a .safetensors file or one of torchvision's names. Residual branches start at zero: otherwise the first
    epoch of a deep network at learning rate 0.1 ends worse than chance.
    """
    dense = arch.startswith("densenet")
    options = {} if dense else {"zero_init_residual": True}
    models = require("torchvision.models", extra="models")
    network: nn.Module = models.get_model(arch, weights=None, num_classes=n_classes, **options)
    stem, first, pool = (network.features, "conv0", "pool0") if dense else (network, "conv1", "maxpool")
    small = max(size) <= SMALL
    if small or in_channels != 3:
        kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        layer = nn.Conv2d(in_channels, getattr(stem, first).out_channels, kernel, stride, padding, bias=False)
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        setattr(stem, first, layer)
    if small:
        setattr(stem, pool, nn.Identity())
    if weights is not None:
        _load(network, arch, weights, last="classifier" if dense else "fc")
    return network


def _load(network: nn.Module, arch: str, weights: str, last: str) -> None:
    """Load `weights`; a last layer for another number of classes keeps its fresh values."""
    state, own = _read(arch, weights), network.state_dict()
    if f"{last}.weight" in state and state[f"{last}.weight"].shape != own[f"{last}.weight"].shape:
        state |= {name: own[name] for name in (f"{last}.weight", f"{last}.bias")}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"weights must fit {arch}, got {weights!r}; ImageNet weights need an input above 64x64 with 3 channels. "
            f"{error}"
        ) from error


def _read(arch: str, weights: str) -> dict[str, Tensor]:
    if weights.endswith(".safetensors"):
        return dict(require("safetensors.torch", extra="train").load_file(weights))
    known = require("torchvision.models", extra="models").get_model_weights(arch).__members__
    if weights not in known:
        raise ValueError(
            f"weights must be a .safetensors file or one of {list(known)} for {arch}, got {weights!r}"
        )
    # torchvision's file is checked against the hash in its name, and loaded without running code
    state = known[weights].get_state_dict(map_location="cpu", check_hash=True, weights_only=True)
    # Old DenseNet files have norm.1 instead of norm1.
    return {re.sub(r"\.(norm|conv)\.([12])\.", r".\1\2.", name): tensor for name, tensor in state.items()}


class WideResNet(nn.Module):
    """WRN-`depth`-`width` of Zagoruyko and Komodakis (2016), for small images.

    It has three groups of pre-activation blocks with 16, 32 and 64 times `width` channels. `depth` is 6 n + 4 for n
    blocks per group. `dropout` is between the two convolutions of a block. The last layer is `classifier`.

    >>> import torch
    >>> network = WideResNet(n_classes=10, depth=10, width=1)
    >>> network(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self, n_classes: int, *, depth: int = 28, width: int = 10, dropout: float = 0.0, in_channels: int = 3
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4 with n >= 1 (10, 16, 22, 28, ...), got {depth}")
        n_blocks = (depth - 4) // 6
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.stem = _conv3x3(in_channels, channels[0])
        self.group1 = _group(channels[0], channels[1], n_blocks, stride=1, dropout=dropout)
        self.group2 = _group(channels[1], channels[2], n_blocks, stride=2, dropout=dropout)
        self.group3 = _group(channels[2], channels[3], n_blocks, stride=2, dropout=dropout)
        self.norm = nn.BatchNorm2d(channels[3])
        self.classifier = nn.Linear(channels[3], n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, K)."""
        maps = self.group3(self.group2(self.group1(self.stem(images))))
        logits: Tensor = self.classifier(F.relu(self.norm(maps)).mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Twice BatchNorm, ReLU, convolution; a 1x1 convolution on the shortcut if the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(n_in)
        self.conv1 = _conv3x3(n_in, n_out, stride)
        self.norm2 = nn.BatchNorm2d(n_out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _conv3x3(n_out, n_out)
        same = n_in == n_out and stride == 1
        self.shortcut = None if same else nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        active = F.relu(self.norm1(maps))
        # If the shape changes, the shortcut also starts from the activated maps, as in the authors' code.
        kept = maps if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.conv2(self.dropout(F.relu(self.norm2(self.conv1(active)))))
        return added + kept


def _conv3x3(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)


def _group(n_in: int, n_out: int, n_blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = _Block(n_in, n_out, stride, dropout)
    return nn.Sequential(first, *(_Block(n_out, n_out, 1, dropout) for _ in range(n_blocks - 1)))
