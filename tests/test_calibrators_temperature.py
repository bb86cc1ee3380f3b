"""Temperature scaling: the true optimum on easy, badly scaled and degenerate data; the published grid."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

import doublehead as dh
from doublehead import metrics
from doublehead.calibrators import NotConverged, Temperature, TemperatureGrid, fit_inverse_temperature
from doublehead.calibrators.temperature import SAMPLE_ROWS
from doublehead.predictions import Predictions
from samples import overconfident


def mean_nll(p: Predictions, inverse: float) -> float:
    return float(cross_entropy(p.logits.double() * inverse, p.labels))


def golden_section(p: Predictions) -> float:
    """The inverse temperature by a golden-section search over log s, in units of the logits' spread."""
    unit = float((p.logits.double().amax(1) - p.logits.double().mean(1)).mean())
    low, high, ratio = -14.0, 14.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-8:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if mean_nll(p, math.exp(left) / unit) < mean_nll(p, math.exp(right) / unit):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2) / unit


def noisy(n: int = 60, k: int = 5, seed: int = 0) -> Predictions:
    """Right about half of the time, so that the optimum is finite."""
    return overconfident(n, k, factor=0.5, spread=2.0, seed=seed)


def test_three_classes_by_hand() -> None:
    # The others tie, p / (1 - p) = exp(2 s) / 2 and p = 1/2 is best: s = log(2) / 2.
    p = Predictions([[2.0, 0.0, 0.0]] * 4, [0, 0, 1, 2])
    assert float(fit_inverse_temperature(p.logits, p.labels)) == pytest.approx(math.log(2) / 2, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-20, 0.01, 1.0, 100.0, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_a_golden_section_search_at_every_scale(scale: float, dtype: torch.dtype) -> None:
    p = noisy()
    p = Predictions((p.logits.double() * scale).to(dtype), p.labels)
    found = float(fit_inverse_temperature(p.logits, p.labels))
    assert found == pytest.approx(golden_section(p), rel=2e-7)  # the search stops where the NLL is flat
    assert mean_nll(p, found) <= mean_nll(p, golden_section(p)) + 1e-12


def test_float32_logits_lose_nothing() -> None:
    for scale in (0.7, 1.1, 1.3, 3.7, 23.0):  # whatever unit the solver measures the logits in
        logits = noisy(n=2000).logits * scale
        labels = noisy(n=2000).labels
        wide = float(fit_inverse_temperature(logits.double(), labels))
        assert float(fit_inverse_temperature(logits, labels)) == pytest.approx(wide, rel=5e-9)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("label second", lambda z: z.argsort(1)[:, -2]),
        ("one class", lambda z: torch.zeros(len(z), dtype=torch.int64)),
        ("all wrong but one", lambda z: torch.cat([z[:1].argmax(1), z[1:].argsort(1)[:, -2]])),
        ("all right but one", lambda z: torch.cat([z[:1].argmin(1), z[1:].argmax(1)])),
    ],
)
def test_unusual_labels(name: str, labels) -> None:
    logits = noisy().logits + torch.tensor([1.0, 0, 0, 0, 0])
    p = Predictions(logits, labels(logits))
    t = Temperature().fit(p)
    assert 1 / float(t.temperature_) == pytest.approx(golden_section(p), rel=1e-6)
    assert bool(t.converged_)
    assert not bool(t.at_bound_)


@pytest.mark.parametrize("n", [1, 30])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_all_correct_or_all_wrong_has_no_finite_optimum(n: int, scale: float) -> None:
    logits = noisy().logits[:n] * scale
    right, wrong = (Predictions(logits, labels) for labels in (logits.argmax(1), logits.argmin(1)))
    sharp, flat = (Temperature().fit(p) for p in (right, wrong))
    assert bool(sharp.at_bound_)
    assert bool(flat.at_bound_)
    assert 0 < float(sharp.temperature_) < scale
    assert mean_nll(right, 1 / float(sharp.temperature_)) <= 1e-6
    assert mean_nll(right, 0.1 / float(sharp.temperature_)) > 1e-6  # and is not absurdly sharp
    assert math.isfinite(float(flat.temperature_))
    assert mean_nll(wrong, 1 / float(flat.temperature_)) == pytest.approx(math.log(5), abs=2e-6)


@pytest.mark.parametrize("n", [20, 50])
def test_all_correct_but_for_one_that_is_wrong_by_a_hair(n: int) -> None:
    """The optimum is far from the start and the steps towards it overshoot: they must not go to and fro."""
    p = Predictions([[0.0, -1.0]] * (n - 1) + [[0.0, -0.01]], [0] * (n - 1) + [1])
    fitted = Temperature().fit(p)
    assert bool(fitted.converged_)
    assert float(fitted.temperature_) == pytest.approx(1 / golden_section(p), rel=1e-5)


