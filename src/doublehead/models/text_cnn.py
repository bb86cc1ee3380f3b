"""Convolutional networks over static word vectors: Kim's TextCNN and the global-pooling CNN.

Both read word numbers (B, T), texts of unequal length filled up at the end with 0. Each puts enough further 0 around
a text that its logits do not depend on how far the batch was filled up: a text alone and the same text
beside a longer one give the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.data.text import PADDING
from doublehead.models.vectors import embedding


class TextCNN(nn.Module):
    """Kim (2014), CNN-static: convolutions of several widths over fixed vectors, each reduced to its maximum.

    `channels` feature maps for each width in `filters`; `dropout` before the last layer, `classifier`. Kim's bound on
    the norm of the last layer's weights is left out.

    >>> network = TextCNN(n_classes=2, vectors=torch.randn(50, 8))
    >>> network(torch.tensor([[4, 8, 15], [16, 23, 0]])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        n_classes: int,
        *,
        vectors: Any,
        filters: Sequence[int] = (3, 4, 5),
        channels: int = 100,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if not filters or min(filters) < 1:
            raise ValueError(f"filters must be widths of at least 1, got {list(filters)}")
        self.embedding = embedding(vectors, tuned=False)
        self.widest = max(filters)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(self.embedding.embedding_dim, channels, width) for width in filters
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(channels * len(filters), n_classes)

    def features(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, channels * number of filters), before dropout."""
        # In front as in Kim's code: a first word stands at every place of a filter. Behind, one place more: then the
        # all-padding window, which Kim's fixed length gives to all but the longest text, is always there.
        words = F.pad(words, (self.widest - 1, self.widest), value=PADDING)
        vectors = self.embedding(words).transpose(1, 2)  # (B, D, T)
        return torch.cat([F.relu(convolve(vectors)).amax(2) for convolve in self.convolutions], 1)

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) -> logits (B, K)."""
        logits: Tensor = self.classifier(self.dropout(self.features(words)))
        return logits


class GlobalPoolingCNN(nn.Module):
    """Three convolutions of width 5 with maximum pooling between, the maximum over the text, a hidden layer.

    The "global pooling CNN" that Kumar et al. (2018) and Mukhoti et al. (2020) calibrate on 20 Newsgroups, after the
    global pooling of Lin et al. (2013), with the sizes of Mukhoti et al.'s code: 128 channels, 128 hidden units,
    dropout 0.3, pooling over 5 places with stride 1. `stride=5` pools as the older Keras form of the network does:
    coarser, at less than half the cost. The last layer is `classifier`.

    >>> network = GlobalPoolingCNN(n_classes=20, vectors=torch.randn(50, 8))
    >>> network(torch.tensor([[4, 8, 15], [16, 23, 0]])).shape
    torch.Size([2, 20])
    """

    WIDTH = 5  # of the convolutions and of the pooling

    def __init__(
        self,
        n_classes: int,
        *,
        vectors: Any,
        channels: int = 128,
        hidden: int = 128,
        dropout: float = 0.3,
        stride: int = 1,
    ) -> None:
        super().__init__()
        if not 1 <= stride <= self.WIDTH:
            raise ValueError(f"stride must lie in 1..{self.WIDTH}, the width of the pooling, got {stride}")
        self.embedding = embedding(vectors, tuned=False)
        self.stride = stride
        self.conv1 = nn.Conv1d(self.embedding.embedding_dim, channels, self.WIDTH)
        self.conv2 = nn.Conv1d(channels, channels, self.WIDTH)
        self.conv3 = nn.Conv1d(channels, channels, self.WIDTH)
        self.hidden = nn.Linear(channels, hidden)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, n_classes)

    def features(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, hidden), before dropout."""
        # One place of the last maps sees 1 + 2 * 4 * (1 + stride) + 4 * stride^2 words, and the next one starts
        # stride^2 words later: with that much padding behind, one place sees nothing but padding.
        reach = 1 + 2 * (self.WIDTH - 1) * (1 + self.stride) + (self.WIDTH - 1) * self.stride**2
        words = F.pad(words, (0, reach + self.stride**2 - 1), value=PADDING)
        maps = F.relu(self.conv1(self.embedding(words).transpose(1, 2)))  # (B, channels, T)
        maps = F.relu(self.conv2(F.max_pool1d(maps, self.WIDTH, self.stride)))
        maps = F.relu(self.conv3(F.max_pool1d(maps, self.WIDTH, self.stride)))
        return F.relu(self.hidden(maps.amax(2)))

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) -> logits (B, K)."""
        logits: Tensor = self.classifier(self.dropout(self.features(words)))
        return logits
