"""Numbers about predictions, as fractions: calibration errors, proper scores, floor and intervals, risk and coverage.

Calibration errors say how far confidence is from accuracy; 0 is perfect.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead.bins import UNIT, Bins, check_n_bins
from doublehead.predictions import Predictions, check_predictions
from doublehead.score_arrays import BITS, ArrayLike, Target, as_float_tensor
from doublehead.torch_tools import one_thread

Components: TypeAlias = Literal["top", "all", "classwise"]
Array: TypeAlias = "np.ndarray[Any, Any]"

MESH = 1 << 15  # intervals of 0..1 on which smooth ECE is worked out
# Confidences within 1/960 of each other share one binomial draw: variance off by under 1e-7 a sample.
CELLS = 960
DRAWS = 1000  # of a floor and a bootstrap; a test takes twice as many
LEVEL = 0.95  # of intervals


class Floor(NamedTuple):
    """What a perfectly calibrated model with the same confidences scores: mean, 5th and 95th percentile."""

    mean: float
    low: float
    high: float


class CalibrationTest(NamedTuple):
    """An ECE and the chance that a perfectly calibrated model with the same confidences reaches it."""

    ece: float
    p_value: float


class Interval(NamedTuple):
    """A number and its interval; the bounds are nan where no interval is known."""

    estimate: float
    low: float
    high: float


class RiskCoverage(NamedTuple):
    """Error among the accepted samples (`risk`) when those of at least `threshold` confidence are accepted.

    Each is (M,) float64, one entry per distinct confidence, from the highest threshold to accepting everything.
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor


# --- accuracy, proper scores, AUROC


def accuracy(p: Predictions) -> float:
    """The share of samples whose predicted class is the label; of soft labels the expected share."""
    return mean_of(check_predictions(p), p.correct)


def nll(p: Predictions) -> float:
    """Negative log-likelihood (nats per sample) of the labels: the proper score that punishes confident errors most.

    A label of probability exactly 0 counts as `Predictions.zero_floor`.

    >>> round(nll(Predictions.from_probs([[0.5, 0.5], [0.25, 0.75]], [0, 0])), 4)
    1.0397
    """
    return mean_of(p, per_sample(p)["nll"])


def brier(p: Predictions) -> float:
    """Brier score: squared differences between probs and the one-hot label, summed over classes; 0..2.

    A proper score that stays bounded, so a few confident errors do not decide it. For soft labels, the expected
    score of a label drawn from them.

    >>> brier(Predictions.from_probs([[0.5, 0.5], [0.25, 0.75]], [0, 0]))
    0.8125
    """
    return mean_of(p, per_sample(p)["brier"])


def mean_entropy(p: Predictions) -> float:
    """The mean Shannon entropy (nats) of the predicted distributions: how undecided the model is."""
    return mean_of(p, per_sample(p)["entropy"])


def mean_confidence(p: Predictions) -> float:
    """The mean probability of the predicted class."""
    return mean_of(check_predictions(p), p.confidence)


def overconfidence(p: Predictions) -> float:
    """Mean confidence minus accuracy: positive for an overconfident model, negative for an underconfident one."""
    return mean_confidence(p) - accuracy(p)


def mean_of(p: Predictions, values: Tensor) -> float:
    """The mean over samples (N,), weighted where there are weights."""
    values = values.double()
    return float(values.mean() if p.weights is None else (values * p.weights).sum() / p.weights.sum())


