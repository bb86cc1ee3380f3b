"""Curves: the numbers behind the pictures, by hand, against slow references and on real predictions."""

import numpy as np
import pytest
import torch

from doublehead import Bins, Predictions, curves
from doublehead.curves import class_gaps, reliability, risk_coverage_curve
from doublehead.metrics import ece, ece_floor, fine_bins, risk_coverage
from samples import binary, overconfident, refused


def random_predictions(n: int = 3000, k: int = 5, sharpness: float = 2.0) -> Predictions:
    return overconfident(n, k, factor=1.0, spread=sharpness, seed=1, dtype=torch.float64)


def test_reliability_by_hand() -> None:
    p = binary([0.6, 0.7, 0.9, 0.9], [True, False, True, True])
    curve = reliability(p, n_bins=5)
    # 0.6 belongs to the right-closed bin (0.4, 0.6], 0.7 to (0.6, 0.8]
    assert curve.counts.tolist() == [0, 0, 1, 1, 2]
    np.testing.assert_allclose(curve.edges, [0, 0.2, 0.4, 0.6, 0.8, 1])
    np.testing.assert_allclose(curve.confidence[2:], [0.6, 0.7, 0.9], atol=1e-9)
    np.testing.assert_allclose(curve.accuracy[2:], [1, 0, 1])
    np.testing.assert_allclose(curve.gap[2:], [-0.4, 0.7, -0.1], atol=1e-9)
    for column in (curve.confidence, curve.accuracy, curve.gap, curve.band_low, curve.band_high):
        assert np.isnan(column[:2]).all()
        assert not np.isnan(column[2:]).any()
    assert curve.ece == pytest.approx((0.4 + 0.7 + 2 * 0.1) / 4, abs=1e-9)
    assert curve.n == 4
    assert curve.outside.tolist() == [False] * 5  # one or two samples prove nothing
    certain = reliability(binary([1.0, 1.0], [True, False]))
    assert (certain.band_low[-1], certain.band_high[-1], certain.outside[-1]) == (1.0, 1.0, True)


def test_reliability_agrees_with_the_metrics_and_with_bins_of_a_stream() -> None:
    p = random_predictions()
    curve = reliability(p, n_bins=10)
    assert curve.ece == ece(p, n_bins=10)
    assert curve.floor == ece_floor(p, n_bins=10)
    streamed = reliability(Bins.top(p[:1000], fine_bins(10)) + Bins.top(p[1000:], fine_bins(10)), n_bins=10)
    for name in ("counts", "confidence", "accuracy", "band_low", "band_high"):
        np.testing.assert_array_equal(getattr(curve, name), getattr(streamed, name))


