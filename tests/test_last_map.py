"""What comes after a head: a temperature, a curve where it pays, and never another prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead import last_map
from doublehead.calibrators import GaussianProcess, Temperature
from doublehead.last_map import ENOUGH, LastMap
from doublehead.predictions import Predictions


def noisy(n: int, seed: int = 0, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """Logits that are right but for a share of labels drawn at random: no temperature can say that."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 5, generator=generator)
    probs = (1 - noise) * logits.softmax(1) + noise / 5
    return logits, torch.multinomial(probs, 1, generator=generator)[:, 0]


@pytest.fixture(scope="module")
def bent() -> LastMap:
    return LastMap().fit(*noisy(ENOUGH))


def test_fresh_it_changes_nothing() -> None:
    logits, _ = noisy(10)
    assert torch.equal(LastMap()(logits), logits)


def test_few_samples_get_the_temperature_alone() -> None:
    logits, labels = noisy(ENOUGH - 1)
    last = LastMap().fit(logits, labels)
    assert not last.bends
    by_hand = Temperature().fit(Predictions(logits, labels))(logits)
    torch.testing.assert_close(last(logits), by_hand, rtol=1e-5, atol=1e-5)


def test_a_curve_is_the_gaussian_process_and_wins_on_new_data(bent: LastMap) -> None:
    assert bent.bends
    logits, labels = noisy(5_000, seed=1)
    process = GaussianProcess().fit(Predictions(*noisy(ENOUGH)))(logits)
    got = bent(logits)
    # to the order in which the fit saw the samples, which ends L-BFGS elsewhere in the flat bottom
    torch.testing.assert_close(got.softmax(1), process.softmax(1), atol=2e-3, rtol=0)
    plain = Temperature().fit(Predictions(*noisy(ENOUGH)))(logits)
    assert F.cross_entropy(got, labels) < F.cross_entropy(plain, labels) - 0.02
    truth = (0.8 * logits.softmax(1) + 0.04).log()
    assert F.cross_entropy(got, labels) < F.cross_entropy(truth, labels) + 0.02


def test_the_curve_by_hand() -> None:
    """Two classes, scale 2, a curve that adds 1 to log probability 0 and nothing from -1 down."""
    last = LastMap()
    state = last.state_dict()
    state["scale"].fill_(2.0)
    state["grid"].copy_(torch.linspace(-255, 0, 256))
    state["curve"][-1] = 1.0
    last.load_state_dict(state)
    assert last.bends
    logits = torch.tensor([[0.0, -0.5 * torch.e]])
    log_probs = (2 * logits).log_softmax(1)
    added = (1 + log_probs).clamp(min=0)
    torch.testing.assert_close(last(logits), log_probs + added)


def test_no_curve_where_a_temperature_is_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ENOUGH, 5, generator=generator)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=generator)[:, 0]
    last = LastMap().fit(logits, labels)
    assert not last.bends
    assert float(last.scale) == pytest.approx(0.5, abs=0.05)


def test_a_curve_that_wins_by_too_little_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_map, "LEAST", 100.0)
    monkeypatch.setattr(last_map, "ENOUGH", 300)
    logits, labels = noisy(300)
    last = LastMap().fit(logits, labels)
    assert not last.bends
    by_hand = Temperature().fit(Predictions(logits, labels))(logits)
    torch.testing.assert_close(last(logits), by_hand, rtol=1e-5, atol=1e-5)


def test_predictions_stay_even_under_a_curve_that_would_turn_them() -> None:
    last = LastMap()
    state = last.state_dict()
    state["curve"].copy_(torch.linspace(30, 0, 256))  # the less likely the more is added
    last.load_state_dict(state)
    logits, _ = noisy(1_000, seed=2)
    got = last(logits)
    top = got.topk(2, 1)
    assert torch.equal(top.indices[:, 0], logits.argmax(1))
    assert bool((top.values[:, 0] > top.values[:, 1]).all())


def test_it_travels_with_the_state_and_a_new_fit_forgets_the_old(bent: LastMap) -> None:
    logits, labels = noisy(100)
    other = LastMap()
    other.load_state_dict(bent.state_dict())
    assert other.bends
    assert torch.equal(other(logits), bent(logits))
    other.fit(logits, labels)
    assert not other.bends
    assert torch.equal(other.curve, torch.zeros(256))


def test_of_many_samples_some_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Seeing(GaussianProcess):
        def fit(self, predictions: Predictions) -> Seeing:
            assert torch.get_num_threads() == 1
            seen.append(len(predictions))
            return super().fit(predictions)

    monkeypatch.setattr(last_map, "GaussianProcess", Seeing)
    monkeypatch.setattr(last_map, "PLENTY", 500)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        LastMap().fit(*noisy(1_000))
        assert torch.get_num_threads() == 2  # as it was
    finally:
        torch.set_num_threads(before)
    assert seen == [400] * 5 + [500]


def test_stacks_of_logits(bent: LastMap) -> None:
    logits, _ = noisy(6)
    torch.testing.assert_close(bent(logits.view(2, 3, 5)), bent(logits).view(2, 3, 5))


def test_what_is_no_number_stays_none_and_harms_no_other(bent: LastMap) -> None:
    logits, _ = noisy(3)
    broken = logits.clone()
    broken[1, 2], broken[2, 0] = torch.nan, torch.inf
    got = bent(broken)
    assert torch.equal(got[0], bent(logits)[0])
    assert bool(got[1:].isnan().any(1).all())


def test_compiled_it_gives_the_same(bent: LastMap) -> None:
    logits, _ = noisy(8)
    compiled = torch.compile(bent, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits), bent(logits))


def test_far_logits_keep_their_order_at_the_top(bent: LastMap) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 9_999.0, 3.0], [0.0, 1e-7, 0.0, 0.0, 0.0]])
    got = bent(logits)
    assert bool(got.isfinite().all())
    assert torch.equal(got.argmax(1), logits.argmax(1))


def test_published_logits(shared: Path) -> None:
    """On a published network's logits the curve lowers NLL and ECE of test data that nothing was fitted to."""
    import numpy as np

    from doublehead import metrics

    with np.load(shared / "data" / "logits" / "resnet110_c10.npz") as held:
        parts = [
            Predictions(torch.tensor(held[f"{part}_logits"]), torch.tensor(held[f"{part}_labels"]).view(-1))
            for part in ("val", "test")
        ]
    calib, test = parts
    last = LastMap().fit(calib.logits, calib.labels)
    assert last.bends
    plain = Temperature().fit(calib).calibrate(test)
    got = Predictions(last(test.logits), test.labels)
    assert float(metrics.nll(got)) < float(metrics.nll(plain)) - 0.001
    assert float(metrics.ece(got)) < float(metrics.ece(plain))
