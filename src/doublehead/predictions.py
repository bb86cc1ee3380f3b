"""Predictions: scores and labels, which metrics and calibrators read. The kind of scores is stated, never guessed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from doublehead.llm_answers import option_logprobs
from doublehead.score_arrays import (
    ArrayLike,
    SmallestPositive,
    Target,
    as_float_tensor,
    as_tensor,
    at_classes,
    beside,
    check_finite,
    check_labels,
    check_probs,
    check_scores,
    check_weights,
    chunks,
    look_through,
    read_as,
    read_npz,
    softmax_of,
)
from doublehead.system import replacing
from doublehead.tasks import IGNORE_INDEX, class_scores, recognise_task, targets_of
from doublehead.torch_tools import one_thread

PER_SAMPLE = ("_scores", "_predicted", "_confidence", "_truth", "weights")  # attributes with N rows
TINY_WEIGHT = 2.0**-10  # a mean of weights; bins count them in units of 2^-32, and their squares too
COARSEST = 0.01  # resolution of probabilities that are rounded to two digits


class Predictions:
    """The logits of a classifier and the true labels, checked once, on entry.

    `Predictions(logits, labels)` takes logits; probabilities enter only through `from_probs`, a binary model's
    single score only through `from_binary`. Half precision is stored unchanged and read as float32. Labels are classes
    (N,), or soft: rows of probabilities (N, K). `weights` (N,) say how much each sample counts. What takes neither soft
    labels nor weights into account raises an error. Samples with several labels enter through `multilabel`.

    >>> p = Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 0])
    >>> len(p), p.n_classes, p.correct.tolist()
    (2, 2, [True, False])
    >>> [round(c, 3) for c in p.confidence.tolist()]
    [0.881, 0.731]
    """

    n_labels: int | None = None  # of each sample, where every label of a sample is a row: see `multilabel`

    def __init__(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        self._scores = check_scores(logits, "logits")  # (N, K)
        self._are_probs = False
        self._smallest = SmallestPositive(None, 1.0)
        self._predicted, self._confidence, sums, _ = look_through(self._scores, are_probs=False)  # (N,) each
        check_finite(self._scores, sums, "logits")
        self._truth = check_labels(labels, self._scores, "logits")  # (N,) int64, or (N, K)
        self.weights = check_weights(weights, self._scores)  # (N,) float64, or None

    @classmethod
    def from_probs(
        cls,
        probs: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        tolerance: float = 1e-3,
    ) -> Predictions:
        """Take class probabilities (N, K): in 0..1, each row summing to 1 within `tolerance`, or as rounding explains.

        The probabilities are stored unchanged, so a confidence that lies on the edge of a bin stays there.
        Rows that sum to 1 only roughly (rounded files, half precision) are not rescaled. What a 0 stands for in a
        logarithm is `zero_floor`.
        """
        scores = check_scores(probs, "probs")
        predicted, tops, sums, low = look_through(scores, are_probs=True)
        if check_probs(scores, tops, sums, low, tolerance) > 1:
            scores = scores.clamp(max=1.0)
            predicted = scores.argmax(1)  # what was larger may be equal now
            tops = tops.clamp(max=1.0)
        made = cls.__new__(cls)
        made._are_probs, made._smallest = True, SmallestPositive(scores)
        made._scores, made._predicted, made._confidence = scores, predicted, tops
        made._truth = check_labels(labels, scores, "probs")
        made.weights = check_weights(weights, scores)
        return made

    @classmethod
    def from_binary(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        are_probs: bool = False,
    ) -> Predictions:
        """Take a binary model's single score per sample, (N,) or (N, 1): the logit of class 1, or its probability.

        >>> Predictions.from_binary([0.0, 2.0], [0, 1]).probs[0].tolist()
        [0.5, 0.5]
        """
        name = "probs" if are_probs else "logits"
        column = as_float_tensor(scores, name)
        if column.ndim == 2 and column.shape[1] == 1:
            column = column[:, 0]
        if column.ndim != 1:
            raise ValueError(f"binary {name} must have shape (N,) or (N, 1), got {tuple(column.shape)}")
        other = 1 - column if are_probs else torch.zeros_like(column)
        both = torch.stack([other, column], 1)
        return cls.from_probs(both, labels, weights) if are_probs else cls(both, labels, weights)

    @classmethod
    def multilabel(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        are_probs: bool = False,
    ) -> Predictions:
        """Take logits (or probabilities) and 0 or 1 of L independent labels for each sample, (N, L) both.

        Each pair of a sample and a label becomes a row with the classes no and yes, so every metric is about the pairs
        pooled; `of_label` gives those of one label, and a `Summary` has them as groups. `weights` are (N,) or (N, L).

        >>> p = Predictions.multilabel([[2.0, -1.0, 0.5]], [[1, 0, 0]])
        >>> len(p), p.n_labels, p.correct.tolist()
        (3, 3, [True, True, False])
        """
        table, truth = as_float_tensor(scores, "scores"), as_tensor(labels, "labels")
        if table.ndim != 2 or truth.shape != table.shape:
            raise ValueError(
                f"scores and labels of several labels must both have shape (N, L), got {tuple(table.shape)} and "
                f"{tuple(truth.shape)}"
            )
        if not bool(((truth == 0) | (truth == 1)).all()):
            raise ValueError("labels must be 0 and 1 where a sample may have several, got other values")
        if weights is not None:
            given = as_tensor(weights, "weights")
            weights = (given if given.ndim == 2 else given[:, None].expand(table.shape)).flatten()
        made = cls.from_binary(table.flatten(), truth.flatten().long(), weights, are_probs=are_probs)
        made.n_labels = table.shape[1]
        return made

    @classmethod
    def positions(
        cls,
        scores: ArrayLike,
        labels: ArrayLike,
        *,
        ignore_index: int = IGNORE_INDEX,
        are_probs: bool = False,
    ) -> Predictions:
        """Take every position of tokens (B, T, K) with labels (B, T), or of pixels (B, K, H, W) with labels (B, H, W).

        Positions whose label is `ignore_index` are left out. `Stream` takes batches without holding them.

        >>> len(Predictions.positions([[[2.0, 0.0], [0.0, 1.0]]], [[0, -100]]))
        1
        """
        values, truth = as_float_tensor(scores, "scores"), as_tensor(labels, "labels")
        task = recognise_task(values, truth)
        if task not in ("tokens", "pixels"):
            raise ValueError(
                f"scores must have more than two axes, (B, T, K) or (B, K, H, W), got {tuple(values.shape)}"
            )
        rows = class_scores(values, task).flatten(0, -2)
        targets = targets_of(truth, task, rows.shape[1], ignore_index).to(rows.device)
        counts = targets >= 0
        return (cls.from_probs if are_probs else cls)(rows[counts], targets[counts])

    @classmethod
    def from_logprobs(
        cls,
        top_k: Sequence[Any],
        labels: Sequence[str],
        options: Sequence[str] | None = None,
        *,
        rest: Literal["share", "other"] = "share",
        weights: ArrayLike | None = None,
    ) -> Predictions:
        """Take a language model's log-probabilities of the most likely tokens; the answer is one of several options.

        An entry of `top_k` is one question's answer as a server returns it: a dict of log-probabilities by token, or
        the forms of `llm_answers.token_logprobs`. `options` are the tokens to choose from, by default those of the
        labels. Options that are not listed share the probability that is left. `rest="share"` reads probabilities
        given that the answer is an option; with "other" any other answer is a class of its own, the last.

        >>> top_k = [{"A": -0.2, "B": -2.0}, {"B": -0.1}]
        >>> p = Predictions.from_logprobs(top_k, ["A", "C"], options=["A", "B", "C"])
        >>> p.n_classes, p.correct.tolist()
        (3, [True, False])
        """
        chosen = sorted(set(labels)) if options is None else list(options)
        numbers = {option: i for i, option in enumerate(chosen)}
        if unknown := [label for label in labels if label not in numbers]:
            raise ValueError(f"labels must be among the options {chosen}, got {unknown[0]!r}")
        if len(labels) != len(top_k):
            raise ValueError(f"labels must be one for each of {len(top_k)} answers, got {len(labels)}")
        return cls(option_logprobs(top_k, chosen, rest), [numbers[label] for label in labels], weights)

    def of_label(self, label: int) -> Predictions:
        """The predictions of one label, by its number."""
        if self.n_labels is None or not 0 <= label < self.n_labels:
            raise IndexError(f"label must be one of {self.n_labels or 'no'} labels, got {label}")
        return self[label :: self.n_labels]

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        """The predictions of several parts, one after the other; all of one kind."""
        made = copy(parts[0])
        made._smallest = SmallestPositive(None, min(part._smallest.value() for part in parts))
        for name in PER_SAMPLE:
            if getattr(made, name) is not None:
                setattr(made, name, torch.cat([getattr(part, name) for part in parts]))
        return made

    def __len__(self) -> int:
        return self._scores.shape[0]

    def __repr__(self) -> str:
        kind, dtype = "probs" if self._are_probs else "logits", str(self._scores.dtype).removeprefix("torch.")
        return f"Predictions({kind} of shape {tuple(self._scores.shape)}, {dtype})"

    def __getitem__(self, rows: Any) -> Predictions:
        """The predictions of some rows: a slice, an index array or a mask."""
        part = copy(self)
        part.n_labels = None
        for name in PER_SAMPLE:
            if getattr(self, name) is not None:
                setattr(part, name, getattr(self, name)[rows])
        if not isinstance(rows, slice):
            self._smallest.value()  # else the part would hold all scores
        if part._scores.ndim != 2:
            raise IndexError(f"rows must be a slice, an index array or a mask, got {rows!r}")
        if len(part) == 0:
            raise IndexError(f"rows must select at least one of {len(self)} rows, got none")
        return part

    @property
    def labels(self) -> Tensor:
        """(N,) int64, the true classes; an error for soft labels."""
        if self.are_soft:
            raise TypeError(
                "the labels are soft (rows of probabilities), and this needs a class for each sample"
            )
        return self._truth

    @property
    def are_soft(self) -> bool:
        """Whether the labels are rows of probabilities."""
        return self._truth.ndim == 2

    @property
    def target(self) -> Target:
        """Labels and weights in the form that calibrators fit to."""
        weights = None if self.weights is None else self.weights / self.weights.mean()
        if self.are_soft:
            return Target(self._truth.argmax(1), self._truth, weights)
        return Target(self._truth, None, weights)

    def with_countable_weights(self) -> Predictions:
        """The same where weights are not tiny, else with weights that bins can count; their ratios stay exact."""
        if self.weights is None or float(self.weights.mean()) >= TINY_WEIGHT:
            return self
        made = copy(self)
        made.weights = self.weights * 2.0 ** -round(math.log2(float(self.weights.mean())))
        return made

    def with_logits(self, logits: ArrayLike) -> Predictions:
        """Other logits for the same labels and weights."""
        made = Predictions(logits, self._truth, self.weights)
        made.n_labels = self.n_labels
        return made

    @property
    def n_classes(self) -> int:
        """K, the number of classes."""
        return self._scores.shape[1]

    @property
    def are_probs(self) -> bool:
        """Whether these predictions came in as probabilities."""
        return self._are_probs

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return read_as(self._scores)

    @property
    def device(self) -> torch.device:
        """Where the predictions lie."""
        return self._scores.device

    @property
    def zero_floor(self) -> float:
        """What a probability of 0 is taken as in a logarithm: the smallest positive one (at most 0.01), divided by K.

        A 0 says only that a probability lies below the resolution of a rounded file or of half precision.
        """
        return max(min(self._smallest.value(), COARSEST) / self.n_classes, torch.finfo(self.dtype).tiny)

    @property
    def logits(self) -> Tensor:
        """(N, K). For probabilities their logarithm, a 0 taken as `zero_floor`."""
        scores = self._scores.to(self.dtype)
        return scores.clamp(min=self.zero_floor).log() if self._are_probs else scores

    @property
    def probs(self) -> Tensor:
        """(N, K), rows summing to 1."""
        # Sums in another order would be rounded differently.
        scores = self._scores.to(self.dtype).contiguous()
        return scores if self._are_probs else softmax_of(scores, self._predicted, torch.empty_like(scores))

    @property
    def predicted(self) -> Tensor:
        """(N,) the class of the largest score, the first one where several are equal."""
        return self._predicted

    @property
    def correct(self) -> Tensor:
        """(N,) bool: whether the predicted class is the label. For soft labels its probability, in float64."""
        with one_thread():
            if self.are_soft:
                return at_classes(self._truth, self._predicted).double()
            return self._predicted == self._truth

    @property
    def confidence(self) -> Tensor:
        """(N,) the probability of the predicted class."""
        return self._confidence

    def top_label(self) -> tuple[Tensor, Tensor]:
        """(N,) `confidence` and (N,) `correct`, for what takes neither weights nor soft labels into account."""
        if self.weights is not None or self.are_soft:
            got = "soft labels" if self.are_soft else "sample weights"
            raise TypeError(f"predictions must have class labels and no weights here, got {got}")
        return self.confidence, self.correct

    def probs_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`probs` and labels, soft ones too, of some rows after the other, in memory that does not grow with N.

        A chunk may lie in the memory of the one before.
        """
        spare = torch.empty(0, dtype=self.dtype, device=self.device)
        for part, scores in chunks(self._scores):
            if self._are_probs:
                yield scores, self._truth[part]
            else:
                probs = softmax_of(scores, self._predicted[part], beside(scores, self._scores, spare))
                yield probs, self._truth[part]

    def score_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The logits (or probs, as they were given) and labels of some rows after the other, as `probs_chunks`."""
        for part, scores in chunks(self._scores):
            yield scores, self._truth[part]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .npz without pickles; the file is written completely or not at all."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"path must end in .npz, got {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        name = "probs" if self._are_probs else "logits"
        arrays = {name: self._scores.to(self.dtype).cpu().numpy(), "labels": self._truth.cpu().numpy()}
        arrays |= {} if self.weights is None else {"weights": self.weights.cpu().numpy()}
        with replacing(path) as temporary:
            np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, tolerance: float = 1e-3) -> Predictions:
        """Read what `save` wrote: arrays `labels` and either `logits` or `probs` (`tolerance` as in `from_probs`)."""
        arrays = read_npz(Path(path))
        known = arrays["labels"], arrays.get("weights")
        if "logits" in arrays:
            return cls(arrays["logits"], *known)
        return cls.from_probs(arrays["probs"], *known, tolerance=tolerance)


def check_predictions(p: Predictions) -> Predictions:
    """`p` itself, or an error where it is something else, such as an array."""
    if not hasattr(p, "top_label"):  # outcomes have it too, and give the metrics of confidences
        raise TypeError(
            f"p must be Predictions, got {type(p).__name__}: give Predictions(logits, labels) or "
            "Predictions.from_probs(probs, labels)"
        )
    return p
