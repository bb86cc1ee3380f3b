"""Binned calibration errors: by hand, against slow references, against peers where they are right."""

import numpy as np
import pytest
import torch

from doublehead import metrics
from doublehead.predictions import Predictions
from doublehead.system import require
from samples import binary


def some(n: int = 3000, seed: int = 0, ties: bool = False) -> tuple[np.ndarray, np.ndarray, Predictions]:
    rng = np.random.default_rng(seed)
    confidence = np.clip(0.5 + 0.5 * rng.beta(4, 1, n), 0.5 + 1e-6, 1)
    confidence = np.round(confidence, 2) if ties else confidence
    correct = rng.random(n) < confidence**1.3
    return confidence, correct, binary(confidence, correct)


def test_ece_by_hand():
    p = binary([0.61, 0.69, 0.95, 1.0], [0, 1, 1, 1])
    # two bins of ten: (0.65 vs 0.5) and (0.975 vs 1)
    assert metrics.ece(p, n_bins=10) == pytest.approx((2 * 0.15 + 2 * 0.025) / 4, abs=1e-9)
    assert metrics.mce(p, n_bins=10) == pytest.approx(0.15, abs=1e-9)
    assert metrics.ece2(p, n_bins=10) == pytest.approx(((2 * 0.15**2 + 2 * 0.025**2) / 4) ** 0.5, abs=1e-9)


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


def test_ece_agrees_with_torchmetrics_where_no_confidence_is_one(resnet110):
    real = resnet110["test"]
    functional = require("torchmetrics.functional.classification", extra="metrics")
    p = Predictions((real.logits * 0.3).double(), real.labels)
    # its edges are float32 values of linspace; float64 confidences lie on none of them
    for norm, ours in (("l1", metrics.ece), ("l2", metrics.ece2), ("max", metrics.mce)):
        theirs = functional.multiclass_calibration_error(p.probs, p.labels, 10, n_bins=15, norm=norm)
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


def test_debiasing_removes_the_floor():
    """Mean over calibrated models: near 0 after the correction, far from it before."""
    assert metrics.debiased_ece(some(10)[2], 15) == 0.0  # bins of one sample
    rng = np.random.default_rng(0)
    squares, plain = [], []
    for _ in range(200):
        confidence = rng.uniform(0.5, 1, 300)
        p = binary(confidence, rng.random(300) < confidence)
        squares.append(metrics.debiased_ece(p) ** 2 if metrics.debiased_ece(p) else 0.0)
        plain.append(metrics.adaptive_ece(p))
    assert np.mean(plain) > 0.05
    assert np.median(squares) ** 0.5 < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: metrics.ece(p, components="both"), "must be 'top', 'all' or 'classwise', got 'both'"),
        (lambda p: metrics.ece(p, n_bins=0), "n_bins must be a whole number >= 1, got 0"),
        (lambda p: metrics.adaptive_ece(p, n_bins=-1), "n_bins must be a whole number >= 1, got -1"),
        (lambda p: metrics.mmce(p, width=0), "width must be a number >= 0.002, got 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(some(10)[2])
