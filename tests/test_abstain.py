"""Abstaining: the curve by hand, the bound against scipy, the guarantee by simulation."""

import re
from dataclasses import replace

import numpy as np
import pytest

from doublehead import abstain, metrics
from doublehead.abstain import STARTS, _grid
from doublehead.system import require
from samples import binary


def test_curve_and_aurc_by_hand_and_against_slow():
    p = binary([0.9, 0.9, 0.7, 0.6], [1, 0, 1, 0])
    curve = metrics.risk_coverage(p)
    assert curve.threshold.tolist() == pytest.approx([0.9, 0.7, 0.6])
    assert curve.coverage.tolist() == pytest.approx([0.5, 0.75, 1.0])
    assert curve.risk.tolist() == pytest.approx([1 / 2, 1 / 3, 2 / 4])
    # the two at 0.9 in the mean over both orders: 0.5 and 0.5; then 1/3, then 2/4
    assert metrics.aurc(p) == pytest.approx((0.5 + 0.5 + 1 / 3 + 0.5) / 4)
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 500)
    correct = rng.random(500) < confidence
    wrong = ~correct[np.argsort(-confidence)]
    want = np.mean([wrong[:n].mean() for n in range(1, 501)])
    assert metrics.aurc(binary(confidence, correct)) == pytest.approx(want)


def test_aurc_with_ties_is_the_mean_over_orders():
    rng = np.random.default_rng(0)
    confidence, wrong = np.round(rng.uniform(0.5, 1, 30), 1), rng.random(30) < 0.3
    orders = [np.lexsort((rng.random(30), -confidence)) for _ in range(3000)]
    want = np.mean([np.mean(np.cumsum(wrong[order]) / np.arange(1, 31)) for order in orders])
    assert metrics.aurc(binary(confidence, ~wrong)) == pytest.approx(want, abs=5e-3)


@pytest.mark.parametrize(("errors", "n"), [(0, 1), (0, 299), (3, 500), (499, 500), (700, 20000), (5, 5)])
@pytest.mark.parametrize("level", [0.05, 0.001])
def test_bound_against_scipy(errors, n, level):
    stats = require("scipy.stats", extra="calibrators")
    want = 1.0 if errors == n else stats.beta.ppf(1 - level, errors + 1, n - errors)
    assert abstain.clopper_pearson_upper(errors, n, level) == pytest.approx(want, rel=1e-9)


def test_rule_of_three_by_hand():
    """No error among n: the bound is where (1 - rate)^n = level."""
    assert abstain.clopper_pearson_upper(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-12)


def slow_choice(confidence, correct, max_error, level):
    """Every threshold from every start, in plain Python."""
    stats = require("scipy.stats", extra="calibrators")
    thresholds, _ = _grid()
    best = None
    for start in STARTS:
        for t in (t for t in thresholds.tolist() if t <= np.float32(start)):
            kept = confidence >= t
            n, errors = kept.sum(), (~correct[kept]).sum()
            if n == 0 or stats.binom.cdf(errors, n, max_error) > level / len(STARTS):
                break
            best = t if best is None else min(best, t)
    return best


@pytest.mark.parametrize(("max_error", "seed"), [(0.05, 0), (0.1, 1), (0.3, 2), (0.002, 3)])
def test_choice_against_slow(max_error, seed):
    rng = np.random.default_rng(seed)
    confidence = 1 - 0.5 * rng.random(4000) ** 4
    correct = rng.random(4000) < confidence
    choice = abstain.choose_threshold(binary(confidence, correct), max_error)
    assert choice.threshold == slow_choice(confidence, correct, max_error, 0.05)
    if choice.threshold is None:
        assert max_error == 0.002
        return
    kept = confidence >= choice.threshold
    assert choice.n_accepted == kept.sum()
    assert choice.coverage == pytest.approx(kept.mean())
    assert choice.error == pytest.approx((~correct[kept]).mean())
    assert choice.error < choice.bound <= max_error


