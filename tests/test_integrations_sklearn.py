"""The estimators under scikit-learn's own checks and tools."""

import contextlib
import pickle
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
import torch
from torch import nn

from doublehead import Calibrated, Predictions, metrics
from doublehead.calibrators import Head, Temperature
from doublehead.integrations.sklearn import CalibratedClassifier, DoubleHeadClassifier, ece_scorer, hold_out

pd = pytest.importorskip("pandas")
sklearn = pytest.importorskip("sklearn")
from sklearn.datasets import load_digits, load_wine  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_validate  # noqa: E402
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.svm import LinearSVC  # noqa: E402
from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

QUICK = {"hidden": (32,), "epochs": 30, "lr": 0.01, "random_state": 0}


@pytest.mark.parametrize(
    "estimator",
    [DoubleHeadClassifier(**{**QUICK, "epochs": 12, "lr": 0.03}), CalibratedClassifier(LogisticRegression())],
    ids=["DoubleHeadClassifier", "CalibratedClassifier"],
)
def test_check_estimator(estimator: Any) -> None:
    # Which samples are held back, and the batches, are random: a repeated sample is not one of twice the weight.
    checks = [f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")]
    not_held = dict.fromkeys(checks, "the split is random")
    passed = 0
    for made, check in estimator_checks_generator(estimator, expected_failed_checks=not_held, mark="skip"):
        with contextlib.suppress(SkipTest):  # that one, and what needs SCIPY_ARRAY_API
            check(made)
            passed += 1
    assert passed > 50


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    x, y = load_digits(return_X_y=True)
    return x, y


@pytest.mark.parametrize("calibrate", ["after", "beside"])
def test_calibrated_and_reproducible_on_digits(digits: tuple[Any, Any], calibrate: str) -> None:
    x, y = digits
    state = torch.get_rng_state()
    model = DoubleHeadClassifier(calibrate=calibrate, **QUICK).fit(x[:900], y[:900])
    assert torch.equal(state, torch.get_rng_state())
    again = DoubleHeadClassifier(calibrate=calibrate, **QUICK).fit(x[:900], y[:900])
    probs = model.predict_proba(x[900:])
    np.testing.assert_array_equal(probs, again.predict_proba(x[900:]))
    p = Predictions.from_probs(probs, y[900:])
    assert metrics.accuracy(p) > 0.9
    assert metrics.accuracy(p) == pytest.approx(model.score(x[900:], y[900:]))
    with torch.no_grad():
        main = model.model_.heads(torch.from_numpy(x[900:]).float()).main
    np.testing.assert_array_equal(probs.argmax(1), main.argmax(1))  # calibration changes no prediction
    assert metrics.nll(p) < metrics.nll(Predictions(main, y[900:])) + 0.05
    np.testing.assert_allclose(np.exp(model.predict_log_proba(x[900:])), probs)
    np.testing.assert_array_equal(model.decision_function(x[900:]), model.predict_log_proba(x[900:]))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(x[900:]), probs)


def test_weights_count_in_the_networks_loss() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 2))
    truth = x[:, 0] > 0.8  # about one in five
    wrong = generator.random(600) < 0.4
    y = np.where(truth ^ wrong, "yes", "no")
    plain = DoubleHeadClassifier(**QUICK).fit(x, y)
    weighted = DoubleHeadClassifier(**QUICK).fit(x, y, np.where(wrong, 0.0, 2.0))
    right = np.where(truth, "yes", "no")
    assert weighted.score(x, right) > 0.95 > plain.score(x, right)
    sure = [model.predict_proba(x).max(1).mean() for model in (weighted, plain)]
    assert sure[0] > sure[1]  # not calibrated on them
    ways = ("balanced", {"no": 1.0, "yes": 1e-6})
    balanced, alone = (DoubleHeadClassifier(class_weight=way, **QUICK).fit(x, right) for way in ways)
    assert (alone.predict(x) == "no").all()
    recall = (balanced.predict(x)[truth] == "yes").mean()
    assert recall > 0.95
    odds = balanced.decision_function(x)
    assert odds.shape == (600,)
    np.testing.assert_array_equal(balanced.predict(x) == "yes", odds > 0)
    with pytest.raises(ValueError, match="sample_weight"):
        DoubleHeadClassifier().fit(x, y, np.ones(3))


