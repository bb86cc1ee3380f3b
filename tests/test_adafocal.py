"""AdaFocal: by hand, beside a slow reference, and inside a run that is stopped and goes on."""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import AdaFocal, Predictions, adafocal
from doublehead.losses import cross_entropy, focal
from doublehead.training import loop
from training_helpers import assert_same, run, small


def of_confidence(confidence: list[float], correct: list[bool]) -> Predictions:
    """Two classes, the first one predicted."""
    probs = torch.tensor([[c, 1 - c] for c in confidence], dtype=torch.float64)
    return Predictions.from_probs(probs, torch.tensor([0 if right else 1 for right in correct]))


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(adafocal).failed == 0


def test_the_loss_by_hand() -> None:
    loss = AdaFocal(n_bins=2)
    loss.gammas.copy_(torch.tensor([2.0, -0.5]))
    logits = torch.tensor([[0.2, 0.8], [0.2, 0.8]], dtype=torch.float64).log()
    got = loss(logits, torch.tensor([0, 1]))  # p of the label: 0.2, in the first bin, and 0.8, in the second
    want = [0.8**2 * -math.log(0.2), 1.8**0.5 * -math.log(0.8)]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_it_is_the_focal_loss_to_begin_with_and_cross_entropy_without_a_gamma() -> None:
    logits, labels = torch.randn(50, 4), torch.randint(4, (50,))
    torch.testing.assert_close(AdaFocal(gamma=3)(logits, labels), focal(logits, labels, gamma=3.0))
    torch.testing.assert_close(AdaFocal(gamma=0)(logits, labels), cross_entropy(logits, labels))


def test_an_update_by_hand() -> None:
    loss = AdaFocal(n_bins=2)
    loss.gammas.copy_(torch.tensor([1.0, -1.0]))
    loss.update(of_confidence([0.9, 0.6, 0.7, 0.8], [False, True, True, True]))
    # bins {0.6, 0.7}, all right: 0.35 too modest; {0.8, 0.9}, half right: 0.35 too sure, so less inverse focal loss
    torch.testing.assert_close(loss.edges, torch.tensor([0.75]))
    torch.testing.assert_close(loss.gammas, torch.tensor([math.exp(-0.35), -math.exp(-0.35)]))


def test_a_gamma_near_nothing_changes_its_sign_and_large_ones_are_cut() -> None:
    sure, modest = of_confidence([0.99] * 4, [False] * 4), of_confidence([0.51] * 4, [True] * 4)
    loss = AdaFocal(n_bins=1, gamma=0.25)
    loss.update(modest)  # 0.25 e^-0.49 < 0.2
    assert loss.gammas.tolist() == pytest.approx([-0.2])
    loss.update(modest)  # surer still: away from 0
    assert loss.gammas.tolist() == pytest.approx([-0.2 * math.exp(0.49)])
    for _ in range(10):
        loss.update(modest)
    assert loss.gammas.tolist() == [-2.0]
    loss.gammas.fill_(-0.3)
    loss.update(sure)  # -0.3 e^-0.99 is within 0.2 of 0
    assert loss.gammas.tolist() == pytest.approx([0.2])
    for _ in range(10):
        loss.update(sure)
    assert loss.gammas.tolist() == [20.0]


def test_equal_confidences_are_as_right_as_all_of_them() -> None:
    """Whatever the order of the samples, as where many confidences round to 1."""
    loss = AdaFocal(n_bins=3)
    loss.update(of_confidence([0.9] * 6, [True, True, True, False, False, False]))
    torch.testing.assert_close(loss.gammas, torch.full((3,), math.exp(0.4)))


