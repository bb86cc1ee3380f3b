"""Summary, Tally and compare: the numbers of the metrics, exact sums, intervals, the verdict, how it is shown."""

import json
import math

import numpy as np
import pytest
import torch

import doublehead
from doublehead import Predictions, Summary, metrics
from doublehead.bins import Bins
from doublehead.metrics import Floor, Interval
from doublehead.outcomes import compare
from doublehead.stream import Tally, exact_sum
from doublehead.summary import METRICS, aligned, percent
from samples import random_predictions, refused


def test_every_number_is_that_of_its_metric() -> None:
    p = random_predictions(2000)
    found = Summary.of(p, 10)
    of_bins = {"ece_classwise": {"components": "classwise"}, "ece_all": {"components": "all"}}
    for name, value in found.metrics.items():
        metric = getattr(metrics, "ece" if name in of_bins else name)
        has_bins = "n_bins" in metric.__code__.co_varnames
        wanted = metric(p, 10, **of_bins.get(name, {})) if has_bins else metric(p)
        assert value.estimate == pytest.approx(wanted, abs=1e-9), name
        assert math.isnan(value.low) or value.low <= value.estimate <= value.high
    assert list(found.metrics) == list(METRICS)
    assert (found.n, found.n_classes, found.n_bins) == (2000, 7, 10)
    assert found.floor == metrics.ece_floor(p, 10)
    assert found.p_value == metrics.calibration_test(p, 10).p_value
    assert found.values["ece_floor_high"] == found.floor.high
    streamed = Tally.of(p, 10).summary()
    assert all(streamed.metrics[name] == found.metrics[name] or math.isnan(found.metrics[name].low)
               for name in streamed.metrics)  # fmt: skip
    whole = {"adaptive_ece", "debiased_ece", "smooth_ece", "ks_error", "aurc"}  # need all samples at once
    assert set(METRICS) - set(streamed.metrics) == whole


def numbers_of(rows: np.ndarray) -> dict[str, float]:
    """Rows (N, 5) of confidence, correct, nll, brier, entropy -> the metrics that have intervals, in plain numpy."""
    confidence, correct, *scores = rows.T
    which = np.ceil(confidence * 15).astype(int) - 1
    n, excess = np.bincount(which, minlength=15), np.bincount(which, confidence - correct, 15)
    gap = excess / np.maximum(n, 1)
    return {
        "accuracy": correct.mean(), "mean_confidence": confidence.mean(),
        "overconfidence": (confidence - correct).mean(),
        "ece": np.abs(excess).sum() / n.sum(), "ece2": np.sqrt((n * gap**2).sum() / n.sum()), "mce": np.abs(gap).max(),
        **dict(zip(("nll", "brier", "mean_entropy"), np.mean(scores, 1))),
    }  # fmt: skip


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_intervals_agree_with_resampling_the_rows(sharpness: float) -> None:
    p = random_predictions(3000, sharpness=sharpness)
    every = Tally.of(p).summary().metrics
    found = {name: value for name, value in every.items() if not math.isnan(value.low)}
    rows = np.stack([*p.top_label(), *metrics.per_sample(p).values()], 1)
    rng = np.random.default_rng(0)
    drawn = [numbers_of(rows[rng.integers(0, 3000, 3000)]) for _ in range(2000)]
    assert found.keys() == drawn[0].keys()
    for name, (estimate, ours_low, ours_high) in found.items():
        assert estimate == pytest.approx(numbers_of(rows)[name], abs=1e-6), name
        draws = np.array([one[name] for one in drawn])
        low, high = np.quantile(draws - draws.mean() + estimate, [0.025, 0.975])
        # 1000 draws place a 2.5 % quantile within about 6 % of the width; MCE depends on one small bin
        slack = (0.25 if name == "mce" else 0.12) * (high - low)
        assert ours_low == pytest.approx(low if name == "overconfidence" else max(low, 0), abs=slack), name
        assert ours_high == pytest.approx(high, abs=slack), name


