"""Floor, test and bootstrap: against direct draws, and their promises by simulation."""

import numpy as np
import pytest

from doublehead import metrics
from doublehead.bins import Bins
from samples import binary


def slow_ece(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """ECE in 15 bins of confidences (N,) and many sets of answers (D, N), by matrix products in numpy."""
    member = np.ceil(confidence * 15)[:, None] == np.arange(1, 16)  # (N, 15)
    return np.abs((confidence - correct) @ member).sum(1) / len(confidence)


@pytest.mark.parametrize("saturated", [False, True])
def test_floor_against_direct_draws(saturated, monkeypatch):
    monkeypatch.setattr(metrics, "DRAWS", 4000)
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 700) ** (0.02 if saturated else 1)
    p = binary(confidence, rng.random(700) < 0.5)  # the labels must not matter
    draws = slow_ece(confidence, rng.random((2000, 700)) < confidence)
    floor = metrics.ece_floor(p)
    error = np.std(draws) / np.sqrt(2000)
    assert floor.mean == pytest.approx(np.mean(draws), abs=5 * error)
    assert floor.low == pytest.approx(np.quantile(draws, 0.05), abs=10 * error)
    assert floor.high == pytest.approx(np.quantile(draws, 0.95), abs=10 * error)


def test_floor_and_test_are_those_of_either_alone():
    rng = np.random.default_rng(1)
    p = binary(rng.uniform(0.5, 1, 300), rng.random(300) < 0.6)
    alone = metrics.ece_floor(p, 10, seed=3), metrics.calibration_test(p, 10, seed=3)
    assert metrics.floor_and_test(p, 10, 3) == alone


def test_floor_by_hand(monkeypatch):
    """One sample of confidence 0.75: the ECE is 0.25 with chance 3/4 and 0.75 with chance 1/4."""
    monkeypatch.setattr(metrics, "DRAWS", 20_000)
    floor = metrics.ece_floor(binary([0.75], [1]))
    assert floor.mean == pytest.approx(0.375, abs=0.01)
    assert (floor.low, floor.high) == (0.25, 0.75)


def test_floor_is_the_same_from_a_stream():
    rng = np.random.default_rng(0)
    p = binary(rng.uniform(0.5, 1, 300), np.ones(300))
    fine = Bins.top(p[:100], metrics.fine_bins(15)) + Bins.top(p[100:], metrics.fine_bins(15))
    assert metrics.ece_floor(fine) == metrics.ece_floor(p)
    assert metrics.ece_floor(p, seed=1) != metrics.ece_floor(p)
    assert [metrics.fine_bins(n) for n in (15, 10, 7, 2000)] == [960, 960, 966, 2000]


def test_the_size_of_the_test_is_as_promised(monkeypatch):
    """Of calibrated models at most 5 % get a p-value of at most 0.05 (and 20 % one of 0.2)."""
    monkeypatch.setattr(metrics, "DRAWS", 100)
    rng = np.random.default_rng(0)
    values = []
    for seed in range(400):
        confidence = np.clip(rng.uniform(0.5, 1.2, 150), 0.5, 1)  # some are sure
        p = binary(confidence, rng.random(150) < confidence)
        values.append(metrics.calibration_test(p, seed=seed).p_value)
    values = np.array(values)
    for size in (0.05, 0.2, 0.5):
        spread = np.sqrt(size * (1 - size) / 400)
        assert size - 4 * spread < (values <= size).mean() < size + 3 * spread


def test_the_test_finds_overconfidence():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 1000)
    assert metrics.calibration_test(binary(confidence, rng.random(1000) < confidence - 0.1)).p_value < 0.001
    sure = metrics.calibration_test(binary(np.ones(50), np.ones(50)))
    assert sure == (0.0, 1.0)
    p = binary(confidence, np.ones(1000))
    assert metrics.calibration_test(p).ece == pytest.approx(metrics.ece(p), abs=1e-12)


def test_bootstrap_does_not_push_an_ece_above_itself():
    """An ECE of 0, of which every resample has a larger one."""
    confidence = np.repeat([0.5, 0.6, 0.7, 0.8, 0.9], 100)
    p = binary(confidence, np.tile(np.arange(100), 5) < np.round(100 * confidence))
    interval = metrics.bootstrap(p)["ece"]
    assert interval.estimate == pytest.approx(0, abs=1e-9)
    assert interval.low == 0.0
    assert 0.005 < interval.high < 0.05
    assert metrics.bootstrap(p)["ece"] == interval != metrics.bootstrap(p, seed=1)["ece"]


@pytest.mark.parametrize(("n", "low"), [(1, 0.2065), (30, 0.8865), (200, 0.9812)])
def test_the_interval_of_an_accuracy_of_all_samples_is_not_a_point(n, low):
    """Wilson's lower bound is n / (n + 1.96 ** 2) where all answers are correct."""
    found = metrics.bootstrap(binary(np.full(n, 0.9), np.ones(n)))
    assert found["accuracy"] == pytest.approx((1.0, low, 1.0), abs=1e-4)
    assert found["mean_confidence"] == pytest.approx((0.9, 0.9, 0.9))


def test_bootstrap_intervals_cover(monkeypatch):
    """90 % intervals of the ECE hold its mean over new test sets of the same size about nine times in ten."""
    monkeypatch.setattr(metrics, "DRAWS", 150)
    monkeypatch.setattr(metrics, "LEVEL", 0.9)
    rng = np.random.default_rng(0)

    def draw():
        confidence = rng.uniform(0.5, 1, 300)
        return confidence, rng.random(300) < confidence - 0.1

    drawn = (draw() for _ in range(1500))
    truth = np.mean([slow_ece(confidence, correct[None])[0] for confidence, correct in drawn])
    hits = 0
    for seed in range(100):
        _, low, high = metrics.bootstrap(binary(*draw()), seed=seed)["ece"]
        hits += low <= truth <= high
    assert 80 <= hits <= 98


def test_bad_input_is_named():
    p = binary([0.9, 0.8], [1, 0])
    for function, bins, message in (
        (metrics.bootstrap, Bins.zeros(960), "must be top-label bins with samples"),
        (metrics.ece_floor, Bins.zeros(960), r"must be top-label bins with samples, got shape \(960,\), n 0"),
        (metrics.ece_floor, Bins.classwise(p, 960), r"got shape \(2, 960\), n 4"),
        (metrics.ece_floor, Bins.top(p, 16), "n_bins must divide the present 16 bins, got 15"),
    ):
        with pytest.raises(ValueError, match=message):
            function(bins)