def per_sample(p: Predictions) -> dict[str, Tensor]:
    """(N,) float64 each: "nll", "brier" and "entropy" of every sample, in one chunked pass."""
    parts: dict[str, list[Tensor]] = {"nll": [], "brier": [], "entropy": []}
    for scores, labels in check_predictions(p).score_chunks():
        # clamped: a probability of 0 adds 0 to the entropy and a finite NLL
        logs = scores.clamp(min=p.zero_floor).log() if p.are_probs else scores.log_softmax(1)  # (B, K)
        probs = scores if p.are_probs else logs.exp()
        truth = Target(labels) if labels.ndim == 1 else Target(labels, labels)
        at_label = truth.of(probs).double()
        parts["nll"].append(-truth.of(logs).double())
        parts["brier"].append(probs.square().sum(1).double() - 2 * at_label + 1)
        parts["entropy"].append(-(probs * logs).sum(1).double())
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def zero_labels(p: Predictions) -> Tensor:
    """(N,) bool: where the label has a probability of exactly 0, so its NLL depends on `Predictions.zero_floor`."""
    if not check_predictions(p).are_probs:
        return torch.zeros(len(p), dtype=torch.bool, device=p.device)
    return torch.cat([scores.gather(1, labels[:, None])[:, 0] == 0 for scores, labels in p.score_chunks()])


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """The chance that a positive scores above a negative, a tie counting half (area under the ROC curve)."""
    own, other = (
        as_float_tensor(side, name).double()
        for side, name in ((positive, "positive"), (negative, "negative"))
    )
    for name, side in (("positive", own), ("negative", other)):
        if side.ndim != 1 or len(side) == 0 or not bool(torch.isfinite(side).all()):
            raise ValueError(f"{name} must be finite numbers (N,) with N >= 1, got shape {tuple(side.shape)}")
    other = other.sort().values
    below, up_to = (torch.searchsorted(other, own, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(other))


# --- calibration errors over bins


def ece(p: Predictions, n_bins: int = 15, components: Components = "top") -> float:
    """Expected calibration error: the mean |confidence - accuracy| over bins of equal width.

    "top" looks at the confidence in the predicted class: the number most papers report. "classwise" averages the
    errors of the K one-versus-rest problems: use it when each class's probability is used, not only the largest.
    "all" pools all N*K probabilities into one set of bins and divides the pooled error by N, as in the Annealing
    Double-Head paper's tables.

    A perfectly calibrated model does not score 0 on finite data: see `ece_floor`.

    >>> p = Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])
    >>> ece(p), ece(p, components="all")
    (0.25, 0.5)
    """
    if components not in ("top", "all", "classwise"):
        raise ValueError(f"components must be 'top', 'all' or 'classwise', got {components!r}")
    if components == "top":
        return float(_top_bins(p, n_bins).ece())
    classwise = Bins.classwise(check_predictions(p).with_countable_weights(), n_bins)
    return float(classwise.ece().mean()) if components == "classwise" else pooled_ece(classwise)


def pooled_ece(classwise: Bins) -> float:
    """`ece` of all components, from class-wise bins (K, n_bins). Pooled counts of weights may exceed an int64."""
    return float(classwise.excess.sum(0).abs().sum() / classwise.mass[0].sum())


def mce(p: Predictions, n_bins: int = 15) -> float:
    """Maximum calibration error: the largest |confidence - accuracy| of any bin.

    Use it where the worst confidence matters. Bins with few samples dominate it, so look at the counts.
    """
    return float(_top_bins(p, n_bins).mce())


def ece2(p: Predictions, n_bins: int = 15) -> float:
    """Root mean squared calibration error over bins of equal width; large gaps weigh more than in `ece`."""
    return float(_top_bins(p, n_bins).ece2())


def adaptive_ece(p: Predictions, n_bins: int = 15) -> float:
    """ECE over bins that hold equally many samples (sizes differ by at most one).

    Use it when most confidences crowd near 1 and leave equal-width bins empty. Samples of equal confidence count
    with their common accuracy, so their order never matters; with fewer samples than bins each sample is a bin.

    >>> adaptive_ece(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1]), n_bins=2)
    0.25
    """
    counts, excess, _ = _equal_mass(p, n_bins)
    return float(excess.abs().sum() / counts.sum())


def debiased_ece(p: Predictions, n_bins: int = 15) -> float:
    """Calibration error with the part removed that chance alone puts into equal-mass bins (Kumar et al. 2019).

    Use it to compare models on test sets of different or small size, beside `ece2`. The variance of a bin's accuracy
    is subtracted from its squared gap, and the root is taken of their mean: 0 where noise explains everything.
    """
    counts, excess, right = _equal_mass(p, n_bins)
    gap, hit = excess / counts, right / counts
    # A bin of one sample says nothing about its own variance and counts as 0.
    squares = (gap.square() - hit * (1 - hit) / (counts - 1)).where(counts > 1, 0.0)
    return float(((counts * squares).sum() / counts.sum()).clamp(min=0).sqrt())


def _top_bins(p: Predictions, n_bins: int) -> Bins:
    return Bins.top(check_predictions(p).with_countable_weights(), n_bins)


# --- without bins


def ks_error(p: Predictions) -> float:
    """Kolmogorov-Smirnov calibration error (Gupta et al. 2021): the largest |sum of confidence - correct| / N.

    Each sum runs over all samples up to some confidence. Free of bins and of any parameter; use it when a
    number must not depend on a choice. It is at least |overconfidence|, which is the sum over everything.

    >>> ks_error(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1]))
    0.25
    """
    ordered, right = _by_confidence(p)
    last_of_group = np.append(np.diff(ordered) > 0, True)
    return float(np.abs((ordered - right).cumsum()[last_of_group]).max() / len(p))


def smooth_ece(p: Predictions) -> float:
    """Smooth ECE (Blasiok and Nakkiran 2023): ECE after smoothing with a Gaussian of the right width.

    A sample's confidence - correct is spread over 0..1 by a Gaussian reflected at both ends, so all of it stays
    inside; the error is the integral of |sum|. The width is the one that equals the error, which makes the number
    continuous in the confidences and free of parameters. Widths down to 1e-3 are resolved.

    >>> round(smooth_ece(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])), 3)
    0.25
    """
    spectrum = _spectrum(*(column.double() for column in check_predictions(p).top_label()))
    low, high = 0.0, 1.0
    while high - low > 1e-7:  # the error falls as the width grows, so they meet once
        width = (low + high) / 2
        if _smoothed(spectrum, width) > width:
            low = width
        else:
            high = width
    return _smoothed(spectrum, high)


def mmce(p: Predictions, width: float = 0.4) -> float:
    """Maximum mean calibration error (Kumar et al. 2018) with the kernel exp(-|difference| / width).

    The root of the mean over all pairs of (confidence - correct)(confidence' - correct') kernel. A bin-free
    metric with a kernel of fixed width; sorting and running sums make it O(N log N) instead of O(N^2).

    >>> round(mmce(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])), 6)
    0.25
    """
    if not 0.002 <= width < float("inf"):
        raise ValueError(f"width must be a number >= 0.002, got {width!r}")
    ordered, right = _by_confidence(p)
    excess = ordered - right
    growth = np.exp((ordered - 0.5) / width)  # exp(-(c_j - c_i) / width) = growth_i / growth_j for c_i <= c_j
    before = (excess * growth).cumsum() - excess * growth
    pairs = (excess**2).sum() + 2 * (excess * before / growth).sum()
    return float(max(pairs, 0.0) ** 0.5 / len(p))


def _by_confidence(p: Predictions) -> tuple[Array, Array]:
    """Confidences (N,) in rising order, and whether each was correct (1 or 0), both float64.

    The bits of floats >= 0, read as whole numbers, are in their order, and the first one is 0. Moved up by one, they
    leave room for the answer: sorting these numbers is faster than sorting floats with their places.
    """
    floats, correct = (column.cpu().numpy() for column in check_predictions(p).top_label())
    keys = np.sort((floats.view(BITS[floats.itemsize]) << 1) | correct)
    return (keys >> 1).view(floats.dtype).astype(np.float64), (keys & 1).astype(np.float64)


@one_thread()  # the operations are too short to share
def _equal_mass(p: Predictions, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, sums of confidence minus accuracy, and sums of accuracy of `n_bins` bins (at most N) of equal mass.

    Each sample of a group of equal confidences counts with the group's accuracy.
    """
    ordered, right = _by_confidence(p)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))  # of the groups
    size = np.diff(starts, append=len(ordered))
    accuracy = np.repeat(np.add.reduceat(right, starts) / size, size)
    n_bins = min(check_n_bins(n_bins), len(ordered))
    edges = torch.arange(n_bins + 1) * len(ordered) // n_bins
    columns = torch.from_numpy(np.stack([ordered, accuracy]))
    conf_sums, right_sums = torch.cat([columns.new_zeros(2, 1), columns.cumsum(1)], 1)[:, edges].diff()
    return edges.diff().double(), conf_sums - right_sums, right_sums


def _spectrum(confidence: Tensor, correct: Tensor) -> Array:
    """The spectrum of the mean confidence - correct on a mesh of 0..1 and its mirror image, a circle of length 2.

    Each sample is shared between the two mesh points around it.
    """
    left = (confidence * MESH).floor().clamp(max=MESH - 1)
    share = confidence * MESH - left
    excess = (confidence - correct) / len(confidence)
    mesh = torch.zeros(MESH + 1, dtype=torch.float64, device=confidence.device)
    mesh.index_add_(0, left.long(), excess * (1 - share)).index_add_(0, left.long() + 1, excess * share)
    mesh[[0, MESH]] *= 2  # the ends meet their own image
    points = mesh.cpu().numpy()
    spectrum: Array = np.fft.rfft(np.concatenate([points, points[-2:0:-1]]))
    return spectrum


def _smoothed(spectrum: Array, width: float) -> float:
    """The integral over 0..1 of |the points smoothed by a Gaussian|, from the spectrum of the mirrored points."""
    frequency = np.pi * np.arange(len(spectrum))  # of a circle of length 2
    density = np.fft.irfft(spectrum * np.exp(-0.5 * (frequency * width) ** 2))[: MESH + 1] * MESH
    size = np.abs(density)
    return float((size.sum() - 0.5 * (size[0] + size[-1])) / MESH)


# --- how much of a number is chance


def ece_floor(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> Floor:
    """ECE of a perfectly calibrated model with these confidences, its answers drawn from them 1,000 times.

    Binned ECE of a perfect model is not 0 on finite data. An ECE within low..high cannot be distinguished from
    perfect on this many samples; print it beside every ECE. For a stream, pass top-label bins finer than `n_bins` by
    a whole factor (`Bins.top(p, fine_bins(15))`); the cost does not depend on the number of samples.

    >>> sure = Predictions.from_probs([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    >>> ece_floor(sure)
    Floor(mean=0.0, low=0.0, high=0.0)
    """
    return _floor(_ece_and_draws(p, n_bins, DRAWS, seed)[1])


def calibration_test(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> CalibrationTest:
    """Test whether the confidences in the predicted class are calibrated: a small p-value says they are not.

    The p-value is the share of 2,000 perfectly calibrated models with the same confidences whose ECE is as large as
    this one. It is at or below 0.05 for at most 5 % of calibrated models, whatever n_bins and N are. With many
    samples it finds differences too small to matter, so read it beside the ECE itself.

    >>> calibration_test(Predictions([[2.0, 0.0]] * 100, [1] * 100)).p_value < 0.001
    True
    """
    return floor_and_test(p, n_bins, seed)[1]


def floor_and_test(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> tuple[Floor, CalibrationTest]:
    """`ece_floor` and `calibration_test` from the same draws, so that neither costs extra."""
    observed, draws = _ece_and_draws(p, n_bins, 2 * DRAWS, seed)
    as_large = int((draws >= observed - 1e-12).sum())
    return _floor(draws[:DRAWS]), CalibrationTest(observed, (1 + as_large) / (1 + len(draws)))


def bootstrap(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> dict[str, Interval]:
    """95 % intervals of mean_confidence, overconfidence, ece, ece2 and mce by the Poisson bootstrap, and of accuracy.

    Each sample counts a Poisson(1) number of times. Samples of one fine bin and the same correctness share their mean
    confidence, so only the counts of such cells are drawn, at a cost that does not depend on N. For a stream, pass
    top-label bins as in `ece_floor`. An interval holds the middle 95 % of the draws, shifted so that their mean is
    the estimate: resampling adds noise of its own, which would push an ECE above its own value. The interval of an
    ECE is about the ECE at this N, floor included. The interval of the accuracy is Wilson's, which holds where all
    answers are correct too: no draw of those has a wrong one.

    >>> interval = bootstrap(Predictions([[2.0, 0.0]] * 50, [0] * 40 + [1] * 10))["accuracy"]
    >>> interval.estimate, 0.65 < interval.low < 0.75, 0.85 < interval.high < 0.95
    (0.8, True, True)
    """
    c, rng = _Cells.of(p, n_bins), np.random.default_rng(seed)
    wrong, each = c.mass - c.right, c.mass / c.n  # the weight of a sample
    drawn_right, drawn_wrong = (
        rng.poisson(part / each, (DRAWS, len(each))) * each for part in (c.right, wrong)
    )
    some = np.flatnonzero((drawn_right + drawn_wrong).sum(1))  # of few samples a draw may hold none
    if len(some):
        drawn_right, drawn_wrong = drawn_right[some], drawn_wrong[some]
    draws = c.metrics(drawn_right, drawn_wrong)
    values = {name: float(found[0]) for name, found in c.metrics(c.right[None], wrong[None]).items()}
    values |= {"ece": float(c.bins.ece()), "mce": float(c.bins.mce()), "ece2": float(c.bins.ece2())}
    found = {name: _interval(value, draws[name], name) for name, value in values.items()}
    n = float(c.mass.sum() ** 2) / max(float(c.bins.mass_of_squares.sum()), 1 / UNIT)
    return found | {"accuracy": _wilson(values["accuracy"], n)}


def fine_bins(n_bins: int) -> int:
    """The smallest multiple of `n_bins` that is at least 960: bins fine enough for `ece_floor`."""
    return check_n_bins(n_bins) * -(-CELLS // n_bins)


def _ece_and_draws(p: Predictions | Bins, n_bins: int, n_draws: int, seed: int) -> tuple[float, Array]:
    """The ECE of `p` and (n_draws,) those of perfectly calibrated models with its confidences."""
    c = _Cells.of(p, n_bins)
    drawn = np.random.default_rng(seed).binomial(c.n, c.confidence, size=(n_draws, len(c.n))) * (c.mass / c.n)
    correct = np.concatenate([c.right[None], drawn])  # (1 + n_draws, cells)
    errors: Array = np.abs(np.add.reduceat(c.conf_sums - correct, c.first, axis=1)).sum(1) / c.mass.sum()
    return float(errors[0]), errors[1:]


def _floor(draws: Array) -> Floor:
    low, high = np.quantile(draws, [0.05, 0.95])
    return Floor(float(draws.mean()), float(low), float(high))


class _Cells(NamedTuple):
    """The fine top-label bins that hold any sample, (cells,) each."""

    mass: Array  # total weight
    n: Array  # effective count
    conf_sums: Array
    confidence: Array  # mean
    right: Array  # weight of correct answers
    first: Array  # the first cell of each of the `bins`
    bins: Bins  # (n_bins,)

    @classmethod
    def of(cls, p: Predictions | Bins, n_bins: int) -> _Cells:
        fine = (p if isinstance(p, Bins) else _top_bins(p, fine_bins(n_bins))).to("cpu")
        if fine.counts.ndim != 1 or fine.n == 0:
            raise ValueError(
                f"bins must be top-label bins with samples, got shape {tuple(fine.counts.shape)}, n {fine.n}"
            )
        bins = fine.coarsen(n_bins)
        cells = fine.counts.numpy().nonzero()[0]
        mass, conf_sums = fine.mass.double().numpy()[cells], fine.conf_sums.numpy()[cells] / UNIT
        right = fine.correct_sums.double().numpy()[cells] / (1 if fine.squares is None else UNIT)
        first = np.unique(cells // (fine.n_bins // n_bins), return_index=True)[1]
        n, confidence = fine.effective.numpy()[cells], np.clip(conf_sums / mass, 0, 1)
        return cls(mass, n, conf_sums, confidence, right, first, bins)

    def metrics(self, right: Array, wrong: Array) -> dict[str, Array]:
        """Counts of right and wrong answers (D, cells) -> each metric (D,)."""
        counts = np.add.reduceat(right + wrong, self.first, axis=1)  # (D, bins that hold any sample)
        excess = np.add.reduceat((right + wrong) * self.confidence - right, self.first, axis=1)
        n = np.maximum(counts.sum(1), 1e-300)
        accuracy, gap = right.sum(1) / n, excess / np.maximum(counts, 1e-300)
        return {
            "accuracy": accuracy,
            "mean_confidence": excess.sum(1) / n + accuracy,
            "overconfidence": excess.sum(1) / n,
            "ece": np.abs(excess).sum(1) / n,
            "ece2": np.sqrt((excess * gap).sum(1) / n),
            "mce": np.abs(gap).max(1),
        }


def _interval(estimate: float, draws: Array, name: str) -> Interval:
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = (float(bound) for bound in np.quantile(draws - draws.mean() + estimate, tails))
    if name == "overconfidence":
        return Interval(estimate, low, high)
    return Interval(estimate, max(0.0, low), min(1.0, high))


def _wilson(share: float, n: float) -> Interval:
    """The score interval of a share of n samples."""
    z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    middle, reach = share + z2 / (2 * n), (z2 * (share * (1 - share) + z2 / (4 * n)) / n) ** 0.5
    low, high = ((middle + side * reach) / (1 + z2 / n) for side in (-1, 1))
    return Interval(share, min(share, max(0.0, low)), max(share, min(1.0, high)))


# --- risk and coverage


def risk_coverage(p: Predictions) -> RiskCoverage:
    """The risk-coverage curve: what error is left when only the most confident share is answered.

    >>> curve = risk_coverage(Predictions.from_probs([[0.9, 0.1], [0.6, 0.4]], [0, 1]))
    >>> curve.coverage.tolist(), curve.risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    threshold, size, wrong = _groups(p)
    accepted = size.cumsum(0)
    return RiskCoverage(accepted / accepted[-1], wrong.cumsum(0) / accepted, threshold)


def aurc(p: Predictions) -> float:
    """Area under the risk-coverage curve: the mean error of the n most confident samples, over n = 1..N.

    Use it to compare confidences for abstaining; 0 is perfect. It rewards ranking right answers above wrong ones,
    not calibration. Samples of equal confidence are taken in the mean over all their orders.

    >>> aurc(Predictions.from_probs([[0.9, 0.1], [0.6, 0.4]], [0, 1]))
    0.25
    """
    check_predictions(p).top_label()  # refuses weights, which the curve of outcomes takes
    _, size, wrong = _groups(p)
    share = (wrong / size).repeat_interleave(size.long(), output_size=len(p))
    accepted = torch.arange(1, len(p) + 1, device=share.device, dtype=torch.float64)
    return float((share.cumsum(0) / accepted).mean())


def _groups(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct confidences from high to low, how many samples (or what weight) have each and are wrong there."""
    known = isinstance(check_predictions(p), Predictions)
    confidence, correct = p.top_label() if known else (p.confidence, p.correct)
    values, group = confidence.double().unique(return_inverse=True)
    weights = torch.ones_like(confidence, dtype=torch.float64) if p.weights is None else p.weights
    size, wrong = (
        torch.zeros_like(values).index_add_(0, group, part) for part in (weights, weights * ~correct)
    )
    seen = size > 0  # not where all weights are 0
    return values[seen].flip(0), size[seen].flip(0), wrong[seen].flip(0)