def test_tallies_of_any_split_are_the_same_bits() -> None:
    p = random_predictions(1000)
    groups = np.array(["a", "b", "c"])[np.arange(1000) % 3]
    whole = Tally.of(p, groups=groups)
    for size in (5, 37, 999):
        parts = [Tally.of(p[i : i + size], groups=groups[i : i + size]) for i in range(0, 1000, size)]
        total = sum(parts[1:], parts[0])
        assert total.top == whole.top
        assert total.classwise == whole.classwise
        assert total.predicted == whole.predicted
        assert (total.sums, total.squares) == (whole.sums, whole.squares)
        assert total.groups["b"].top == whole.groups["b"].top
    with pytest.raises(ValueError, match="same bins and classes, got 15 and 10 bins, 7 and 7 classes"):
        _ = whole + Tally.of(p, 10)


def test_exact_sum_is_exact() -> None:
    values = torch.tensor([0.1, 1e9, 3.0, 2.0**-40])
    assert exact_sum(values.double()) == sum(round(v * 2**32) for v in values.double().tolist())
    assert exact_sum(torch.tensor([1e300, 1.0], dtype=torch.float64)) == int(1e300) * 2**32 + 2**32


def test_groups_are_summaries_of_their_rows() -> None:
    p = random_predictions(300)
    found = Summary.of(p, by=[f"site {i % 2}" for i in range(300)])
    assert list(found.groups) == ["site 0", "site 1"]
    rows = torch.arange(300) % 2 == 1
    assert found.groups["site 1"].values["nll"] == pytest.approx(metrics.nll(p[rows]))
    assert "site 1" in str(found)
    assert set(found.to_dict()["groups"]) == set(found.groups)
    refused("at most 1000 different values", Summary.of, random_predictions(1001), by=list(range(1001)))
    refused(r"one group for each of 300 samples, got shape \(2,\)", Summary.of, p, by=["a", "b"])


def graded(n: int, ece: float, floor: float, p_value: float, over: float = 0.0) -> Summary:
    numbers = {"ece": Interval(ece, 0, 1), "overconfidence": Interval(over, -1, 1)}
    bins = Bins.of(torch.tensor([0.5]), torch.tensor([True]), 15)
    return Summary(n, 3, 15, numbers, Floor(floor, floor / 2, 2 * floor), p_value, bins)


@pytest.mark.parametrize(
    ("summary", "key"),
    [
        (graded(900, 0.006, 0.005, 0.4), "good"),
        (graded(900, 0.20, 0.01, 0.05), "good"),  # by the test first
        (graded(900, 0.0199, 0.01, 0.01), "fair"),
        (graded(900, 0.021, 0.01, 0.01), "poor"),
        (graded(900, 0.061, 0.01, 0.01), "bad"),
        (graded(20, 0.2, 0.01, 0.001), "bad"),  # few samples can show miscalibration
        (graded(900, 0.05, 0.05, 0.4), "unknown"),  # a calibrated model may have 10 %
        (graded(99, 0.0, 0.0, 1.0), "unknown"),  # but never calibration
        (graded(1, 1.0, 0.0, 0.0005), "unknown"),
    ],
)
def test_grades(summary: Summary, key: str) -> None:
    assert summary.grade.key == key
    assert summary.verdict.lower().startswith(summary.grade.word)
    assert summary.verdict.endswith(".")


def test_verdict_names_the_direction() -> None:
    assert "overconfident by 8.00 points" in graded(900, 0.09, 0.005, 0.001, over=0.08).verdict
    assert "underconfident by 8.00 points" in graded(900, 0.09, 0.005, 0.001, over=-0.08).verdict
    mixed = graded(900, 0.09, 0.005, 0.001, over=0.01).verdict
    assert "overconfident" in mixed
    assert "underconfident" in mixed