@pytest.mark.parametrize("share", [1e-7, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_of_which_the_logits_know_next_to_nothing(share: float, dtype: torch.dtype) -> None:
    """The optimum is so close to 0 that roundings hide on which side it lies."""
    logits = torch.randn(200, 10, dtype=dtype) / 10
    top = torch.nn.functional.one_hot(logits.argmax(1), 10)
    p = Predictions(logits, (1 - share) / 10 + share * top.double())
    t = Temperature().fit(p)
    assert 1e3 < float(t.temperature_) < 1e8
    assert bool(t.converged_)
    assert metrics.nll(t.calibrate(p)) == pytest.approx(math.log(10), abs=1e-6)


def test_constant_logits_and_ties_at_the_top() -> None:
    t = Temperature().fit(Predictions(torch.full((4, 3), 7.0), [0, 1, 2, 0]))
    assert float(t.temperature_) == 1
    assert bool(t.at_bound_)
    t = Temperature().fit(Predictions([[3.0, 3.0, 0.0], [1.0, 1.0, 0.0]], [0, 1]))
    assert bool(t.at_bound_)
    assert bool(t.converged_)


def test_masked_classes_shifted_rows_and_outliers_do_not_disturb() -> None:
    p = noisy()
    masked = torch.cat([p.logits, torch.full((60, 1), -1e9)], 1)  # a class ruled out, as in language models
    shifted = p.logits.double() + 1000 * torch.randn(60, 1, dtype=torch.float64)
    for logits in (masked, shifted):
        assert float(fit_inverse_temperature(logits, p.labels)) == pytest.approx(golden_section(p), rel=1e-6)
    wild = p.logits.clone()
    wild[0] *= 1e8
    q = Predictions(wild, torch.where(torch.arange(60) == 0, wild.argmax(1), p.labels))
    found = float(fit_inverse_temperature(q.logits, q.labels))
    rest = Predictions(wild[1:], q.labels[1:])
    assert found == pytest.approx(golden_section(rest), rel=1e-6)


def test_many_rows_start_from_a_sample_and_reach_the_optimum_of_all() -> None:
    p = noisy(n=9000, k=7)
    assert len(p) > 4 * SAMPLE_ROWS
    assert float(fit_inverse_temperature(p.logits, p.labels)) == pytest.approx(golden_section(p), rel=1e-6)
    # A sample whose optimum is at infinity must not lead astray: errors lie between the rows it takes.
    labels = p.logits.argmax(1)
    labels[1::9] = p.logits.argsort(1)[1::9, -2]
    q = Predictions(p.logits, labels)
    assert float(fit_inverse_temperature(q.logits, q.labels)) == pytest.approx(golden_section(q), rel=1e-6)


def test_resnet110_on_cifar10(resnet110) -> None:
    val, test = resnet110.values()
    t = Temperature().fit(val)
    after = t.calibrate(test)
    assert float(t.temperature_) == pytest.approx(2.395, abs=5e-4)
    assert metrics.ece(test) == pytest.approx(0.04750, abs=5e-6)
    assert metrics.ece(after) == pytest.approx(0.01132, abs=5e-6)
    assert metrics.nll(test) == pytest.approx(0.3583, abs=5e-5)
    assert metrics.nll(after) == pytest.approx(0.2093, abs=5e-5)


def test_a_fit_cut_short_says_so(monkeypatch) -> None:
    monkeypatch.setattr("doublehead.calibrators.temperature.MAX_PASSES", 1)
    with pytest.warns(NotConverged, match=r"Temperature did not converge: after 1 passes T = \d") as caught:
        t = Temperature().fit(noisy())
    assert not bool(t.converged_)
    assert caught[0].filename == __file__


def test_grid_follows_the_published_protocol(resnet110) -> None:
    p = resnet110["val"]
    grid = [i / 10 for i in range(1, 101)]
    slow = min(grid, key=partial(_slow_ece, p))
    assert float(TemperatureGrid().fit(p).temperature_) == pytest.approx(slow)


def _slow_ece(p: Predictions, t: float) -> float:
    probs = (p.logits.double() / t).softmax(1)
    confidence, correct = probs.amax(1), p.correct.double()
    total = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            gap = correct[inside].mean() - confidence[inside].mean()
            total += float(gap.abs() * inside.double().mean())
    return total


def test_grid_takes_the_first_of_equals_and_includes_its_ends() -> None:
    flat = Predictions(torch.zeros(4, 2), [0, 1, 0, 1])
    assert float(TemperatureGrid().fit(flat).temperature_) == pytest.approx(0.1)
    half = Predictions([[1.0, 0.0]] * 4, [0, 1, 0, 1])
    assert float(TemperatureGrid().fit(half).temperature_) == pytest.approx(10.0)


@pytest.mark.parametrize("method", ["temperature", "ensemble_temperature", "head"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e30])
def test_predictions_are_kept_where_logits_are_worth_nothing(method: str, scale: float) -> None:
    """A temperature of a million brings them so close together that their log-probabilities round to the same."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(600, 5, generator=generator)
    labels = (-logits / scale).softmax(1).multinomial(1, generator=generator)[:, 0]
    model = dh.calibrate(torch.nn.Identity(), (logits, labels), method=method, outputs="logits")
    assert torch.equal(model(logits).argmax(1), logits.argmax(1))
    assert torch.equal(model.head(logits).softmax(1).argmax(1), logits.argmax(1)) or method == "temperature"


def test_one_class_that_is_left_stays_on_top_without_nan() -> None:
    p = overconfident(300, 3)
    only = torch.tensor([[-math.inf, 2.0, -math.inf]])
    for method in ("temperature", "ensemble_temperature"):
        network = torch.nn.Identity()
        model = dh.calibrate(network, (p.logits, p.labels), method=method, outputs="logits")
        assert model(only).exp().tolist() == [[0, 1, 0]]