def test_many_updates_beside_a_slow_reference() -> None:
    draw = np.random.default_rng(0)
    loss, gammas = AdaFocal(n_bins=7, rate=2.0), [1.0] * 7
    for _ in range(30):
        logits = draw.normal(size=(61, 3)) * draw.uniform(0.2, 6)
        labels = np.where(draw.random(61) < 0.6, logits.argmax(1), draw.integers(0, 3, 61))
        loss.update(Predictions(torch.from_numpy(logits), torch.from_numpy(labels)))
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        order = probs.max(1).argsort()
        for b, rows in enumerate(np.array_split(order, 7)):
            excess = probs[rows].max(1).mean() - (logits[rows].argmax(1) == labels[rows]).mean()
            grown = gammas[b] * math.exp(2 * excess if gammas[b] > 0 else -2 * excess)
            grown = min(20.0, max(-2.0, grown))
            gammas[b] = math.copysign(0.2, -grown) if abs(grown) < 0.2 else grown
        np.testing.assert_allclose(loss.gammas, gammas, rtol=1e-4)
    assert min(gammas) < 0 < max(gammas)


def test_gradients_are_right_and_finite_at_the_ends() -> None:
    loss = AdaFocal(n_bins=3).double()
    loss.gammas.copy_(torch.tensor([2.5, -1.5, 0.3]))
    logits, labels = torch.randn(12, 4, dtype=torch.float64, requires_grad=True), torch.arange(12) % 4
    assert torch.autograd.gradcheck(lambda z: loss(z, labels).mean(), (logits,), atol=1e-6)
    ends = torch.tensor([[80.0, 0.0], [-80.0, 0.0], [800.0, 0.0], [-800.0, 0.0]], requires_grad=True)
    AdaFocal(gamma=0.5)(ends, torch.zeros(4, dtype=torch.long)).mean().backward()
    assert ends.grad is not None
    assert bool(ends.grad.isfinite().all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_bins": 0}, "n_bins must be a whole number of at least 1, got 0"),
        ({"n_bins": 2.5}, "n_bins must be a whole number of at least 1, got 2.5"),
        ({"rate": 0}, "rate must be above 0, got 0"),
        ({"switch": 0}, "switch must be above 0, got 0"),
        ({"least": -0.1}, "least must be at most -switch, -0.2, got -0.1"),
        ({"most": 0.1}, "most must be at least switch, 0.2, got 0.1"),
        ({"gamma": 30}, "gamma must be between least and most, -2 and 20, got 30"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaFocal(**settings)


def test_fewer_samples_than_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="calib must hold at least 15 samples, one a bin, got 4"):
        AdaFocal().update(of_confidence([0.9] * 4, [True] * 4))


def test_a_run_follows_the_calibration_data_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(loss="adafocal", loss_options={"n_bins": 5}, epochs=4)
    seen: list[Predictions] = []
    update = AdaFocal.update
    monkeypatch.setattr(AdaFocal, "update", lambda self, calib: (seen.append(calib), update(self, calib))[1])
    run(config, tmp_path / "whole")
    assert [len(calib) for calib in seen] == [120] * 4  # the calibration images, once an epoch
    by_hand = AdaFocal(n_bins=5)
    for calib in tuple(seen):
        update(by_hand, calib)
    assert not torch.equal(by_hand.gammas, AdaFocal(n_bins=5).gammas)

    class Stopped(Exception):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["epoch"] == 1:
            raise Stopped

    with pytest.raises(Stopped):
        run(config, tmp_path / "stopped", report=stop)
    run(config, tmp_path / "stopped")
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_is_another_one_than_with_the_focal_loss_it_starts_from(tmp_path: Path) -> None:
    lines = []
    for name, settings in (
        ("ada", {"loss": "adafocal"}),
        ("focal", {"loss": "focal", "loss_options": {"gamma": 1.0}}),
    ):
        run(small(**settings), tmp_path / name)
        lines.append([row["train_loss"] for row in loop.RunFolder(tmp_path / name).lines()])
    assert lines[0][0] == lines[1][0]  # in the first epoch they are the same
    assert lines[0][1] != lines[1][1]