def test_shown_as_text_html_frame_json_and_picture() -> None:
    p = random_predictions(500)
    found = Summary.of(p)
    text = str(found)
    assert f"{100 * metrics.ece(p):.2f} %" in text
    assert f"{metrics.nll(p):.4f}" in text
    assert text.endswith(found.verdict)
    assert "<table>" in found._repr_html_()
    hostile = Summary.of(p, by=["<b>x</b>"] * 500)
    assert "<b>" not in hostile._repr_html_()
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["metrics"]["aurc"] == {"value": metrics.aurc(p), "low": None, "high": None}
    frame = pytest.importorskip("pandas") and found.to_frame()
    assert frame.loc["ece", "value"] == pytest.approx(metrics.ece(p))
    pytest.importorskip("matplotlib")
    assert found.plot(title="mine").get_title() == "mine"


def test_compare_is_paired() -> None:
    before = random_predictions(400)
    after = Predictions(2 * before.logits, before.labels)
    found = compare(before, after)
    difference = metrics.per_sample(after)["nll"] - metrics.per_sample(before)["nll"]
    half = 1.96 * float(difference.std()) / 20
    assert found.nll == pytest.approx((float(difference.mean()),) * 3, abs=1.01 * half)
    assert found.nll.high - found.nll.low == pytest.approx(2 * half, rel=0.01)
    assert (found.n_changed, found.n, found.is_clear) == (0, 400, True)
    assert not compare(before, before).is_clear
    assert not compare(before[:1], after[:1]).is_clear  # one sample shows nothing
    even, shifted = (Predictions([[0.0, 0.0]] * 50, [0] * 50), Predictions([[1e-7, 0.0]] * 50, [0] * 50))
    assert compare(even, shifted).nll.high < 0
    assert not compare(even, shifted).is_clear  # a rounding that is the same for every sample shows nothing
    flipped = Predictions(before.logits.flip(1), before.labels)
    assert compare(before, flipped).n_changed == int((flipped.predicted != before.predicted).sum())
    refused("same labels in the same order, got 400 and 100 samples", compare, before, before[:100])


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, list], ids=["numpy", "torch", "list"])
def test_evaluate_takes_arrays(make) -> None:
    p = random_predictions(60)
    probs = p.probs.tolist()
    wanted = pytest.approx(Summary.of(Predictions.from_probs(probs, p.labels)).values, abs=1e-6)
    assert doublehead.evaluate(make(probs), make(p.labels.tolist())).values == wanted
    assert doublehead.evaluate(p).values == Summary.of(p).values
    from_logits = doublehead.evaluate(logits=make(p.logits.tolist()), labels=p.labels)
    assert from_logits.values["nll"] == pytest.approx(metrics.nll(p))


