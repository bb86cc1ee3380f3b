"""Wide residual networks of Zagoruyko and Komodakis (2016), for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class WideResNet(nn.Module):
    """WRN-`depth`-`width`: three groups of pre-activation blocks of 16, 32 and 64 times `width` channels.

    `depth` counts the convolutions on the longest path, so it is 6 n + 4 with n blocks a group. `dropout` acts between
    the two convolutions of a block. The last layer is `classifier`.

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
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
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

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 64 * width)."""
        maps = self.group3(self.group2(self.group1(self.stem(images))))
        return F.relu(self.norm(maps)).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, K)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


class _Block(nn.Module):
    """BatchNorm, ReLU, convolution, twice; a 1x1 convolution on the shortcut where the channels change."""

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
        # Where the shape changes the shortcut, too, starts from the activated maps, as in the authors' code.
        kept = maps if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.conv2(self.dropout(F.relu(self.norm2(self.conv1(active)))))
        return added + kept


def _conv3x3(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)


def _group(n_in: int, n_out: int, n_blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = _Block(n_in, n_out, stride, dropout)
    return nn.Sequential(first, *(_Block(n_out, n_out, 1, dropout) for _ in range(n_blocks - 1)))
