"""Shift detection: by hand, against all pairs, against scikit-learn."""

import numpy as np
import pytest

from doublehead import metrics
from doublehead.predictions import Predictions
from doublehead.system import require


def sides(ties: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(0.8, 0.2, 300), rng.normal(0.6, 0.3, 170)
    return (np.round(positive, 1), np.round(negative, 1)) if ties else (positive, negative)


def test_by_hand():
    positive, negative = [0.9, 0.8, 0.3], [0.8, 0.1]
    # pairs: 0.9 beats both, 0.8 ties one and beats one, 0.3 beats one
    assert metrics.auroc(positive, negative) == pytest.approx((2 + 1.5 + 1) / 6)
    # steps at 0.9 (1 of 1), 0.8 (2 of 3), 0.3 (3 of 4)
    assert metrics.aupr(positive, negative) == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert metrics.fpr95(positive, negative) == pytest.approx(0.5)


@pytest.mark.parametrize("ties", [False, True])
def test_against_sklearn_and_all_pairs(ties):
    sk = require("sklearn.metrics", extra="sklearn")
    positive, negative = sides(ties)
    truth, scores = np.r_[np.ones(300), np.zeros(170)], np.r_[positive, negative]
    assert metrics.auroc(positive, negative) == pytest.approx(sk.roc_auc_score(truth, scores))
    assert metrics.aupr(positive, negative) == pytest.approx(sk.average_precision_score(truth, scores))
    pairs = np.sign(positive[:, None] - negative[None])
    assert metrics.auroc(positive, negative) == pytest.approx((pairs.mean() + 1) / 2)
    threshold = max(t for t in scores if (positive >= t).mean() >= 0.95)
    assert metrics.fpr95(positive, negative) == pytest.approx((negative >= threshold).mean())


def test_twenty_positives_allow_exactly_one_miss():
    positive = np.r_[0.1, np.linspace(0.5, 1, 19)]
    assert metrics.fpr95(positive, [0.2, 0.3]) == 0.0


def test_predictions_by_confidence_and_by_entropy():
    rng = np.random.default_rng(1)
    own = Predictions(rng.normal(size=(200, 5)) * 3, rng.integers(0, 5, 200))
    shifted = Predictions(rng.normal(size=(150, 5)) * 2, rng.integers(0, 5, 150))
    by_confidence = metrics.shift_detection(own, shifted)
    assert by_confidence.auroc == metrics.auroc(own.confidence, shifted.confidence) > 0.5
    entropy = [-(q.probs * q.probs.log()).sum(1) for q in (own, shifted)]
    by_entropy = metrics.shift_detection(own, shifted, by="entropy")
    assert by_entropy.auroc == pytest.approx(metrics.auroc(-entropy[0], -entropy[1]), abs=1e-12)
    assert by_entropy.fpr95 == pytest.approx(metrics.fpr95(-entropy[0], -entropy[1]), abs=1e-12)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"negative must have shape \(N,\) with N >= 1, got \(0,\)"):
        metrics.auroc([0.5], np.zeros(0))
    with pytest.raises(ValueError, match="positive must be finite, got 1 non-finite values"):
        metrics.aupr([np.nan], [0.5])
    p = Predictions([[1.0, 0.0]], [0])
    with pytest.raises(ValueError, match="by must be 'confidence' or 'entropy', got 'norm'"):
        metrics.shift_detection(p, p, by="norm")
