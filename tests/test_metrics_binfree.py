"""Bin-free errors against direct sums over samples or pairs."""

import numpy as np
import pytest
import torch

from doublehead import metrics
from samples import binary


def some(n: int = 800, seed: int = 0, saturated: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = 0.5 + 0.5 * rng.beta(3, 1, n)
    if saturated:
        confidence[: n // 2] = 1.0
        confidence[n // 2 : 3 * n // 4] = 1 - 1e-6
    return confidence, rng.random(n) < confidence - 0.1 * (confidence > 0.7) + 0.1 * (confidence < 0.6)


def direct_smooth(confidence, correct, width, points=2001):
    """The definition: residuals spread by a Gaussian and its reflections, |sum| integrated by the trapezium rule."""
    t = np.linspace(0, 1, points)
    total = np.zeros_like(t)
    reach = 1 + int(4 * width)
    for image in [side + 2 * turn for side in (confidence, -confidence) for turn in range(-reach, reach + 1)]:
        z = (t[None] - image[:, None]) / width
        total += (confidence - correct) @ np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi)) / len(confidence)
    size = np.abs(total)
    return (size.sum() - 0.5 * (size[0] + size[-1])) / (points - 1)


@pytest.mark.parametrize("saturated", [False, True])
def test_smooth_ece_is_the_width_that_equals_its_own_error(saturated):
    confidence, correct = some(saturated=saturated)
    ours = metrics.smooth_ece(binary(confidence, correct))
    assert 0.02 < ours < 0.3
    assert direct_smooth(confidence, correct, ours) == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("width", [0.003, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("saturated", [False, True])
def test_smoothing_against_the_definition(width, saturated):
    confidence, correct = some(300, saturated=saturated)
    spectrum = metrics._spectrum(torch.from_numpy(confidence), torch.from_numpy(correct).double())
    ours = metrics._smoothed(spectrum, width)
    assert ours == pytest.approx(direct_smooth(confidence, correct, width, 4001), abs=2e-5)


def test_smooth_ece_when_every_confidence_is_one():
    """All of the residual sits at the border: a tenth is wrong, so the error is a tenth."""
    p = binary(np.ones(1000), np.arange(1000) >= 100)
    assert metrics.smooth_ece(p) == pytest.approx(0.1, abs=1e-9)
    assert metrics.smooth_ece(binary(np.ones(1000), np.ones(1000))) == 0.0


def test_smooth_ece_on_real_saturated_predictions(resnet110):
    """This network is overconfident everywhere, so no smoothing can take the error below mean confidence - accuracy."""
    p = resnet110["test"]
    assert metrics.smooth_ece(p) == pytest.approx(metrics.overconfidence(p), abs=1e-6)


def test_ks_by_hand_and_against_slow():
    # rising order: 0.6 wrong (+0.6), 0.7 right (-0.3), 0.9 right (-0.1)
    assert metrics.ks_error(binary([0.9, 0.6, 0.7], [1, 0, 1])) == pytest.approx(0.6 / 3, abs=1e-12)
    # equal confidences are looked at together, in whatever order they come
    assert metrics.ks_error(binary([0.9, 0.9], [0, 1])) == pytest.approx(0.8 / 2, abs=1e-12)
    assert metrics.ks_error(binary([0.9, 0.9], [1, 0])) == pytest.approx(0.8 / 2, abs=1e-12)
    confidence, correct = some(saturated=True)
    confidence = np.round(confidence, 2)
    sums = [(confidence - correct)[confidence <= c].sum() for c in np.unique(confidence)]
    want = np.abs(sums).max() / len(confidence)
    assert metrics.ks_error(binary(confidence, correct)) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("width", [0.4, 0.05, 0.002])
@pytest.mark.parametrize("saturated", [False, True])
def test_mmce_against_all_pairs(width, saturated):
    confidence, correct = some(300, saturated=saturated)
    excess = confidence - correct
    kernel = np.exp(-np.abs(confidence[:, None] - confidence[None]) / width)
    want = np.sqrt(excess @ kernel @ excess) / 300
    assert metrics.mmce(binary(confidence, correct), width) == pytest.approx(want, rel=1e-9)


def test_mmce_by_hand():
    # excesses 0.6 and -0.1, kernel exp(-0.3 / 0.4) between them
    want = np.sqrt(0.36 + 0.01 - 2 * 0.06 * np.exp(-0.75)) / 2
    assert metrics.mmce(binary([0.6, 0.9], [0, 1])) == pytest.approx(want, abs=1e-12)
