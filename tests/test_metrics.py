"""Metrics: by hand, against slow references, against peers where they are right."""

import math

import numpy as np
import pytest
import torch

from doublehead import metrics
from doublehead.predictions import Predictions
from doublehead.summary import Summary
from doublehead.system import require
from samples import binary, overconfident, refused

# --- scores


@pytest.fixture(scope="module")
def p() -> Predictions:
    return overconfident(400, 7, 1.0, spread=2.0, seed=3, dtype=torch.float64)


def test_by_hand():
    p = Predictions.from_probs(np.array([[0.5, 0.5, 0.0], [0.2, 0.7, 0.1]]), [0, 2])
    assert metrics.accuracy(p) == 0.5
    assert metrics.nll(p) == pytest.approx(-(np.log(0.5) + np.log(0.1)) / 2)
    assert metrics.brier(p) == pytest.approx((0.25 + 0.25 + 0.04 + 0.49 + 0.81) / 2)
    entropy = -(np.log(0.5) + 0.2 * np.log(0.2) + 0.7 * np.log(0.7) + 0.1 * np.log(0.1)) / 2
    assert metrics.mean_entropy(p) == pytest.approx(entropy)
    assert metrics.mean_confidence(p) == pytest.approx(0.6)
    assert metrics.overconfidence(p) == pytest.approx(0.1)
    p = Predictions.from_probs(np.array([[1.0, 0.0]], dtype=np.float32), [1])  # finite
    assert metrics.nll(p) == pytest.approx(-math.log(0.01 / 2))
    assert metrics.mean_entropy(p) == 0.0


OF_PREDICTIONS = """accuracy nll brier mean_entropy mean_confidence overconfidence per_sample zero_labels ece mce ece2
adaptive_ece debiased_ece smooth_ece ks_error mmce ece_floor calibration_test aurc risk_coverage"""


@pytest.mark.parametrize("name", OF_PREDICTIONS.split())
def test_an_array_is_no_predictions(name):
    with pytest.raises(TypeError, match=r"p must be Predictions, got ndarray: give Predictions\(logits, lab"):
        getattr(metrics, name)(np.eye(3))


def test_against_sklearn(p):
    sk = require("sklearn.metrics", extra="sklearn")
    probs, labels = p.probs.numpy(), p.labels.numpy()
    assert metrics.accuracy(p) == pytest.approx(sk.accuracy_score(labels, probs.argmax(1)))
    assert metrics.nll(p) == pytest.approx(sk.log_loss(labels, probs, labels=range(7)))
    one_hot = np.eye(7)[labels]
    assert metrics.brier(p) == pytest.approx(((probs - one_hot) ** 2).sum(1).mean())


def test_logits_and_their_probabilities_agree(p):
    q = Predictions.from_probs(p.probs, p.labels)
    assert Summary.of(q).values == pytest.approx(Summary.of(p).values, abs=1e-9)


def test_float32_logits_of_many_classes_keep_their_digits():
    logits, labels = torch.randn(200, 1000) * 5, torch.randint(0, 1000, (200,))
    single, double = Predictions(logits, labels), Predictions(logits.double(), labels)
    for metric in (metrics.nll, metrics.brier, metrics.mean_entropy):
        assert metric(single) == pytest.approx(metric(double), rel=1e-5)


def test_auroc_by_hand():
    # pairs: 0.9 beats both, 0.8 ties one and beats one, 0.3 beats one
    assert metrics.auroc([0.9, 0.8, 0.3], [0.8, 0.1]) == pytest.approx((2 + 1.5 + 1) / 6)
    refused(r"negative must be finite .* with N >= 1, got shape \(0,\)", metrics.auroc, [0.5], np.zeros(0))
    refused("positive must be finite", metrics.auroc, [np.nan], [0.5])


@pytest.mark.parametrize("digits", [1, 9])
def test_auroc_against_sklearn(digits):
    sk, rng = require("sklearn.metrics", extra="sklearn"), np.random.default_rng(0)
    positive, negative = (np.round(rng.normal(*side), digits) for side in ((0.8, 0.2, 300), (0.6, 0.3, 170)))
    truth = np.r_[np.ones(300), np.zeros(170)]
    want = sk.roc_auc_score(truth, np.r_[positive, negative])
    assert metrics.auroc(positive, negative) == pytest.approx(want)


# --- over bins


