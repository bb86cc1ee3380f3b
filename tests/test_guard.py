"""What a guard learns from stages and logits, its factor and its alarm."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead.guard import BOUND, DRAWS, MOST, SHRINK, Distances, Guard, Observed
from doublehead.shift_guard import watch

WIDTHS = [4, 2]


def slow_distance(usual: np.ndarray, row: np.ndarray) -> float:
    """The logarithm of the mean squared Mahalanobis distance, by an inverse of the covariance."""
    centre, deviation = usual.mean(0), usual.std(0)
    unit = (usual - centre) / deviation
    covariance = (1 - SHRINK) * unit.T @ unit / len(unit) + SHRINK * np.eye(len(row))
    z = (row - centre) / deviation
    return math.log(z @ np.linalg.inv(covariance) @ z / len(row))


def observed(n: int = 400, shift: float = 0.0, seed: int = 0) -> Observed:
    """Stages of two layers; a shift moves them and makes the labels less certain than the logits say."""
    generator = torch.Generator().manual_seed(seed)
    stages = torch.randn(n, 6, generator=generator) * torch.tensor([1, 2, 3, 0.1, 5, 1]) * (1 + shift) + 3
    logits = 3 * torch.randn(n, 4, generator=generator)
    probs = (logits * math.exp(-shift)).softmax(1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return Observed(stages, logits, labels, torch.zeros_like(labels), torch.arange(n))


def learned(window: int = 8, seed: int = 0, **options: Any) -> Guard:
    guard = Guard(WIDTHS, window)
    guard.fit(observed(1000), observed(1000, 2.0, 1), seed=seed, **options)
    return guard


@pytest.mark.parametrize(("n", "width", "tolerance"), [(60, 12, 0.05), (40, 128, 0.15)])
def test_rows_that_are_usual_are_measured_from_the_others(n: int, width: int, tolerance: float) -> None:
    """As if each had been left out by itself: a new row would be as far. With fewer rows than channels, too."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, width, generator=generator) @ torch.rand(width, width, generator=generator)
    distances, others, slow = Distances([width]), Distances([width]), []
    apart, near = distances.set_usual(rows).exp(), distances(rows).exp()
    for i in range(n):
        others.set_usual(torch.cat([rows[:i], rows[i + 1 :]]))
        slow.append(others(rows[i : i + 1]).exp())
    torch.testing.assert_close(apart, torch.cat(slow), rtol=tolerance, atol=0)
    assert float(apart.mean()) > 1.2 * float(near.mean())


def slow_numbers(guard: Guard, clean: Observed, stages: Tensor, logits: Tensor) -> np.ndarray:
    """What is known of each row in float64: distances from clean stages, statistics of the logits, standardised."""
    state = {name: value.double().numpy() for name, value in guard.state_dict().items()}
    usual = clean.stages.double().numpy()
    rows = []
    for row, z in zip(stages.double().numpy(), logits.double().numpy()):
        far = [slow_distance(usual[:, :4], row[:4]), slow_distance(usual[:, 4:], row[4:])]
        log_probs = np.sort(z - np.logaddexp.reduce(z))[::-1]
        entropy = -(np.exp(log_probs) * log_probs).sum()
        rows.append([*far, *log_probs, np.logaddexp.reduce(z), entropy, z.max()])
    return (np.array(rows) - state["mean"]) / state["deviation"]


def slow_design(numbers: np.ndarray) -> np.ndarray:
    """Of one layer, so there is one depth; then the largest log-probability and the entropy."""
    return np.array([*np.clip([*numbers[:3], numbers[-2]], -3, 6), 1.0])


def slow_factors(guard: Guard, rows: np.ndarray) -> tuple[np.ndarray, list[bool]]:
    """Factors and alarms of a stream, sample by sample."""
    weights = {name: value.double().numpy() for name, value in guard.state_dict().items()}
    factors, alarms = [], []
    for i, row in enumerate(rows):
        far = np.clip(row[:2], -4, 8)
        odds = np.concatenate([far, far**2 / 4, [1.0]]) @ weights["posterior"]
        log_scale = np.clip(slow_design(row) @ weights["single"], -4, 0) / (1 + np.exp(-odds))
        last = max(i, guard.window - 1)
        mean = rows[last + 1 - guard.window : last + 1].mean(0)
        off = np.clip(rows[last + 1 - guard.window : last + 1, :2], -BOUND, BOUND).mean(0) - weights["centre"]
        statistic = off @ weights["precision"] @ off
        p_value = (1 + (weights["null"] >= statistic).sum()) / (len(weights["null"]) + 1)
        alarms.append(bool(p_value <= guard.rate))
        if alarms[-1]:
            log_scale = np.clip(slow_design(mean) @ weights["windowed"], -4, 0.5)
        factors.append(math.exp(log_scale))
    return np.array(factors), alarms