def test_a_lower_start_goes_on_where_a_higher_one_stops():
    """Errors crowd at 0.985: the descent from 0.99 stops there, the one from 0.95 has enough right answers."""
    confidence = np.r_[np.full(400, 0.995), np.full(60, 0.985), np.full(5000, 0.965), np.full(900, 0.6)]
    correct = np.r_[np.ones(400), np.zeros(60), np.ones(5000), np.zeros(900)]
    choice = abstain.choose_threshold(binary(confidence, correct), max_error=0.05)
    assert choice.n_accepted == 5460
    assert 0.6 < choice.threshold < 0.965


def test_both_types_accept_the_same_samples():
    rng = np.random.default_rng(0)
    confidence = (1 - 0.5 * rng.random(4000) ** 4).astype(np.float32)
    p = binary(confidence, rng.random(4000) < confidence, np.float32)
    choice = abstain.choose_threshold(p, 0.05)
    assert int((p.confidence >= choice.threshold).sum()) == choice.n_accepted


def test_the_guarantee_holds_where_every_threshold_is_just_too_low():
    """Each threshold has a true error of 15.1 %, so any choice for 15 % is wrong; at most 10 % of draws may."""
    rng = np.random.default_rng(0)
    confidence = 1 - 0.5 * rng.random((250, 400)) ** 2
    correct = rng.random((250, 400)) < 1 - 0.151
    draws = (binary(*draw) for draw in zip(confidence, correct))
    found = [abstain.choose_threshold(p, max_error=0.15, confidence=0.9).threshold is not None for p in draws]
    assert 0.01 < np.mean(found) < 0.1


def test_the_guarantee_holds_where_error_is_not_monotone():
    rng = np.random.default_rng(0)
    grid = np.linspace(0.5, 1, 20001)
    hit = np.clip(grid - 0.06 + 0.1 * np.sin(25 * grid), 0, 1)
    true_error = 1 - np.cumsum(hit[::-1])[::-1] / np.arange(len(grid), 0, -1)  # uniform above each point
    broken = found = 0
    for _ in range(150):
        place = rng.integers(0, len(grid), 1500)
        p = binary(grid[place], rng.random(1500) < hit[place])
        choice = abstain.choose_threshold(p, max_error=0.2, confidence=0.9)
        if choice.threshold is not None:
            found += 1
            broken += true_error[np.searchsorted(grid, choice.threshold)] > 0.2
    assert found > 50
    assert broken / 150 < 0.1


def test_it_says_so_when_there_is_none():
    rng = np.random.default_rng(0)
    p = binary(rng.uniform(0.5, 1, 200), rng.random(200) < 0.6)
    choice = abstain.choose_threshold(p)
    assert choice.threshold is None
    assert (choice.coverage, choice.n_accepted) == (0.0, 0)
    assert "an error of at most 1 % with 95 % confidence on these 200" in str(choice)
    assert 0.2 < choice.bound <= 1
    again = abstain.choose_threshold(p, max_error=choice.bound + 1e-6)
    assert again.threshold is not None


def test_bad_input_is_named():
    for function, given, message in (
        (abstain.choose_threshold, (binary([0.9], [1]), 1), "max_error must lie between 0 and 1, got 1"),
        (
            abstain.choose_threshold,
            (binary([0.9], [1]), 0.1, 95),
            "confidence must lie between 0 and 1, got 95",
        ),
        (abstain.clopper_pearson_upper, (3, 2, 0.05), r"errors must lie in 0..n = 2, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*given)


def test_the_printed_threshold_accepts_no_more_than_was_tested():
    """Thresholds are float32: 0.8 is a little more than the 0.8 of a file, whose answers here are often wrong."""
    right = np.r_[np.ones(5000), np.arange(5000) % 2]
    choice = abstain.choose_threshold(binary(np.r_[np.full(5000, 0.9), np.full(5000, 0.8)], right), 0.02)
    assert (choice.n_accepted, choice.coverage) == (5000, 0.5)
    assert "it keeps 50.0 % (5,000 of 10,000 samples, observed error 0.00 %)" in str(choice)
    for threshold in (choice.threshold, 1 - 1.6e-6, 0.5, 0.0):
        printed = float(re.search(r">= ([\d.]+) ", str(replace(choice, threshold=threshold)))[1])
        assert threshold <= printed <= threshold + 1e-6
        assert 1 - printed >= 0.99 * (1 - threshold)