def test_classes_and_groups_that_deviate_take_the_badge() -> None:
    """Half overconfident, half underconfident: calibrated as a whole, in no class and no group."""
    n = 4000
    confidence = np.tile([0.75, 0.25], (n, 1))
    confidence[n // 2 :] = confidence[n // 2 :, ::-1]  # the second half says class 1
    right = np.arange(n) % 20 < np.where(np.arange(n) < n // 2, 17, 13)  # 85 % and 65 % for 75 %
    labels = np.where(np.arange(n) < n // 2, ~right, right).astype(int)
    whole = doublehead.evaluate(confidence, labels)
    assert whole.p_value > 0.05
    assert (whole.n_classes_off, whole.grade.word) == (2, "calibrated overall, not in every class")
    groups = np.where(np.arange(n) < n // 2, "a", "b")
    by = doublehead.evaluate(confidence, labels, by=groups)
    assert by.groups_off == ["a", "b"]
    assert "2 of 2 groups deviate" in by.verdict


def test_evaluate_takes_names_and_binary_scores() -> None:
    probs = [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]
    named = doublehead.evaluate(probs, ["cat", "dog", "dog"], classes=["cat", "dog"])
    assert named.values == doublehead.evaluate(probs, [0, 1, 1]).values
    binary = doublehead.evaluate(np.array([0.1, 0.8, 0.4]), [0, 1, 1])
    assert binary.values == pytest.approx(named.values)
    assert doublehead.evaluate(probs, ["cat", "dog", "dog"]).values == named.values
    emus = {"labels": ["cat", "emu", "dog"], "classes": ["cat", "dog"]}
    for given, message in (
        ({"probs": probs, "labels": ["dog", "dog", "dog"]}, "classes must name the columns"),
        ({"probs": probs, **emus}, "labels must be among the classes cat, dog, got 'emu'"),
        ({"probs": probs}, "labels must be given"),
        ({"labels": [0, 1, 1]}, "probabilities as the first argument or logits="),
        ({"labels": [0, 1, 1], "probs": probs, "logits": probs}, "as the first argument or logits="),
        ({"logits": probs, "labels": [0, 1, 1]}, "logits must not be probabilities, got rows >= 0"),
    ):
        refused(message, doublehead.evaluate, **given)


def test_evaluate_takes_data_frames_and_paths(tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    p = random_predictions(90, k=3)
    names = ["ant", "bee", "cow"]
    probs = pandas.DataFrame(p.probs.double().numpy(), columns=names)
    labels = pandas.Series([names[y] for y in p.labels])
    wanted = doublehead.evaluate(p.probs.double(), p.labels).values
    assert doublehead.evaluate(probs, labels).values == wanted
    assert doublehead.evaluate(probs, labels.astype("category")).values == wanted
    whole = probs.assign(truth=labels, site=["x", "y"] * 45)
    found = doublehead.evaluate(whole, by="site")
    assert found.values == wanted
    assert list(found.groups) == ["x", "y"]
    assert doublehead.evaluate(whole, "truth", scores=names).values == wanted
    refused("labels must have 90 entries, one per row, got 2", doublehead.evaluate, probs, ["ant", "bee"])
    whole.to_csv(tmp_path / "a.csv", index=False)
    streamed = doublehead.evaluate(tmp_path / "a.csv", by="site")
    assert streamed.values["nll"] == pytest.approx(wanted["nll"])
    assert list(streamed.groups) == ["x", "y"]
    with pytest.raises(ValueError, match="by must name a column of the files, got list"):
        doublehead.evaluate(tmp_path / "a.csv", by=["x", "y"] * 45)
    p.save(tmp_path / "a.npz")  # states that it holds logits
    assert doublehead.evaluate(str(tmp_path / "a.npz")).values["nll"] == pytest.approx(metrics.nll(p))


def test_files_and_frames_show_their_kind_and_calibrate_reads_what_evaluate_reads(tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    p = random_predictions(500, k=3)
    names, scores = ["label", *(f"logit_{i}" for i in range(p.n_classes))], p.logits.double().numpy()
    frame = pandas.DataFrame(np.column_stack([p.labels, scores]), columns=names).astype({"label": int})
    frame.to_csv(tmp_path / "a.csv", index=False)
    unnamed = frame.rename(columns={name: name.replace("logit_", "score_") for name in names})
    unnamed.to_csv(tmp_path / "b.csv", index=False)
    forms = [frame, tmp_path / "a.csv", str(tmp_path / "a.csv"), f"logits:{tmp_path / 'b.csv'}"]
    nll, temperature = metrics.nll(p), float(doublehead.calibrate(p, method="temperature").temperature_)
    for form in forms:
        assert doublehead.evaluate(form).values["nll"] == pytest.approx(nll)
        fitted = doublehead.calibrate(form, method="temperature")
        assert float(fitted.temperature_) == pytest.approx(temperature, rel=1e-4)
    fitted = doublehead.calibrate(p.probs.numpy(), p.labels.numpy(), method="temperature")
    assert float(fitted.temperature_) == pytest.approx(temperature, rel=1e-3)
    refused("logits", doublehead.evaluate, tmp_path / "b.csv")
    refused("labels must be given", doublehead.calibrate, p.probs)


def test_tables_align_wide_letters_and_zeros_have_no_minus() -> None:
    rows = aligned([["group", "n"], ["北京", "1"], ["ab", "22"]]).splitlines()
    assert rows == ["group   n", "北京    1", "ab     22"]  # two columns for each wide letter
    assert (percent(-1e-9), percent(-0.0123)) == ("0.00 %", "-1.23 %")
    assert "-0.00 " not in str(
        Summary.of(Predictions.from_probs([[0.75 - 1e-6, 0.25 + 1e-6]] * 4, [0, 0, 0, 1]))
    )
