"""The calibration head as a calibrator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from doublehead import HeadCalibrator, Predictions, Readings, metrics
from doublehead.calibrators import CALIBRATORS, Temperature, choose, make
from doublehead.integrations.fit_head import fit_head_on


def bent(n: int, k: int = 5, seed: int = 0) -> Predictions:
    """Logits too large exactly where they are large: no single temperature mends them."""
    generator = torch.Generator().manual_seed(seed)
    true = 2 * torch.randn(n, k, generator=generator)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator)[:, 0]
    spread = true.amax(1, keepdim=True) - true.mean(1, keepdim=True)
    return Predictions(true * torch.where(spread > 2.5, 4.0, 1.0), labels)


def test_is_the_head_that_fit_head_on_finds_and_beats_temperature() -> None:
    fit, test = bent(1500), bent(4000, seed=1)
    calibrator = HeadCalibrator().fit(fit)
    head = fit_head_on(Readings(torch.empty(1500, 0), fit.logits, fit.labels)).eval()
    with torch.no_grad():
        want = head(torch.empty(4000, 0), test.logits)
    torch.testing.assert_close(calibrator(test.logits), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(calibrator(test.logits).argmax(1), test.logits.argmax(1))
    assert calibrator.in_words().startswith("a temperature for each sample")
    by_temperature = Temperature().fit(fit).calibrate(test)
    assert metrics.nll(calibrator.calibrate(test)) < metrics.nll(by_temperature) - 0.05  # 0.11 lower for three seeds


def test_is_a_calibrator_with_a_name() -> None:
    """So the tests of the contract are about it too."""
    assert CALIBRATORS["head"] is HeadCalibrator
    assert isinstance(make("head", folds=3), HeadCalibrator)


def test_of_fewer_than_ten_classes_it_knows_how_many() -> None:
    with pytest.raises(ValueError, match=r"logits must have shape \(\.\.\., 3\)"):
        HeadCalibrator().fit(bent(60, 3))(torch.randn(2, 4))
    assert HeadCalibrator().fit(bent(60, 12))(torch.randn(2, 14)).shape == (2, 14)


def test_is_the_temperature_where_samples_are_few() -> None:
    p = bent(30)
    calibrator, temperature = HeadCalibrator().fit(p), Temperature().fit(p)
    torch.testing.assert_close(
        calibrator(p.logits).softmax(1), temperature(p.logits).softmax(1), rtol=1e-4, atol=1e-5
    )
    assert calibrator.in_words() == f"temperature {float(temperature.temperature_):.4g} for all samples"
    assert HeadCalibrator().in_words() == ""


@pytest.mark.slow
def test_on_real_predictions_it_is_not_worse_than_temperature(shared: Path) -> None:
    with np.load(shared / "data/logits/resnet110_c10.npz") as arrays:
        val = Predictions(arrays["val_logits"], arrays["val_labels"])
        test = Predictions(arrays["test_logits"], arrays["test_labels"])
    by_head = metrics.nll(HeadCalibrator().fit(val).calibrate(test))
    assert by_head <= metrics.nll(Temperature().fit(val).calibrate(test)) + 1e-4
    tried = choose(val, ["temperature", "gaussian_process", "head"], folds=2)
    assert [score.method for score in tried.scores] == ["head", "gaussian_process", "temperature"]


def random_labels(n: int, seed: int) -> Predictions:
    """One label in five drawn at random: neither a temperature nor a head says that, a curve does."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 5, generator=generator)
    probs = 0.8 * logits.softmax(1) + 0.2 / 5
    return Predictions(logits, torch.multinomial(probs, 1, generator=generator)[:, 0])


def test_a_curve_goes_along(tmp_path: Path) -> None:
    fit, test = random_labels(1_200, 0), random_labels(4_000, 1)
    none = torch.empty(1_200, 0)
    head = fit_head_on(Readings(none, fit.logits, fit.labels)).eval()
    assert head.choice.bends
    assert "and a curve" in repr(head)
    with torch.no_grad():
        want = head(torch.empty(4_000, 0), test.logits)
        head.after = type(head.after)()
        without = head(torch.empty(4_000, 0), test.logits)
    got = HeadCalibrator().fit(fit)
    assert got.in_words().endswith(", then a smooth curve")
    torch.testing.assert_close(got(test.logits), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(want.argmax(1), test.logits.argmax(1))
    nlls = [float(metrics.nll(Predictions(logits, test.labels))) for logits in (want, without)]
    assert nlls[0] < nlls[1] - 0.005
    fresh = HeadCalibrator()
    torch.save(got.state_dict(), tmp_path / "head.pt")
    fresh.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    assert torch.equal(fresh(test.logits), got(test.logits))