def some(n: int = 3000, seed: int = 0, ties: bool = False) -> tuple[np.ndarray, np.ndarray, Predictions]:
    rng = np.random.default_rng(seed)
    confidence = np.clip(0.5 + 0.5 * rng.beta(4, 1, n), 0.5 + 1e-6, 1)
    confidence = np.round(confidence, 2) if ties else confidence
    correct = rng.random(n) < confidence**1.3
    return confidence, correct, binary(confidence, correct)


def test_components_by_hand():
    # class 0: 0.75 and 0.25 with labels yes, no; class 1: 0.25 and 0.75 with no, no; class 2 never
    p = Predictions.from_probs([[0.75, 0.25, 0.0], [0.25, 0.75, 0.0]], [0, 2])
    by_class = [(0.25 + 0.25) / 2, (0.25 + 0.75) / 2, 0.5]
    assert metrics.ece(p, 2, "classwise") == pytest.approx(np.mean(by_class), abs=1e-9)
    # pooled over two bins: low {0.25, 0.25, 0, 0} has one label; high {0.75, 0.75} one
    pooled = abs(0.5 - 1) + abs(1.5 - 1)
    assert metrics.ece(p, 2, "all") == pytest.approx(pooled / 2, abs=1e-9)
    never = Predictions.from_probs([[0.5, 0.3, 0.2]] * 4, [0, 1, 0, 1])  # a class that does not occur counts
    assert metrics.ece(never, components="classwise") == pytest.approx((0.0 + 0.2 + 0.2) / 3, abs=1e-9)


def test_ece_agrees_with_torchmetrics_where_no_confidence_is_one(p):
    functional = require("torchmetrics.functional.classification", extra="metrics")
    # its edges are float32 values of linspace; float64 confidences lie on none of them
    for norm, ours in (("l1", metrics.ece), ("l2", metrics.ece2), ("max", metrics.mce)):
        theirs = functional.multiclass_calibration_error(p.probs, p.labels, 7, n_bins=15, norm=norm)
        assert ours(p) == pytest.approx(float(theirs), abs=1e-6)


def test_ece_agrees_with_sklearn_curve():
    calibration = require("sklearn.calibration", extra="sklearn")
    confidence, correct, p = some()
    share, mean = calibration.calibration_curve(correct, confidence, n_bins=20, strategy="uniform")
    counts = np.histogram(confidence, np.linspace(0, 1, 21))[0]
    want = (np.abs(share - mean) * counts[counts > 0]).sum() / len(correct)
    assert metrics.ece(p, 20) == pytest.approx(want, abs=1e-9)


def slow_equal_mass(confidence, correct, n_bins):
    """Per bin (count, mean confidence, accuracy); ties share their mean accuracy."""
    shared = {c: correct[confidence == c].mean() for c in np.unique(confidence)}
    rows = sorted((c, shared[c]) for c in confidence)
    n, n_bins = len(rows), min(n_bins, len(rows))
    bins = [rows[i * n // n_bins : (i + 1) * n // n_bins] for i in range(n_bins)]
    return [(len(b), np.mean([c for c, _ in b]), np.mean([r for _, r in b])) for b in bins]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "n_bins"), [(1000, 15), (30, 10), (7, 15), (1, 15)])
def test_adaptive_against_slow(ties, n, n_bins):
    confidence, correct, p = some(n, ties=ties)
    want = sum(k * abs(c - r) for k, c, r in slow_equal_mass(confidence, correct, n_bins)) / n
    assert metrics.adaptive_ece(p, n_bins) == pytest.approx(want, abs=1e-12)
    assert n_bins != 15 or metrics.adaptive_ece(p) == metrics.adaptive_ece(p, 15)


@pytest.mark.parametrize("metric", [metrics.adaptive_ece, metrics.debiased_ece, metrics.ks_error])
def test_order_of_the_samples_never_matters(metric):
    _, _, p = some(500, ties=True)
    shuffled = p[torch.randperm(500)]
    assert metric(shuffled) == pytest.approx(metric(p), abs=1e-12)


@pytest.mark.parametrize("n_bins", [2, 15])
def test_debiased_against_slow(n_bins):
    confidence, correct, p = some(400)
    bins = slow_equal_mass(confidence, correct, n_bins)
    square = sum(k * ((c - r) ** 2 - r * (1 - r) / (k - 1)) for k, c, r in bins) / 400
    assert metrics.debiased_ece(p, n_bins) == pytest.approx(max(square, 0) ** 0.5, abs=1e-12)
    assert metrics.debiased_ece(some(10)[2], 15) == 0.0  # bins of one sample


