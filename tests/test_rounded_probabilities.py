"""Probabilities as files have them: rounded, in half precision, with exact zeros and ones. Real logits throughout."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pandas")

from results import Split, stored_runs

from doublehead import Predictions, metrics
from doublehead.calibrators import CALIBRATORS, make
from doublehead.outcomes import Outcomes
from doublehead.stream import Tally

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": Tensor.float,
    "float16": Tensor.half,
    "6 digits": lambda probs: probs.round(decimals=6),
    "4 digits": lambda probs: probs.round(decimals=4),
    "3 digits": lambda probs: probs.round(decimals=3),
    "2 digits": lambda probs: probs.round(decimals=2),
    "zeros and ones": lambda probs: torch.where(probs.amax(1, True) > 0.9, probs.round(), probs),
}
METRICS = {
    name: getattr(metrics, name)
    for name in ("accuracy", "adaptive_ece", "aurc", "brier", "debiased_ece", "ece", "ece2", "ks_error",
                 "mce", "mean_confidence", "mean_entropy", "mmce", "nll", "overconfidence", "smooth_ece")
}  # fmt: skip


def probs_of(split: Split, n: int) -> tuple[Tensor, Tensor]:
    return split.main[:n].double().softmax(1), split.labels[:n]


@pytest.fixture(scope="module")
def real() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(probs, labels) of calibration and of test images, from an overconfident network."""
    run = next(run for run in stored_runs() if run.name.startswith("cifar10-resnet50-cross_entropy"))
    return probs_of(run.calib, 800), probs_of(run.test, 1500)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", CALIBRATORS)
def test_a_calibrator_repairs_what_files_hold(method: str, form: str, real: Any) -> None:
    calib, test = (Predictions.from_probs(FORMS[form](x), y, tolerance=0.05) for x, y in real)
    if CALIBRATORS[method].binary_only:
        pairs = ((p.probs[:, 3].clamp(max=1), (p.labels == 3).long()) for p in (calib, test))
        calib, test = (Predictions.from_binary(*pair, are_probs=True) for pair in pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fit did not converge
        after = make(method).fit(calib).calibrate(test)
    assert metrics.ece(after) < metrics.ece(test) + 0.005
    assert metrics.nll(after) < metrics.nll(test) + 0.05
    assert metrics.accuracy(after) > metrics.accuracy(test) - 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_hardly_moves(metric: str, form: str, real: tuple[tuple[Tensor, Tensor], ...]) -> None:
    probs, labels = real[1]
    exact = METRICS[metric](Predictions.from_probs(probs, labels))
    found = METRICS[metric](Predictions.from_probs(FORMS[form](probs), labels, tolerance=0.05))
    reach = 0.15 if metric == "mce" else 0.05  # the worst bin may hold few samples
    if (metric, form) == ("nll", "zeros and ones"):
        reach = 0.5  # wrong answers of probability 1 cost what the smallest probability of the file says
    assert found == pytest.approx(exact, abs=reach)


def test_zeros_are_taken_as_below_the_resolution() -> None:
    p = Predictions.from_probs([[0.999, 0.001, 0.0], [0.0, 0.6, 0.4]], [2, 1])
    assert p.zero_floor == pytest.approx(0.001 / 3)
    assert p.logits[0, 2].exp() == pytest.approx(p.zero_floor)
    assert p[1:].logits[0, 0] == p.logits[1, 0]  # whatever rows are taken
    assert metrics.nll(p) == pytest.approx(-(math.log(0.001 / 3) + math.log(0.6)) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_stand_for_less_than_the_smallest_entry_of_any_type(dtype):
    probs = torch.tensor([[1.0, 0.0, -0.0], [0.99, 0.005, 0.005]], dtype=dtype)
    floor = Predictions.from_probs(probs, [0, 1], tolerance=0.01).zero_floor
    assert floor == pytest.approx(float(probs[1, 1]) / 3)


def test_labels_of_probability_zero_are_told_and_do_not_depend_on_chunks() -> None:
    p = Predictions.from_probs([[0.9, 0.1, 0.0]] * 9 + [[0.999, 0.001, 0.0]], [0] * 8 + [2, 0])
    rows = slice(4), slice(4, None)
    first, second = (Tally.of(Predictions.from_probs(p.probs[some], p.labels[some])) for some in rows)
    summary = (first + second).summary()
    assert summary.metrics["nll"].estimate == pytest.approx(metrics.nll(p))
    assert summary.to_dict() == Tally.of(p).summary().to_dict()
    assert summary.n_zero_labels == 1
    assert "infinite" in summary.notes[0]
    assert summary.notes[0] in str(summary)
    assert Tally.of(p[:8]).summary().notes == []


def test_weighted_labels_of_probability_zero_do_not_depend_on_chunks() -> None:
    probs = torch.tensor([[0.9, 0.1, 0.0]] * 9 + [[0.999, 0.001, 0.0]])
    labels, weights = torch.tensor([0] * 6 + [2, 2, 2, 0]), torch.tensor([1.0] * 6 + [0.0, 2.0, 0.5, 1.0])
    p = Predictions.from_probs(probs, labels, weights)
    rows = slice(8), slice(8, None)
    parts = [Predictions.from_probs(probs[some], labels[some], weights[some]) for some in rows]
    summary = (Tally.of(parts[0]) + Tally.of(parts[1])).summary()
    assert summary.metrics["nll"].estimate == pytest.approx(metrics.nll(p))
    assert summary.to_dict() == Tally.of(p).summary().to_dict()
    assert summary.n_zero_labels == 2  # of a weight above 0
    kept = Outcomes.joined([Outcomes.of(part) for part in parts]).with_floor(p.zero_floor)
    torch.testing.assert_close(kept.nll, metrics.per_sample(p)["nll"])