@pytest.mark.parametrize("batch", [1, 5, 60])
def test_a_stream_against_a_slow_reference(batch: int) -> None:
    """Clean samples, then shifted ones, then clean ones again, in batches of any size."""
    guard = learned(prior=0.05)
    stream = [observed(20, shift, seed) for shift, seed in ((0.0, 7), (2.0, 8), (0.0, 9))]
    stages, logits = (torch.cat(parts) for parts in list(zip(*stream))[:2])
    rows = slow_numbers(guard, observed(1000), stages, logits)
    wanted, alarms = slow_factors(guard, rows)
    assert not any(alarms[:20])
    assert sum(alarms[20:40]) > 10
    got, since = [], []
    for some, z in zip(stages.split(batch), logits.split(batch)):
        got.append(guard.log_scale(some, z)[:, 0].exp())
        since.append(guard.shift.since)
    whole = slice(guard.window - 1 if batch < guard.window else 0, None)  # one that is not full says nothing
    np.testing.assert_allclose(torch.cat(got).numpy()[whole], wanted[whole], rtol=2e-3)
    assert guard.shift.seen == 60
    if batch == 1:
        assert [place is not None for place in since[7:]] == alarms[7:]
        assert since[39] == next(i for i in range(20, 40) if all(alarms[i:40]))


def alone(stages: Tensor) -> Observed:
    """Stages (N, S) without anything that is known of the samples."""
    n, none = len(stages), torch.zeros(len(stages), dtype=torch.int64)
    return Observed(stages, torch.zeros(n, 2), none, none, torch.arange(n))


def stages_of(kind: str, n: int, generator: torch.Generator) -> Observed:
    """Stages of two layers with ten channels each; sparse ones are 0 in most samples, or in all calibration data."""
    stages = torch.randn(n, 20, generator=generator)
    return alone((stages - torch.linspace(0, 3, 20)).clamp(min=0) if kind == "sparse" else stages)


@pytest.mark.parametrize(("kind", "n"), [("normal", 40), ("sparse", 100), ("normal", 4000)])
def test_clean_windows_raise_no_more_alarms_than_stated(kind: str, n: int) -> None:
    """However few calibration samples there are, and whatever they do not show."""
    generator, rates = torch.Generator().manual_seed(0), []
    new = stages_of(kind, 3000, generator)
    for seed in range(12):
        guard = Guard([10, 10], window=16, rate=0.02)
        guard.fit(stages_of(kind, n, generator), seed=seed)
        far = guard.bounded(guard.numbers(new.stages, new.logits))
        windows = far[torch.randint(3000, (5000, 16), generator=generator)].mean(1)
        rates.append(float((guard.p_values(windows) <= guard.rate).float().mean()))
    # A standard error is 0.002. The rate holds for 95 % of calibration sets.
    assert sum(rate <= 0.026 for rate in rates) >= 10
    assert np.mean(rates) > 0.01 or n < 4000  # and is used, where there are many samples


def test_a_clean_stream_raises_few_false_alarms() -> None:
    """Windows overlap, so those with an alarm come in runs: about one run in 10,000 samples, at most."""
    generator, runs = torch.Generator().manual_seed(0), []
    for seed in range(4):
        guard, new = Guard([10, 10]), stages_of("normal", 50_000, generator)
        guard.fit(stages_of("normal", 5000, generator), seed=seed)
        sums = guard.bounded(guard.numbers(new.stages, new.logits)).double().cumsum(0)
        means = ((sums[guard.window :] - sums[: -guard.window]) / guard.window).float()
        places = torch.nonzero(guard.p_values(means) <= guard.rate)[:, 0]
        runs.append(int((places.diff() > guard.window).sum()) + bool(len(places)))
    assert 0 < np.mean(runs) < 10  # a standard error is about 1.5