def test_bad_input_is_named(p):
    for metric, options, message in (
        (metrics.ece, {"components": "both"}, "must be 'top', 'all' or 'classwise', got 'both'"),
        (metrics.ece, {"n_bins": 0}, "n_bins must be a whole number >= 1, got 0"),
        (metrics.adaptive_ece, {"n_bins": -1}, "n_bins must be a whole number >= 1, got -1"),
        (metrics.mmce, {"width": 0}, "width must be a number >= 0.002, got 0"),
    ):
        refused(message, metric, p, **options)


# --- without bins


def crowded(n: int = 800, seed: int = 0, saturated: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = 0.5 + 0.5 * rng.beta(3, 1, n)
    if saturated:
        confidence[: n // 2] = 1.0
        confidence[n // 2 : 3 * n // 4] = 1 - 1e-6
    return confidence, rng.random(n) < confidence - 0.1 * (confidence > 0.7) + 0.1 * (confidence < 0.6)


def direct_smooth(confidence, correct, width, points=2001):
    """The definition: residuals spread by a Gaussian and its reflections, |sum| integrated by the trapezium rule."""
    t = np.linspace(0, 1, points)
    total = np.zeros_like(t)
    reach = 1 + int(4 * width)
    for image in [side + 2 * turn for side in (confidence, -confidence) for turn in range(-reach, reach + 1)]:
        z = (t[None] - image[:, None]) / width
        total += (confidence - correct) @ np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi)) / len(confidence)
    size = np.abs(total)
    return (size.sum() - 0.5 * (size[0] + size[-1])) / (points - 1)


@pytest.mark.parametrize("saturated", [False, True])
def test_smooth_ece_is_the_width_that_equals_its_own_error(saturated):
    confidence, correct = crowded(saturated=saturated)
    ours = metrics.smooth_ece(binary(confidence, correct))
    assert 0.02 < ours < 0.3
    assert direct_smooth(confidence, correct, ours) == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("width", [0.003, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("saturated", [False, True])
def test_smoothing_against_the_definition(width, saturated):
    confidence, correct = crowded(300, saturated=saturated)
    spectrum = metrics._spectrum(torch.from_numpy(confidence), torch.from_numpy(correct).double())
    ours = metrics._smoothed(spectrum, width)
    assert ours == pytest.approx(direct_smooth(confidence, correct, width, 4001), abs=2e-5)


def test_smooth_ece_when_every_confidence_is_one():
    """All of the residual sits at the border: a tenth is wrong, so the error is a tenth."""
    p = binary(np.ones(1000), np.arange(1000) >= 100)
    assert metrics.smooth_ece(p) == pytest.approx(0.1, abs=1e-9)
    assert metrics.smooth_ece(binary(np.ones(1000), np.ones(1000))) == 0.0


def test_ks_by_hand_and_against_slow():
    # rising order: 0.6 wrong (+0.6), 0.7 right (-0.3), 0.9 right (-0.1)
    assert metrics.ks_error(binary([0.9, 0.6, 0.7], [1, 0, 1])) == pytest.approx(0.6 / 3, abs=1e-12)
    # equal confidences are looked at together, in whatever order they come
    assert metrics.ks_error(binary([0.9, 0.9], [0, 1])) == pytest.approx(0.8 / 2, abs=1e-12)
    assert metrics.ks_error(binary([0.9, 0.9], [1, 0])) == pytest.approx(0.8 / 2, abs=1e-12)
    confidence, correct = crowded(saturated=True)
    confidence = np.round(confidence, 2)
    sums = [(confidence - correct)[confidence <= c].sum() for c in np.unique(confidence)]
    want = np.abs(sums).max() / len(confidence)
    assert metrics.ks_error(binary(confidence, correct)) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("width", [0.4, 0.05, 0.002])
@pytest.mark.parametrize("saturated", [False, True])
def test_mmce_against_all_pairs(width, saturated):
    confidence, correct = crowded(300, saturated=saturated)
    excess = confidence - correct
    kernel = np.exp(-np.abs(confidence[:, None] - confidence[None]) / width)
    want = np.sqrt(excess @ kernel @ excess) / 300
    assert metrics.mmce(binary(confidence, correct), width) == pytest.approx(want, rel=1e-9)


def test_mmce_by_hand():
    # excesses 0.6 and -0.1, kernel exp(-0.3 / 0.4) between them
    want = np.sqrt(0.36 + 0.01 - 2 * 0.06 * np.exp(-0.75)) / 2
    assert metrics.mmce(binary([0.6, 0.9], [0, 1])) == pytest.approx(want, abs=1e-12)
