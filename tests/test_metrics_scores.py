"""Proper scores and AUROC: by hand and against scikit-learn."""

import math

import numpy as np
import pytest
import torch

from doublehead import metrics
from doublehead.predictions import Predictions
from doublehead.summary import Summary
from doublehead.system import require


@pytest.fixture(scope="module")
def p() -> Predictions:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 7, generator=generator, dtype=torch.float64) * 2
    right = torch.rand(400, generator=generator) < 0.6
    labels = torch.where(right, logits.argmax(1), torch.randint(7, (400,), generator=generator))
    return Predictions(logits, labels)


def test_by_hand():
    p = Predictions.from_probs(np.array([[0.5, 0.5, 0.0], [0.2, 0.7, 0.1]]), [0, 2])
    assert metrics.accuracy(p) == 0.5
    assert metrics.nll(p) == pytest.approx(-(np.log(0.5) + np.log(0.1)) / 2)
    assert metrics.brier(p) == pytest.approx((0.25 + 0.25 + 0.04 + 0.49 + 0.81) / 2)
    entropy = -(np.log(0.5) + 0.2 * np.log(0.2) + 0.7 * np.log(0.7) + 0.1 * np.log(0.1)) / 2
    assert metrics.mean_entropy(p) == pytest.approx(entropy)
    assert metrics.mean_confidence(p) == pytest.approx(0.6)
    assert metrics.overconfidence(p) == pytest.approx(0.1)


def test_a_label_of_probability_zero_is_finite():
    p = Predictions.from_probs(np.array([[1.0, 0.0]], dtype=np.float32), [1])
    assert metrics.nll(p) == pytest.approx(-math.log(0.01 / 2))
    assert metrics.mean_entropy(p) == 0.0


def test_against_sklearn(p):
    sk = require("sklearn.metrics", extra="sklearn")
    probs, labels = p.probs.numpy(), p.labels.numpy()
    assert metrics.accuracy(p) == pytest.approx(sk.accuracy_score(labels, probs.argmax(1)))
    assert metrics.nll(p) == pytest.approx(sk.log_loss(labels, probs, labels=range(7)))
    one_hot = np.eye(7)[labels]
    assert metrics.brier(p) == pytest.approx(((probs - one_hot) ** 2).sum(1).mean())


def test_logits_and_their_probabilities_agree(p):
    q = Predictions.from_probs(p.probs, p.labels)
    assert Summary.of(q).values == pytest.approx(Summary.of(p).values, abs=1e-9)


def test_float32_logits_of_many_classes_keep_their_digits():
    logits, labels = torch.randn(200, 1000) * 5, torch.randint(0, 1000, (200,))
    single, double = Predictions(logits, labels), Predictions(logits.double(), labels)
    for metric in (metrics.nll, metrics.brier, metrics.mean_entropy):
        assert metric(single) == pytest.approx(metric(double), rel=1e-5)


def test_auroc_by_hand():
    # pairs: 0.9 beats both, 0.8 ties one and beats one, 0.3 beats one
    assert metrics.auroc([0.9, 0.8, 0.3], [0.8, 0.1]) == pytest.approx((2 + 1.5 + 1) / 6)
    with pytest.raises(
        ValueError, match=r"negative must be finite numbers \(N,\) with N >= 1, got shape \(0,\)"
    ):
        metrics.auroc([0.5], np.zeros(0))
    with pytest.raises(ValueError, match="positive must be finite"):
        metrics.auroc([np.nan], [0.5])


@pytest.mark.parametrize("digits", [1, 9])
def test_auroc_against_sklearn(digits):
    sk, rng = require("sklearn.metrics", extra="sklearn"), np.random.default_rng(0)
    positive, negative = (np.round(rng.normal(*side), digits) for side in ((0.8, 0.2, 300), (0.6, 0.3, 170)))
    truth = np.r_[np.ones(300), np.zeros(170)]
    want = sk.roc_auc_score(truth, np.r_[positive, negative])
    assert metrics.auroc(positive, negative) == pytest.approx(want)
