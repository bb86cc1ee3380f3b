"""Texts -> tokens -> vocabulary rows -> padded batches; trees likewise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from doublehead.data.epochs import Batches
from doublehead.data.splits import Texts, Trees
from doublehead.data.trees import TreeBatch

PADDING, UNKNOWN = 0, 1  # the first two rows of every vocabulary
_RUN = re.compile(r"([^\w\s]|_)\1+")  # a run of one mark
_TOKEN = re.compile(
    r"n't\b|'(?:s|m|d|re|ve|ll)\b"  # what the Penn Treebank splits off: do n't, it 's
    r"|[^\W_]+(?:[-.,&][^\W_]+)*"  # words and numbers, also e-mail, u.s., 1,000
    r"|[^\w\s]|_"  # any other mark
)
_PENN = {"-lrb-": "(", "-rrb-": ")", "-lcb-": "{", "-rcb-": "}", "-lsb-": "[", "-rsb-": "]"}


def tokenize(text: str) -> list[str]:
    """Lower-case words, numbers and marks, split the way the GloVe vectors expect.

    Contractions are split as in the Penn Treebank, words with inner hyphens, dots or commas stay whole, and
    a run of one mark counts once.

    >>> tokenize("It's a state-of-the-art film, but I don't like it -----")
    ['it', "'s", 'a', 'state-of-the-art', 'film', ',', 'but', 'i', 'do', "n't", 'like', 'it', '-']
    """
    return _TOKEN.findall(_RUN.sub(r"\1", text.lower().replace("n't", " n't")))


def plain_token(token: str) -> str:
    r"""A leaf of a Penn Treebank tree as GloVe spells it: lower case, brackets and slashes themselves.

    >>> plain_token("-LRB-"), plain_token(r"1\/2"), plain_token("Rock")
    ('(', '1/2', 'rock')
    """
    token = token.lower().replace("\\/", "/").replace("\\*", "*")
    return _PENN.get(token, token)


def tokens_of(samples: Texts | Trees) -> Iterator[list[str]]:
    """The tokens of each sample; of a tree, its leaves."""
    if isinstance(samples, Trees):
        return ([plain_token(token) for token in tree.tokens] for tree in samples.trees)
    return (tokenize(text) for text in samples.texts)


class Vocabulary:
    """Words and their rows. Row 0 is padding, row 1 stands for every word that is not in the vocabulary.

    >>> vocabulary = Vocabulary(["good", "film"])
    >>> [vocabulary.row(word) for word in ("film", "dull")], len(vocabulary)
    ([3, 1], 4)
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)  # row - 2 -> word
        self._rows = {word: row for row, word in enumerate(self.words, 2)}
        if len(self._rows) != len(self.words):
            raise ValueError("words must not repeat")

    @classmethod
    def of(cls, samples: Texts | Trees, min_count: int = 1, max_size: int | None = None) -> Vocabulary:
        """The words of some samples (take the train split), frequent ones first, equal counts in alphabetical order."""
        if max_size is not None and max_size < 3:
            raise ValueError(f"max_size must be at least 3 (padding, unknown, a word), got {max_size}")
        counts = Counter(token for tokens in tokens_of(samples) for token in tokens)
        words = sorted((w for w, n in counts.items() if n >= min_count), key=lambda w: (-counts[w], w))
        return cls(words[: None if max_size is None else max_size - 2])

    def row(self, word: str) -> int:
        """The row of a word; 1 for an unknown one."""
        return self._rows.get(word, UNKNOWN)

    def rows(self, tokens: Sequence[str]) -> npt.NDArray[np.int64]:
        """The rows of several words."""
        return np.array([self._rows.get(token, UNKNOWN) for token in tokens], np.int64)

    def __len__(self) -> int:
        return len(self.words) + 2

    def __contains__(self, word: object) -> bool:
        return word in self._rows


class TextBatches(Batches):
    """Batches of vocabulary rows (B, L), padded with 0 behind the words, and labels (B,).

    L is the longest text of the batch, at least `min_length` (the widest window of a TextCNN) and at most
    `max_length`: what is longer is cut at its end.

    >>> texts = Texts(("good film", "dull"), np.array([1, 0]))
    >>> rows, labels = next(iter(TextBatches(texts, Vocabulary(["good", "film"]), 2, min_length=3)))
    >>> rows.tolist()
    [[2, 3, 0], [1, 0, 0]]
    """

    def __init__(
        self,
        samples: Texts | Trees,
        vocabulary: Vocabulary,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        train: bool = False,
        max_length: int = 1000,
        min_length: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__(len(samples), batch_size, train=train, seed=seed)
        if not 1 <= min_length <= max_length:
            raise ValueError(f"min_length must lie in 1..max_length, got {min_length} and {max_length}")
        self.device, self.min_length = torch.device(device), min_length
        rows = [vocabulary.rows(tokens[:max_length]) for tokens in tokens_of(samples)]
        self.lengths = np.array([len(r) for r in rows], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.rows = np.concatenate([*rows, np.zeros(1, np.int64)])  # all texts in a row
        self.labels = torch.from_numpy(samples.labels)

    def _batches_from(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._own(self._order(self._generator()))
        for chosen in order[position * self.batch_size :].split(self.batch_size):
            yield self._padded(chosen.numpy()).to(self.device), self.labels[chosen].to(self.device)

    def _padded(self, chosen: npt.NDArray[Any]) -> Tensor:
        lengths, starts = self.lengths[chosen], self.starts[chosen]
        place = np.arange(max(int(lengths.max()), self.min_length))
        inside = place < lengths[:, None]  # (B, L)
        return torch.from_numpy(
            np.where(inside, self.rows[np.where(inside, starts[:, None] + place, 0)], PADDING)
        )


class TreeBatches(Batches):
    """Batches (TreeBatch, labels (T,) of its nodes to classify): the sentences, or with `nodes="all"` all phrases."""

    def __init__(
        self,
        samples: Trees,
        vocabulary: Vocabulary,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        train: bool = False,
        nodes: Literal["root", "all"] = "root",
        seed: int = 0,
    ) -> None:
        super().__init__(len(samples), batch_size, train=train, seed=seed)
        self.device, self.nodes = torch.device(device), nodes
        self.trees = [tree.index(lambda token: vocabulary.row(plain_token(token))) for tree in samples.trees]

    def _batches_from(self, position: int) -> Iterator[tuple[TreeBatch, Tensor]]:
        order = self._own(self._order(self._generator()))
        for chosen in order[position * self.batch_size :].split(self.batch_size):
            batch = TreeBatch.of([self.trees[i] for i in chosen.tolist()], self.nodes).to(self.device)
            yield batch, batch.target_labels