def test_training_stops_early_and_keeps_the_best() -> None:
    """Labels that are noise: the held-back NLL is best at once, and training must not go on to learn them."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(120, 20)), generator.integers(0, 2, 120)
    settings = {**QUICK, "epochs": 200, "lr": 0.03}
    model = DoubleHeadClassifier(patience=5, **settings).fit(x, y)
    assert model.n_epochs_ < 40
    patient = DoubleHeadClassifier(patience=200, **settings).fit(x, y)
    assert patient.n_epochs_ == 200
    held = hold_out(y, 0.2, int(np.random.RandomState(0).randint(2**31 - 1)))[1]
    with torch.no_grad():  # 200 epochs on noise end at an NLL of several; the best epoch is close to log 2
        main = patient.model_.heads(torch.from_numpy(x[held]).float()).main
    assert metrics.nll(Predictions(main, y[held])) < 0.8
    probs = model.predict_proba(generator.normal(size=(500, 20)))
    assert probs.max(1).mean() < 0.75


def test_a_module_on_images_and_one_from_a_function() -> None:
    x, y = load_digits(return_X_y=True)
    images = x.reshape(-1, 1, 8, 8)[:400].astype(np.float32) / 16
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = DoubleHeadClassifier(module=net, **QUICK).fit(images, y[:400])
    assert model.score(images, y[:400]) > 0.9
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert isinstance(model.model_, Calibrated)

    def make(n_features: int, n_classes: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(17, 2), nn.Flatten(), nn.Linear(2 * n_features, n_classes))

    whole = DoubleHeadClassifier(module=make, **QUICK).fit(x[:400].astype(int), y[:400])
    assert whole.score(x[:400].astype(int), y[:400]) > 0.8


def test_scorer_by_hand() -> None:
    class Sure:
        classes_ = np.array(["no", "yes"])

        def predict_proba(self, x: Any) -> Any:
            return np.tile([0.25, 0.75], (len(x), 1))

    x, y = np.zeros((4, 1)), np.array(["yes", "no", "no", "yes"])
    assert ece_scorer(Sure(), x, y) == pytest.approx(-0.25)
    assert ece_scorer(Sure(), x, y, n_bins=1) == pytest.approx(-0.25)
    with pytest.raises(ValueError, match="y must hold no class that the estimator was not fitted on"):
        ece_scorer(Sure(), x, np.array(["yes", "no", "maybe", "zebra"]))


def test_scorer_in_cross_validation_and_grid_search() -> None:
    x, y = load_wine(return_X_y=True)
    kept = {"return_estimator": True, "return_indices": True}
    found = cross_validate(GaussianNB(), x, y, scoring=ece_scorer, cv=3, **kept)
    for score, model, fold in zip(found["test_score"], found["estimator"], found["indices"]["test"]):
        p = Predictions.from_probs(model.predict_proba(x[fold]), y[fold])
        assert score == pytest.approx(-metrics.ece(p))
    forest = RandomForestClassifier(20, random_state=0)
    search = GridSearchCV(forest, {"max_depth": [1, 8]}, scoring=ece_scorer, cv=3)
    assert search.fit(x, y).best_score_ <= 0


def test_calibrators_in_pipelines() -> None:
    x, y = load_digits(return_X_y=True)
    calibrated = CalibratedClassifier(GaussianNB(), Temperature(), random_state=0)
    behind = make_pipeline(StandardScaler(), calibrated).fit(x[:1000], y[:1000])
    raw = make_pipeline(StandardScaler(), GaussianNB()).fit(x[:1000], y[:1000])
    before, after = (Predictions.from_probs(m.predict_proba(x[1000:]), y[1000:]) for m in (raw, behind))
    assert metrics.nll(after) < metrics.nll(before) / 2  # naive Bayes is far too sure
    inner = behind[-1]
    rows = hold_out(y[:1000], 0.2, int(np.random.RandomState(0).randint(2**31 - 1)))
    scaled = behind[0].transform(x[:1000])
    nb = GaussianNB().fit(scaled[rows[0]], y[rows[0]])
    log_probs = np.log(np.clip(nb.predict_proba(scaled[rows[1]]), np.finfo(np.float64).tiny, None))
    want = Temperature().fit(Predictions(log_probs, y[rows[1]])).temperature_
    assert float(inner.calibrator_.temperature_) == pytest.approx(float(want))
    inside = make_pipeline(StandardScaler(), LinearSVC())
    around = CalibratedClassifier(inside, random_state=0).fit(x[:500], y[:500])
    assert isinstance(around.calibrator_, Head)
    np.testing.assert_allclose(around.predict_proba(x[:9]).sum(1), 1)
    binary = CalibratedClassifier(LinearSVC(), random_state=0).fit(x[:500], y[:500] > 4)
    assert binary.predict_proba(x[:9]).shape == (9, 2)
    assert Temperature().get_params() == sklearn.base.clone(Temperature()).get_params()


def test_hold_out_keeps_proportions_and_everything() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    learn, hold = hold_out(labels, 0.2, seed=0)
    assert sorted([*learn, *hold]) == list(range(100))
    assert np.bincount(labels[hold]).tolist() == [10, 6, 4]
    learn, hold = hold_out(np.array([0, 1]), 0.2, seed=0)
    assert (len(learn), len(hold)) == (1, 1)


def test_bad_use_is_named() -> None:
    class Mute(sklearn.base.BaseEstimator):
        def fit(self, x: Any, y: Any) -> Any:
            self.classes_ = np.unique(y)
            return self

    y = np.arange(10) % 2
    few = CalibratedClassifier(GaussianNB(), calib_share=0.8)
    for model, labels, message in (
        (DoubleHeadClassifier(calibrate="never"), y, "calibrate must be 'after' or 'beside', got 'never'"),
        (DoubleHeadClassifier(), 0 * y, "DoubleHeadClassifier needs at least 2 classes, got one class"),
        (DoubleHeadClassifier(calib_share=1.5), y, "on both sides: it is 1.5 of n_samples = 10"),
        (few, np.append(y, 2), r"every class must have a sample left to train on, got none of \[\d\]"),
        (CalibratedClassifier(Mute()), y, "predict_proba or decision_function, Mute has neither"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            model.fit(np.random.default_rng(0).normal(size=(len(labels), 2)), labels)


def test_weights_reach_the_estimator_and_its_decision_is_calibrated(digits: tuple[Any, Any]) -> None:
    x, y = digits[0][:600], digits[1][:600] > 4
    weights = np.random.default_rng(0).integers(0, 3, 600)
    model = CalibratedClassifier(LogisticRegression(max_iter=500), Temperature(), random_state=0)
    probs = model.fit(x, y, sample_weight=weights).predict_proba(x)
    used = weights > 0
    again = model.fit(x[used], y[used], sample_weight=weights[used])
    np.testing.assert_allclose(again.predict_proba(x), probs)
    assert not np.allclose(model.fit(x[used], y[used]).predict_proba(x), probs)
    odds = model.decision_function(x)
    assert odds.shape == (600,)
    np.testing.assert_allclose(1 / (1 + np.exp(-odds)), model.predict_proba(x)[:, 1])