def test_few_samples_of_wide_layers_raise_no_false_alarm() -> None:
    """New samples leave the few directions that the calibration samples span."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(256, 256, generator=generator)

    def observe(n: int) -> Observed:
        return alone(torch.randn(n, 256, generator=generator) @ mix)

    guard, alarms = Guard([128, 128]), 0
    guard.fit(observe(40))
    for _ in range(20):
        new = observe(64)
        guard.reset()
        guard(new.stages, new.logits)
        alarms += guard.shift.alarm
    assert alarms == 0
    with pytest.raises(ValueError, match="at least 20 calibration samples, got 19"):
        guard.fit(observe(19))


def test_constant_calibration_data() -> None:
    same = [torch.ones(200, 3), torch.ones(64, 3), torch.full((64, 3), 2.0)]
    quiet, loud = watch(same[0], torch.cat(same[1:]))
    assert (quiet.alarm, quiet.p_value, loud.alarm) == (False, 1.0, True)
    assert quiet.strength < loud.strength < math.inf


def test_few_samples_and_many_distances_still_give_an_alarm() -> None:
    """Clipped distances bound the test statistic: a null that is as large would never give one."""
    generator = torch.Generator().manual_seed(0)

    def stages(n: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(n, 18, 32, generator=generator)
        values *= (0.4 * torch.randn(n, 1, 1, generator=generator)).exp()  # samples differ, and layers
        return (values * (0.2 * torch.randn(n, 18, 1, generator=generator)).exp()).flatten(1)

    guard = Guard([32] * 18, window=16)
    guard.fit(alone(stages(40)))
    guard(stages(16), torch.zeros(16, 2))
    assert not guard.shift.alarm
    guard(stages(16, 20.0), torch.zeros(16, 2))
    assert guard.shift.alarm


def test_an_alarm_says_how_sure_how_strong_and_since_when() -> None:
    guard = Guard(WIDTHS, 8)
    guard.fit(observed(1000))  # without perturbed data there is only the alarm
    assert guard.shift == (False, 1.0, 1.0, None, 0)
    clean, shifted = observed(50, seed=3), observed(50, 3.0, 4)
    assert (guard.log_scale(clean.stages, clean.logits) == 0).all()
    assert guard.shift.p_value > guard.rate
    assert guard.shift.strength < 3
    assert (guard.log_scale(shifted.stages, shifted.logits) == 0).all()
    alarm, p_value, strength, since, seen = guard.shift
    assert alarm
    assert p_value == pytest.approx(1 / (DRAWS + 1))
    assert strength > 3
    assert 50 <= since <= 50 + guard.window
    assert seen == 100
    guard.reset()
    assert guard.shift == (False, 1.0, 1.0, None, 0)
    with guard.alone():
        assert (guard.log_scale(shifted.stages, shifted.logits) == 0).all()
    assert guard.shift.seen == 0


def test_a_guard_learns_from_perturbed_data_and_costs_little_on_clean() -> None:
    guard, clean, shifted = learned(), observed(2000, seed=11), observed(2000, 2.0, 12)

    def nll(part: Observed) -> tuple[float, float]:
        guard.reset()
        out = guard(part.stages, part.logits)
        return tuple(float(F.cross_entropy(z, part.labels)) for z in (out, part.logits))

    after, before = nll(shifted)
    assert after < 0.6 * before
    after, before = nll(clean)
    assert after < 1.01 * before


def test_a_larger_prior_acts_more_on_single_samples() -> None:
    shifted = observed(500, 2.0, 12)
    factors = []
    for prior in (0.0, 0.01, 0.3):
        guard = learned(window=0, prior=prior)
        factors.append(float(guard.log_scale(shifted.stages, shifted.logits).exp().mean()))
    assert factors[0] == 1
    assert factors[0] > factors[1] > factors[2]


def test_the_factor_is_positive_whatever_comes() -> None:
    guard = learned()
    odd = torch.tensor([0.0, 1e-30, -1e30, 3e38, math.inf, -math.inf, math.nan])
    factor = guard.log_scale(odd[:, None].expand(-1, 6), torch.randn(7, 4)).exp()
    assert ((factor > 0) & (factor <= math.exp(0.5))).all()
    assert factor[-1].item() == pytest.approx(math.exp(-MOST))  # nothing is known: as unsure as can be
    assert guard(torch.empty(0, 6), torch.empty(0, 4)).shape == (0, 4)
    clean, statistics = observed(60, seed=3), []
    for before in (odd[:0], odd):  # what has left the window leaves no trace
        guard.reset()
        stages = torch.cat([before[:, None].expand(-1, 6), clean.stages])
        guard(stages, torch.cat([torch.zeros(len(before), 4), clean.logits]))
        statistics.append(float(guard.last[0]))
    assert statistics[1] == pytest.approx(statistics[0], rel=1e-4)


def test_a_fit_knows_nothing_of_the_one_before() -> None:
    """Guards that leave families of shift out must not start from one that has seen them."""
    once, twice, differently = learned(), Guard(WIDTHS, 8), learned(seed=1)
    twice.fit(observed(100, 1.0, 5), observed(100, 3.0, 6))
    twice.fit(observed(1000), observed(1000, 2.0, 1))
    assert all(torch.equal(value, twice.state_dict()[name]) for name, value in once.state_dict().items())
    assert not torch.equal(once.null, differently.null)
