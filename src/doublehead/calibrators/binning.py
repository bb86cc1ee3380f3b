"""Maps without a formula from probability to frequency: histogram binning, BBQ, isotonic regression."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pad_sequence

from doublehead.bins import check_n_bins
from doublehead.calibration_head import keep_top
from doublehead.calibrators.base import (
    Calibrator,
    lines,
    log_normalise,
    log_odds,
    steps,
    top_log_odds,
    with_top_odds,
)
from doublehead.predictions import Predictions
from doublehead.system import require

BBQ_SPAN = 10.0  # bins tried: from N^(1/3) / 10 to 10 N^(1/3), as in Naeini et al. (2015)
BBQ_PRIOR = 2.0  # the weight of the prior in samples, as there
BBQ_FORGET = 1e-6  # binnings with a smaller share of the posterior are left out
ISOTONIC_FLOOR = 1e-6  # no class is declared impossible: isotonic ends often are exactly 0


class _OddsMap(Calibrator):
    """A step function of log odds, learned as a row of `values_` that all classes share, or as a row for each class."""

    learned = ("edges_", "values_")

    edges_: Tensor  # (1 or K, M - 1) in log odds
    values_: Tensor  # (1 or K, M) probabilities
    kind: str = "one-vs-rest"  # any other name shares one map, which keeps the predicted class

    def _transform(self, logits: Tensor) -> Tensor:
        if not self.keeps_argmax:
            return log_normalise(steps(log_odds(logits), self.edges_, self.values_))
        probs = steps(top_log_odds(logits)[..., None], self.edges_, self.values_)[..., 0]
        return with_top_odds(logits, probs.logit(torch.finfo(probs.dtype).eps))

    def _n_classes(self) -> int | None:
        return None if self.keeps_argmax else self.values_.shape[0]

    @property
    def keeps_argmax(self) -> bool:
        """The predicted class stays on top where all classes share one map; a fitted state alone decides."""
        return self.values_.shape[0] == 1 if self.is_fitted else self.kind != "one-vs-rest"


class HistogramBinning(_OddsMap):
    """Replace probabilities by the frequencies of their bins (Zadrozny & Elkan 2001). Use it as a simple repair.

    `kind="top"` recalibrates only the confidence and keeps the predicted class; `"one-vs-rest"` every class, normalised
    to sum to 1. Each bin has as many samples; bins are right-closed. A bin counts `smoothing` samples of its own mean
    confidence more (the bin's middle if empty), so that no probability becomes 0 or 1 because of few samples.

    >>> p = Predictions.from_binary([0.8] * 4 + [0.3] * 4, [1, 1, 0, 0, 0, 0, 0, 1], are_probs=True)
    >>> h = HistogramBinning(n_bins=2, kind="one-vs-rest", smoothing=0).fit(p)
    >>> h.calibrate(p).probs[[0, 4], 1].round(decimals=6).tolist()
    [0.5, 0.25]
    """

    def __init__(
        self, n_bins: int = 15, kind: Literal["top", "one-vs-rest"] = "top", smoothing: float = 1.0
    ) -> None:
        super().__init__()
        self.n_bins, self.kind, self.smoothing = n_bins, kind, smoothing

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        check_n_bins(self.n_bins)
        if self.kind not in ("top", "one-vs-rest"):
            raise ValueError(f"kind must be 'top' or 'one-vs-rest', got {self.kind!r}")
        if not self.smoothing >= 0:
            raise ValueError(f"smoothing must be at least 0, got {self.smoothing}")
        odds, hits = _odds_and_hits(predictions, self.kind, ties=True)
        edges = _equal_mass(odds, self.n_bins)
        which = torch.searchsorted(edges, odds)
        zeros = odds.new_zeros(len(odds), self.n_bins)
        counts, hit_sums, conf_sums = (
            zeros.scatter_add(1, which, part) for part in (torch.ones_like(odds), hits, odds.sigmoid())
        )
        prior = torch.where(counts > 0, conf_sums / counts.clamp(min=1), _middles(edges))
        total = counts + self.smoothing
        filled = (hit_sums + self.smoothing * prior) / total.clamp(min=torch.finfo(odds.dtype).tiny)
        return {"edges_": edges, "values_": torch.where(total > 0, filled, prior)}


class BBQ(_OddsMap):
    """Histograms of many bin counts, averaged by their evidence (Naeini et al. 2015). Use it to avoid choosing n_bins.

    One map for every class, normalised to sum to 1. The average of step functions is one step function, and is kept
    as such.
    """

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        odds, hits = _odds_and_hits(predictions, self.kind, ties=True)
        odds, order = odds.sort(1)
        n = odds.shape[1]
        below = pad(hits.gather(1, order).cumsum(1), (1, 0))  # (K, N + 1) hits among the first i
        root = n ** (1 / 3)
        tried = range(max(1, int(root / BBQ_SPAN)), min(n, int(BBQ_SPAN * root) + 1) + 1)
        fits = [_score_binning(odds, below, n_bins) for n_bins in tried]
        weights = torch.stack([score for score, _, _ in fits]).softmax(0)  # (tried, K)
        weights = torch.where(weights > BBQ_FORGET, weights, 0.0)
        values, places = torch.zeros_like(odds), torch.arange(n, device=odds.device).repeat(len(odds), 1)
        for weight, (_, cuts, probs) in zip(weights / weights.sum(0), fits):
            if bool(weight.any()):
                values += weight[:, None] * probs.gather(1, torch.searchsorted(cuts, places, right=True))
        maps = [_compress(*row) for row in zip(odds, values)]
        return _side_by_side("edges_", maps)


class Isotonic(_OddsMap):
    """A non-decreasing map of probabilities, by scikit-learn. Use it with thousands of samples, where no formula fits.

    `kind="shared"` fits one map to all classes together and keeps the predicted class (IRM of Zhang et al. 2020);
    `"one-vs-rest"` fits one map per class, normalised to sum to 1. Between samples the map is linear in the log odds.
    """

    learned = ("knots_", "values_")

    knots_: Tensor  # (1 or K, M) in log odds

    def __init__(self, kind: Literal["shared", "one-vs-rest"] = "shared") -> None:
        super().__init__()
        self.kind = kind

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if self.kind not in ("shared", "one-vs-rest"):
            raise ValueError(f"kind must be 'shared' or 'one-vs-rest', got {self.kind!r}")
        odds, hits = _odds_and_hits(predictions, "one-vs-rest")
        if self.kind == "shared":
            odds, hits = odds.reshape(1, -1), hits.reshape(1, -1)
        regression = require("sklearn.isotonic", extra="calibrators").IsotonicRegression(y_min=0.0, y_max=1.0)
        maps = []
        for column in zip(odds.cpu().numpy(), hits.cpu().numpy()):
            fitted = regression.fit(*column)
            knots, values = (
                torch.as_tensor(x).double() for x in (fitted.X_thresholds_, fitted.y_thresholds_)
            )
            # At least two of each, for `lines`.
            maps.append((knots, values) if len(knots) > 1 else (knots.repeat(2), values.repeat(2)))
        return _side_by_side("knots_", maps)

    def _transform(self, logits: Tensor) -> Tensor:
        odds = log_odds(logits)
        if not self.keeps_argmax:
            return log_normalise(lines(odds, self.knots_, self.values_), ISOTONIC_FLOOR)
        mapped = lines(odds[..., None], self.knots_, self.values_)[..., 0]
        return keep_top(log_normalise(mapped, ISOTONIC_FLOOR), logits)


def _side_by_side(name: str, maps: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Places (M_c,) and values (M_c,) of each class's map as rows: no odds reach the places that fill a row up."""
    places, values = map(list, zip(*maps))
    return {name: pad_sequence(places, True, torch.inf), "values_": pad_sequence(values, True)}


def _odds_and_hits(predictions: Predictions, kind: str, ties: bool = False) -> tuple[Tensor, Tensor]:
    """Log odds (C, N) and whether each came true (C, N), in float64; C = 1 for the top class.

    With `ties` odds are those of float32. Odds of rounded logits that are equal in theory differ in the last digits of
    float64, by the order of the classes and the CPU.
    """
    logits = predictions.logits.double()
    if kind == "top":
        odds, hits = top_log_odds(logits)[None], predictions.correct.double()[None]
    else:
        odds, hits = log_odds(logits).T, one_hot(predictions.labels, predictions.n_classes).T.double()
    return (odds.float().double() if ties else odds).contiguous(), hits


def _equal_mass(odds: Tensor, n_bins: int) -> Tensor:
    """(C, n_bins - 1) edges midway between neighbours, where each bin gets N / n_bins of them.

    Equal odds stay together above the edge, so that the last bin is never empty; only the lowest stay below it. No edge
    lies at odds that occur, where a rounding would move them into another bin: it is -inf if all are equal.
    """
    ordered = odds.sort(1).values
    n = odds.shape[1]
    cuts = (torch.arange(1, n_bins, device=odds.device) * n / n_bins).round().long().clamp(0, n - 1)
    at_cut = ordered[:, cuts].contiguous()
    first, end = (torch.searchsorted(ordered, at_cut, right=right) for right in (False, True))
    above = first.where(first > 0, end)  # the first place above the edge; n if all are equal
    middles = (ordered.gather(1, above - 1) + ordered.gather(1, above.clamp(max=n - 1))) / 2
    return middles.where(above < n, -torch.inf)


def _middles(edges: Tensor) -> Tensor:
    """(C, M) the middles of bins with these inner edges (C, M - 1), as probabilities."""
    bounds = pad(pad(edges.sigmoid(), (1, 0)), (0, 1), value=1.0)
    return (bounds[:, 1:] + bounds[:, :-1]) / 2


def _score_binning(odds: Tensor, below: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """For sorted odds (C, N): the log evidence (C,) of equal-mass bins, their inner bounds (C, B - 1) as counts of
    samples below, and their probabilities (C, B)."""
    edges = _equal_mass(odds, n_bins)
    inner = torch.searchsorted(odds, edges, right=True)
    cuts = pad(pad(inner, (1, 0)), (0, 1), value=odds.shape[1])
    middle = _middles(edges).clamp(1e-6, 1 - 1e-6)
    strength = BBQ_PRIOR / n_bins
    hits, counts = below.gather(1, cuts).diff(), cuts.diff().to(odds.dtype)  # int64 plus a number is float32
    ones, zeros = strength * middle, strength * (1 - middle)  # the bin's beta prior
    evidence = torch.lgamma(hits + ones) - torch.lgamma(ones)
    evidence += torch.lgamma(counts - hits + zeros) - torch.lgamma(zeros)
    evidence += torch.lgamma(torch.full_like(ones, strength)) - torch.lgamma(counts + strength)
    return evidence.sum(1), inner, (hits + ones) / (counts + strength)


def _compress(odds: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Edges (M - 1,) and values (M,) of the step function with these values (N,) at sorted odds (N,)."""
    change = (values.diff() != 0).nonzero()[:, 0]
    last = change.new_tensor([len(odds) - 1])
    return (odds[change] + odds[change + 1]) / 2, values[torch.cat([change, last])]
