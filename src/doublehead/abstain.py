"""Answer where the confidence is high enough and abstain otherwise: a threshold with a guaranteed error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, Any]"

# Where the search for a threshold starts, each time going down. Fixed before the data are seen, so that the
# guarantee needs only be shared among these starts.
STARTS = [1 - doubt for doubt in (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)]


@dataclass(frozen=True)
class ThresholdChoice:
    """What `choose_threshold` found; `threshold` is None where no threshold carries the guarantee.

    Accept a sample when its confidence is >= `threshold`. `coverage` and `error` are what the data showed, `bound`
    is the upper bound of the true error at that threshold (where there is none: the lowest bound that was seen).
    """

    threshold: float | None
    coverage: float
    n_accepted: int
    error: float
    bound: float
    max_error: float
    confidence: float
    n: int

    def __str__(self) -> str:
        want = f"an error of at most {100 * self.max_error:g} % with {100 * self.confidence:g} % confidence"
        if self.threshold is None:
            return (
                f"No confidence threshold guarantees {want} on these {self.n:,} samples: "
                f"the lowest error that can be guaranteed is {100 * self.bound:.2f} %."
            )
        return (
            f"Accepting confidence >= {_rounded_up(self.threshold)} guarantees {want}: it keeps "
            f"{100 * self.coverage:.1f} % ({self.n_accepted:,} of {self.n:,} samples, observed error "
            f"{100 * self.error:.2f} %)."
        )


def choose_threshold(
    p: Predictions | Tensor, max_error: float = 0.01, confidence: float = 0.95
) -> ThresholdChoice:
    """The lowest confidence threshold for which the error on accepted samples is guaranteed.

    With a chance of at least `confidence` over the draw of `p`, the true error of the accepted samples is at most
    `max_error`, on new data like `p`. `p` must not have been used to train or calibrate the model. Thresholds of
    a fixed list are tested from high to low with the exact binomial (Clopper-Pearson) bound until one fails,
    from eleven fixed starts that share the allowed chance of failure (fixed-sequence testing). For a stream, pass the
    sum of the `threshold_counts` of its parts.

    >>> sure = Predictions([[9.0, 0.0]] * 1000, [0] * 1000)
    >>> print(choose_threshold(sure))  # doctest: +ELLIPSIS
    Accepting confidence >= 0 guarantees an error of at most 1 % with 95 % confidence: it keeps 100.0 % ...
    >>> print(choose_threshold(sure[:100]))  # doctest: +ELLIPSIS
    No confidence threshold guarantees ...: the lowest error that can be guaranteed is 5.25 %.
    """
    for name, value in (("max_error", max_error), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")
    thresholds, starts = _grid()
    counts = p if isinstance(p, Tensor) else threshold_counts(*p.top_label())
    accepted, wrong = counts.cumsum(1).tolist()
    level = (1 - confidence) / len(starts)

    @cache
    def passes(i: int) -> bool:
        errors, kept = wrong[i], accepted[i]
        return errors < max_error * kept and _chance_at_most(errors, kept, max_error) <= level

    # The last threshold reached from any start while every one on the way passes the test.
    reached = [i for start in starts for i in [*takewhile(passes, range(start, len(accepted)))][-1:]]
    best, n = max(reached, default=None), accepted[-1]
    if best is None:
        seen = {(wrong[i], accepted[i]) for i in starts}
        bound = min(clopper_pearson_upper(errors, n_kept, level) for errors, n_kept in seen)
        return ThresholdChoice(None, 0.0, 0, float("nan"), bound, max_error, confidence, n)
    kept, errors = accepted[best], wrong[best]
    bound = clopper_pearson_upper(errors, kept, level)
    return ThresholdChoice(
        float(thresholds[best]), kept / n, kept, errors / kept, bound, max_error, confidence, n
    )


def clopper_pearson_upper(errors: int, n: int, level: float) -> float:
    """The largest error rate under which `errors` or fewer of `n` still have a chance of `level`.

    >>> round(clopper_pearson_upper(0, 299, 0.05), 4)
    0.01
    """
    if not 0 <= errors <= n:
        raise ValueError(f"errors must lie in 0..n = {n}, got {errors}")
    if errors == n:
        return 1.0
    low, high = errors / n, 1.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _chance_at_most(errors, n, middle) > level else (low, middle)
    return high


def _rounded_up(threshold: float) -> str:
    """A threshold in six digits or more, so that what is printed accepts no more than was tested."""
    digits = 6 if threshold >= 1 else max(6, 3 - math.floor(math.log10(1 - threshold)))
    return f"{math.ceil(threshold * 10**digits) / 10**digits:.{digits}g}"


@lru_cache(maxsize=1)
def _log_counts(k: int, n: int) -> Array:
    """(k + 1,) the logarithms of n over 0 .. n over k."""
    i = torch.arange(k + 1, dtype=torch.float64)
    logs: Array = (math.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma(n - i + 1)).numpy()
    return logs


def _chance_at_most(k: int, n: int, rate: float) -> float:
    """P(X <= k) for X binomial(n, rate) with 0 < rate < 1."""
    i = np.arange(k + 1)
    terms = _log_counts(k, n) + i * math.log(rate) + (n - i) * math.log1p(-rate)
    largest = terms.max()  # below the mean the terms increase, so no term that matters underflows
    return float(np.exp(terms - largest).sum() * math.exp(largest))


@cache
def _grid() -> tuple[Tensor, list[int]]:
    """Thresholds from high to low, float32 so that they compare alike in both types, and the places of the starts."""
    doubts = np.concatenate([np.geomspace(1e-6, 1, 601), np.linspace(0, 1, 201)[1:]])
    highest_first = np.unique(np.concatenate([1 - doubts, STARTS]).astype(np.float32))[::-1].copy()
    return torch.from_numpy(highest_first), [int(np.abs(highest_first - start).argmin()) for start in STARTS]


def threshold_counts(
    confidence: Tensor, correct: Tensor, thresholds: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """(2, T): samples (or weight) by the highest threshold that accepts them, and the wrong ones among them.

    Thresholds fall to 0; they are those of `choose_threshold` if not given.
    """
    thresholds = _grid()[0] if thresholds is None else thresholds
    n_at_most = torch.bucketize(confidence.cpu().double(), thresholds.flip(0).double(), right=True)
    highest, wrong = len(thresholds) - n_at_most, ~correct.cpu()
    parts = ((highest, weights), (highest[wrong], None if weights is None else weights[wrong]))
    return torch.stack([torch.bincount(*part, minlength=len(thresholds)) for part in parts])