@pytest.mark.parametrize(("n", "p"), [(1, 0.3), (2, 0.5), (17, 0.5), (400, 0.85), (5, 1.0), (20_000, 0.999)])
def test_band_and_p_value_equal_the_binomial_where_all_confidences_are_equal(n: int, p: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    binomial = stats.binom(n, p)
    for right in {0, n // 2, round(0.99 * n * p), n}:
        found = curves._perfect_model(np.array([[n]]), np.array([[n * p]]), np.array([[right]]))[:, 0]
        np.testing.assert_allclose(found[:2] * n, binomial.ppf([0.05, 0.95]), atol=1e-6)
        two_sided = min(1.0, 2 * min(binomial.cdf(right), binomial.sf(right - 1)))
        assert found[2] == pytest.approx(two_sided, abs=1e-9)


def test_band_of_unequal_confidences_against_simulation_and_the_normal_form() -> None:
    generator = np.random.default_rng(0)
    size, chance = generator.integers(1, 300, 64), generator.random(64)
    drawn = generator.binomial(size, chance, size=(100_000, 64)).sum(1)
    right = round((size * chance).sum()) + 60
    low, high, p_value = curves._exact(size, chance, right)
    np.testing.assert_allclose([low, high], np.quantile(drawn, [0.05, 0.95]), atol=1.01)
    assert p_value == pytest.approx(2 * (drawn >= right).mean(), abs=0.005)
    normal = curves._normal(size, chance, right)
    np.testing.assert_allclose(normal, (low, high, p_value), atol=0.01, rtol=2e-4)


def test_band_covers_nine_in_ten_bins_of_calibrated_models_and_misses_overconfident_ones() -> None:
    inside, bins = 0, 0
    for seed in range(25):
        curve = reliability(overconfident(2000, 3, factor=1.0, seed=seed), n_bins=10)
        full = curve.counts > 50  # with few samples accuracies are coarse and the band covers more
        inside, bins = inside + int((~curve.outside & full).sum()), bins + int(full.sum())
    assert 0.87 < inside / bins < 0.95
    p = random_predictions()
    sharp = reliability(Predictions(3 * p.logits, p.labels))
    assert sharp.outside[sharp.counts > 50].all()
    assert (sharp.gap[sharp.counts > 50] > 0).all()


def test_reliability_says_what_is_wrong() -> None:
    p = random_predictions(50)
    refused("n_bins must be a whole number >= 1, got 0", reliability, p, n_bins=0)
    refused("top-label bins with samples", reliability, Bins.classwise(p, 15))
    refused("n_bins must divide the present 16 bins, got 15", reliability, Bins.top(p, 16))


def test_thinned_risk_coverage_keeps_points_of_the_whole_curve() -> None:
    p = random_predictions()
    whole, thin = risk_coverage(p), risk_coverage_curve(p, 50)
    assert len(thin.coverage) == 50
    points = set(zip(whole.coverage.tolist(), whole.risk.tolist(), whole.threshold.tolist()))
    assert points.issuperset(zip(thin.coverage.tolist(), thin.risk.tolist(), thin.threshold.tolist()))
    assert (thin.coverage[0], thin.coverage[-1]) == (whole.coverage[0], 1.0)
    assert float(thin.coverage.diff().max()) < 1.5 / 49
    assert len(risk_coverage_curve(binary([0.6, 0.9], [True, True])).coverage) == 2
    refused("n_points must be at least 2, got 1", risk_coverage_curve, p, 1)
    p = binary([0.9] * 500 + [0.6 + i / 5000 for i in range(500)], [True] * 1000)
    thin = risk_coverage_curve(p, 20)
    assert len(thin.coverage) <= 20
    assert bool((thin.coverage.diff() > 0).all())
    assert float(thin.coverage[0]) == 0.5


def test_class_gaps_against_a_loop() -> None:
    p = random_predictions(800, 4)
    gaps = class_gaps(p, n_bins=10)
    for k in range(4):
        mine = (p.predicted == k).numpy()
        confidence, correct = p.confidence.numpy()[mine], p.correct.numpy()[mine]
        assert gaps.counts[k] == mine.sum()
        assert gaps.n_labels[k] == int((p.labels == k).sum())
        assert gaps.gap[k] == pytest.approx(confidence.mean() - correct.mean())
        drawn = np.random.default_rng(k).random((4000, mine.sum())) < confidence
        slow = np.quantile(drawn.mean(1), [0.05, 0.95])
        np.testing.assert_allclose([gaps.band_low[k], gaps.band_high[k]], slow, atol=2.5 / mine.sum())
        one_versus_rest = Bins.of(p.probs[:, k], p.labels == k, 10)
        assert gaps.ece[k] == pytest.approx(float(one_versus_rest.ece()))


def test_worst_class_first_and_never_predicted_last() -> None:
    probs = [[0.9, 0.05, 0.05, 0.0]] * 200 + [[0.05, 0.9, 0.05, 0.0]] * 200 + [[0.0, 0.1, 0.9, 0.0]]
    labels = [0] * 180 + [1] * 20 + [1] * 100 + [0] * 100 + [0]
    gaps = class_gaps(Predictions.from_probs(probs, labels))
    # class 1 claims 0.9 and is right half the time; class 0 is exact; class 2 has one sample, wrong one time in ten
    np.testing.assert_allclose(gaps.gap, [0.0, 0.4, 0.9, np.nan], atol=1e-6)
    assert gaps.off.tolist() == [False, True, False, False]
    assert gaps.p_value[2] == pytest.approx(0.2, abs=1e-6)  # both sides
    assert gaps.worst_first().tolist() == [1, 2, 0, 3]
    right = class_gaps(Predictions.from_probs([[0.9, 0.1]] * 3 + [[0.2, 0.8]] * 3, [0] * 3 + [1] * 3))
    assert right.p_value[0] == right.p_value[1] == 1
    assert right.worst_first().tolist() == [1, 0]  # by the gap


def test_one_class_alone_is_not_tested_again() -> None:
    gaps = class_gaps(Predictions.from_probs([[0.75, 0.25]] * 2000, [0] * 1700 + [1] * 300))
    assert gaps.p_value[0] == pytest.approx(0, abs=1e-9)
    assert gaps.p_value[0] >= 0
    assert not gaps.off.any()


def test_no_class_of_a_calibrated_model_is_called_off_however_many_there_are() -> None:
    models = (overconfident(1500, 200, factor=1.0, spread=2.0, seed=seed) for seed in range(20))
    assert sum(bool(class_gaps(p).off.any()) for p in models) <= 3  # 5 % of 20, and chance
