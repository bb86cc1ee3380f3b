"""Calibrators that map probabilities: Platt, beta, histogram, BBQ, isotonic, spline, and the maps they share."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, softplus

from doublehead.calibrators import (
    BBQ,
    Beta,
    HistogramBinning,
    Isotonic,
    Platt,
    Spline,
    Temperature,
    base,
)
from doublehead.calibrators.binning import _score_binning
from doublehead.calibrators.smooth import _slope_of_running_mean
from doublehead.predictions import Predictions
from samples import overconfident


def binary(n: int = 200, seed: int = 0) -> Predictions:
    """Scores of class 1, too sure by half and shifted."""
    generator = torch.Generator().manual_seed(seed)
    odds = 1.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    labels = (torch.rand(n, generator=generator, dtype=torch.float64) < odds.sigmoid()).long()
    return Predictions.from_binary(2 * odds + 0.5, labels)


def several(n: int = 300, k: int = 4, seed: int = 0) -> Predictions:
    return overconfident(n, k, factor=2.0, spread=2.0, seed=seed, dtype=torch.float64)


def test_log_odds_are_exact_where_probabilities_round_to_one() -> None:
    logits = torch.tensor([[50.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-3.0, 2.0, 2.0]])
    wide = logits.double()
    others = torch.stack([wide[:, [j for j in range(3) if j != k]].logsumexp(1) for k in range(3)], 1)
    torch.testing.assert_close(base.log_odds(logits), (wide - others).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base.top_log_odds(logits), (wide - others).amax(1).float())
    assert float(base.log_odds(logits).sigmoid()[0, 0]) == 1.0  # what a probability would have lost


def test_steps_are_right_closed_in_each_class() -> None:
    edges = torch.tensor([[0.0, 1.0], [5.0, torch.inf]])
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    x = torch.tensor([[-1.0, 5.0], [0.0, 5.1], [1.0, 9.0], [1.1, 4.0]])
    assert base.steps(x, edges, values).tolist() == [[1, 4], [1, 5], [2, 5], [3, 4]]


def test_lines_agree_with_numpy() -> None:
    knots = torch.tensor([[0.0, 1.0, 4.0, 4.0], [-2.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
    values = torch.tensor([[1.0, 3.0, 0.0, 0.0], [0.0, 1.0, 1.0, 5.0]], dtype=torch.float64)
    x = torch.linspace(-3, 5, 41, dtype=torch.float64)
    found = base.lines(torch.stack([x, x], 1), knots, values)
    for c in range(2):
        expected = np.interp(x.numpy(), knots[c].numpy(), values[c].numpy())
        np.testing.assert_allclose(found[:, c].numpy(), expected, atol=1e-12)


def test_top_odds_are_set_as_far_as_the_top_class_stays() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.9, 0.0]])
    probs = base.with_top_odds(logits, torch.tensor([math.log(0.6 / 0.4), -20.0])).exp()
    assert float(probs[0, 0]) == pytest.approx(0.6)
    assert float(probs[0, 1] / probs[0, 2]) == pytest.approx(math.e)  # the rest keeps its proportions
    assert probs.argmax(1).tolist() == [0, 0]
    assert float(probs[1, 0]) == pytest.approx(float(probs[1, 1]), rel=1e-5)
    assert probs.sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_keep_top_breaks_ties_for_the_predicted_class_only() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    out = base.keep_top(torch.tensor([[-1.0, -1.0, -1.0], [-3.0, -2.0, -1.0]]), logits)
    assert out.argmax(1).tolist() == [2, 2]
    torch.testing.assert_close(out[0], torch.full((3,), -1.0), rtol=1e-5, atol=1e-5)
    assert out[1].tolist() == [-3.0, -2.0, -1.0]


def test_normalising() -> None:
    out = base.log_normalise(torch.tensor([[0.2, 0.2, 0.0]]), 0.1).exp()
    torch.testing.assert_close(out, torch.tensor([[0.4, 0.4, 0.2]]))


def test_platt_agrees_with_scikit_learn() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    p = binary()
    odds = (p.logits[:, 1] - p.logits[:, 0]).numpy()
    peer = calibration._SigmoidCalibration().fit(odds, p.labels.numpy())
    fitted = Platt().fit(p)
    assert float(fitted.slope_) == pytest.approx(-peer.a_, rel=1e-4)
    assert float(fitted.shift_) == pytest.approx(-peer.b_, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(fitted.calibrate(p).probs[:, 1].numpy(), peer.predict(odds), atol=1e-5)


def test_platt_by_hand() -> None:
    # Labels count as 1/6 and 5/6. Two scores, so the line meets both means: 1/3 at 0 and 2/3 at 1.
    p = Predictions.from_binary([0.0] * 4 + [1.0] * 4, [0, 0, 0, 1, 1, 1, 1, 0])
    fitted = Platt().fit(p)
    assert float(fitted.shift_) == pytest.approx(-math.log(2), rel=1e-5)
    assert float(fitted.slope_) == pytest.approx(2 * math.log(2), rel=1e-5)


def test_beta_agrees_with_logistic_regression_on_its_features() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    p = binary(n=400)
    probs = p.probs[:, 1].numpy()
    features = np.stack([np.log(probs), -np.log1p(-probs)], 1)
    peer = linear.LogisticRegression(C=1e9, tol=1e-10, max_iter=10_000).fit(features, p.labels.numpy())
    assert (peer.coef_ > 0).all()  # no bound is active
    fitted = Beta().fit(p).weights_[0]
    np.testing.assert_allclose(fitted.numpy(), [*peer.coef_[0], peer.intercept_[0]], rtol=2e-3, atol=2e-3)


def test_beta_weights_stay_at_zero_or_above() -> None:
    # Frequencies that fall at the upper end ask for b < 0.
    odds = torch.linspace(-4, 4, 200, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rate = torch.where(odds < 0, odds.sigmoid(), 0.5 - 0.12 * odds)
    draws = torch.rand(200, generator=generator, dtype=torch.float64)
    p = Predictions.from_binary(odds, (draws < rate).long())
    a, b, c = Beta().fit(p).weights_[0].tolist()
    assert a > 0
    assert b == 0
    grid = product(np.linspace(0, 1.5, 16), np.linspace(0, 0.4, 3), np.linspace(-2, 2, 21))
    assert _beta_loss(p, a, b, c) <= min(_beta_loss(p, *weights) for weights in grid) + 1e-6


def _beta_loss(p: Predictions, a: float, b: float, c: float) -> float:
    q = p.probs[:, 1]
    odds = a * q.log() - b * (1 - q).log() + c
    return float(torch.nn.functional.binary_cross_entropy_with_logits(odds, p.labels.double()))


def test_beta_of_certain_predictions_is_their_accuracy() -> None:
    """Two values of a score do not tell three weights apart, but the frequencies at both are known."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 5, generator=generator)
    labels = (logits / 2).softmax(1).multinomial(1, generator=generator)[:, 0]
    certain = torch.nn.functional.one_hot(logits.argmax(1), 5)
    p = Predictions.from_probs(certain.double(), labels)
    fitted = Beta().fit(p)
    assert bool(fitted.converged_)
    odds = base.log_odds(p.logits)
    for k, (a, b, c) in enumerate(fitted.weights_):
        found = (a * logsigmoid(odds[:, k]) - b * logsigmoid(-odds[:, k]) + c).sigmoid()
        for value in (0, 1):
            rows = certain[:, k] == value
            torch.testing.assert_close(
                found[rows].mean(), (labels[rows] == k).double().mean(), rtol=0, atol=1e-4
            )


def test_beta_of_several_classes_is_one_map_each_then_normalised() -> None:
    p = several()
    fitted = Beta().fit(p)
    columns = []
    for k in range(4):
        one = Predictions.from_binary(base.log_odds(p.logits)[:, k], (p.labels == k).long())
        columns.append(Beta().fit(one).calibrate(one).probs[:, 1])
    expected = torch.stack(columns, 1)
    expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(fitted.calibrate(p).probs, expected, rtol=1e-4, atol=1e-5)


def test_histogram_by_hand() -> None:
    probs = [0.6, 0.6, 0.9, 0.9, 0.9, 0.9]  # of class 1, which is always predicted
    p = Predictions.from_binary(np.array(probs), [1, 0, 1, 1, 1, 0], are_probs=True)
    plain = HistogramBinning(n_bins=1, smoothing=0).fit(p)
    torch.testing.assert_close(plain.calibrate(p).confidence, torch.full((6,), 4 / 6, dtype=torch.float64))
    mass = HistogramBinning(n_bins=3, smoothing=0).fit(p)
    assert mass.calibrate(p).confidence.tolist() == pytest.approx([0.5] * 2 + [0.75] * 4)
    # One more sample at the bin's mean confidence: (1 + 0.6) / 3 and (3 + 0.9) / 5.
    smooth = HistogramBinning(n_bins=3).fit(p).calibrate(p).confidence
    assert float(smooth[0]) == pytest.approx(1.6 / 3)
    assert float(smooth[2]) == pytest.approx(3.9 / 5)
    # An empty bin holds its middle.
    p = Predictions.from_binary(np.array([0.9, 0.8]), [1, 0], are_probs=True)
    fitted = HistogramBinning(n_bins=4, kind="one-vs-rest", smoothing=0).fit(p)
    between = 6 / 7  # odds 6, between 4 and 9 in their logarithms
    assert fitted.values_[1].tolist() == pytest.approx([0.0, between, between, 1.0])


@pytest.mark.parametrize("kind", ["top", "one-vs-rest"])
def test_no_edge_of_a_histogram_lies_at_odds_that_occur(kind: str) -> None:
    """Where many samples have the lowest odds; rounded to float32 an edge there would fall on either side of them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        logits = 2 * torch.randn(5, 4, generator=generator)[torch.randint(5, (300,), generator=generator)]
        labels = torch.randint(4, (300,), generator=generator)
        fitted = HistogramBinning(kind=kind, smoothing=0).fit(Predictions(logits, labels))
        narrow, wide = (fitted(z).double().softmax(1) for z in (logits, logits.double()))
        torch.testing.assert_close(narrow, wide, atol=1e-5, rtol=0)
    one = Predictions(torch.tensor([[2.0, 0.0]] * 8), [0] * 6 + [1] * 2)  # all odds are equal
    confidence = HistogramBinning(kind=kind, smoothing=0).fit(one).calibrate(one).confidence
    torch.testing.assert_close(confidence, torch.full((8,), 0.75))


def test_histogram_one_vs_rest_agrees_with_a_loop() -> None:
    p = several()
    out = HistogramBinning(n_bins=7, kind="one-vs-rest", smoothing=0).fit(p).calibrate(p).probs
    expected = np.empty((300, 4))
    for k in range(4):
        probs, hits = p.probs[:, k].numpy(), (p.labels == k).double().numpy()
        cuts = [round(i * 300 / 7) for i in range(1, 7)]
        which = np.searchsorted(cuts, probs.argsort().argsort(), side="right")
        for b in range(7):
            if (which == b).any():
                expected[which == b, k] = hits[which == b].mean()
    expected = np.maximum(expected, np.finfo(float).tiny)
    np.testing.assert_allclose(out.numpy(), expected / expected.sum(1, keepdims=True), atol=1e-9)


def test_nonsense_is_refused() -> None:
    for make, params, message in (
        (HistogramBinning, {"kind": "all"}, "kind must be 'top' or 'one-vs-rest', got 'all'"),
        (HistogramBinning, {"n_bins": 0}, "n_bins must be a whole number >= 1, got 0"),
        (HistogramBinning, {"smoothing": -1}, "smoothing must be at least 0, got -1"),
        (Isotonic, {"kind": "irova"}, "kind must be 'shared' or 'one-vs-rest', got 'irova'"),
        (Spline, {"n_knots": 1}, "n_knots must be at least 2, got 1"),
        (Platt, {}, "Platt needs predictions of 2 classes, got 4 classes"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**params).fit(several())


def test_bbq_agrees_with_a_loop() -> None:
    p = binary(n=60)
    out = BBQ().fit(p)
    odds = (p.logits[:, 1] - p.logits[:, 0]).numpy()
    averaged = [_slow_bbq(odds if k else -odds, (p.labels.numpy() == k).astype(float)) for k in range(2)]
    expected = averaged[1] / (averaged[0] + averaged[1])
    np.testing.assert_allclose(out.calibrate(p).probs[:, 1].numpy(), expected, atol=1e-5)


def _slow_bbq(odds: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Each binning one by one, from the formulas of the paper."""
    n, order = len(odds), odds.argsort()
    x, y = odds[order], hits[order]
    scores, maps = [], []
    for n_bins in range(max(1, int(n ** (1 / 3) / 10)), min(n, int(10 * n ** (1 / 3)) + 1) + 1):
        cuts = [0, *(round(i * n / n_bins) for i in range(1, n_bins)), n]
        edges = [0.0, *(1 / (1 + math.exp(-(x[c - 1] + x[c]) / 2)) for c in cuts[1:-1]), 1.0]
        score, values = 0.0, np.empty(n)
        for b in range(n_bins):
            inside = y[cuts[b] : cuts[b + 1]]
            m, count, middle = inside.sum(), len(inside), (edges[b] + edges[b + 1]) / 2
            alpha, beta = 2 / n_bins * middle, 2 / n_bins * (1 - middle)
            score += math.lgamma(alpha + beta) - math.lgamma(count + alpha + beta)
            score += math.lgamma(m + alpha) - math.lgamma(alpha)
            score += math.lgamma(count - m + beta) - math.lgamma(beta)
            values[cuts[b] : cuts[b + 1]] = (m + alpha) / (count + alpha + beta)
        scores.append(score)
        maps.append(values)
    weights = np.exp(np.array(scores) - max(scores))
    average = (weights[:, None] * np.array(maps)).sum(0) / weights.sum()
    out = np.empty(n)
    out[order] = average
    return out


@pytest.mark.parametrize(("kind", "n_maps", "close"), [("one-vs-rest", 4, 1e-6), ("shared", 1, 1e-5)])
def test_isotonic_agrees_with_scikit_learn(kind: str, n_maps: int, close: float) -> None:
    """A map of each class, or one of the probabilities of all classes together."""
    model = pytest.importorskip("sklearn.isotonic").IsotonicRegression(y_min=0, y_max=1)
    p = several()
    probs, hits = p.probs.numpy(), np.eye(4)[p.labels.numpy()]
    groups = [(x.ravel(), y.ravel()) for x, y in zip(np.split(probs, n_maps, 1), np.split(hits, n_maps, 1))]
    mapped = [model.fit(x, y).predict(x).reshape(len(p), -1) for x, y in groups]
    expected = np.maximum(np.concatenate(mapped, 1), 1e-6)
    fitted = Isotonic(kind=kind).fit(p)
    found = fitted.calibrate(p).probs.numpy()
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), atol=close)
    assert len(fitted.values_) == n_maps


def test_slope_of_the_running_mean_agrees_with_scipy() -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    y = (torch.rand(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64) < 0.7).double()
    rank, knots = np.arange(1, 81) / 80, np.linspace(0, 1, 6)
    basis = [interpolate.CubicSpline(knots, row, bc_type="natural") for row in np.eye(6)]
    design = np.stack([spline(rank) for spline in basis], 1)
    weights = np.linalg.lstsq(design, y.cumsum(0).numpy() / 80, rcond=None)[0]
    expected = np.stack([spline(rank, 1) for spline in basis], 1) @ weights
    np.testing.assert_allclose(_slope_of_running_mean(y, 6).numpy(), expected, atol=1e-9)


def test_spline_as_published_learns_the_frequency_of_equal_confidences() -> None:
    # Half at one confidence, 3/4 right, half at a higher one, all right: the running mean has a kink, on a knot.
    logits = torch.tensor([[2.0, 0.0]] * 40 + [[4.0, 0.0]] * 40, dtype=torch.float64)
    p = Predictions(logits, [0, 0, 0, 1] * 10 + [0, 0, 0, 0] * 10)
    confidence = Spline(n_knots=21, temper=False).fit(p).calibrate(p).confidence
    assert float(confidence[0]) == pytest.approx(0.75, abs=0.01)
    assert float(confidence[-1]) == pytest.approx(1 - 1 / 82)  # 80 samples do not make a certainty


def test_spline_does_not_depend_on_the_order_of_equal_confidences() -> None:
    p = Predictions(torch.tensor([[3.0, 0.0]] * 8), [0] * 6 + [1] * 2)
    q = Predictions(torch.tensor([[3.0, 0.0]] * 8), [1] * 2 + [0] * 6)
    one, other = (Spline().fit(some).calibrate(some).confidence for some in (p, q))
    torch.testing.assert_close(one, other)


def test_spline_leaves_a_calibrated_model_nearly_alone_and_repairs_a_bent_one() -> None:
    p = several(n=6000)
    honest = Temperature().fit(p).calibrate(p)
    moved = Spline().fit(honest).calibrate(honest).confidence - honest.confidence
    assert float(moved.abs().max()) < 0.05
    # A confidence of c that is right c^2 of the time cannot be repaired by a temperature alone.
    generator = torch.Generator().manual_seed(1)
    conf = 0.5 + 0.5 * torch.rand(8000, generator=generator, dtype=torch.float64)
    wrong = torch.rand(8000, generator=generator, dtype=torch.float64) > conf**2
    bent = Predictions.from_binary(conf, (~wrong).long(), are_probs=True)
    found = Spline().fit(bent).calibrate(bent)
    target = torch.maximum(conf**2, torch.tensor(0.5, dtype=torch.float64))  # the predicted class stays
    assert float((found.confidence - target).abs().mean()) < 0.02
    before = cross_entropy(Temperature().fit(bent).calibrate(bent).logits, bent.labels)
    assert float(cross_entropy(found.logits, bent.labels)) < float(before)


def test_the_evidence_of_a_binning_of_many_samples() -> None:
    """Log gamma functions of bins with 70,000 samples need float64."""
    n, n_bins, generator = 200_000, 3, torch.Generator().manual_seed(0)
    odds = torch.randn(1, n, dtype=torch.float64, generator=generator).sort(1).values
    hits = torch.bernoulli(odds.sigmoid(), generator=generator)
    below = torch.cat([hits.new_zeros(1, 1), hits.cumsum(1)], 1)
    evidence, _, probs = _score_binning(odds, below, n_bins)
    cuts, wanted = [0, 66_667, 133_333, n], 0.0
    middles = [0.0, *((odds[0, i - 1] + odds[0, i]).div(2).sigmoid().item() for i in cuts[1:-1]), 1.0]
    for b in range(n_bins):
        count, hit = cuts[b + 1] - cuts[b], float(hits[0, cuts[b] : cuts[b + 1]].sum())
        one = 2 / n_bins * (middles[b] + middles[b + 1]) / 2
        zero, total = 2 / n_bins - one, 2 / n_bins
        wanted += math.lgamma(total) - math.lgamma(count + total) + math.lgamma(hit + one)
        wanted += math.lgamma(count - hit + zero) - math.lgamma(one) - math.lgamma(zero)
        assert float(probs[0, b]) == pytest.approx((hit + one) / (count + total), rel=1e-12)
    assert float(evidence) == pytest.approx(wanted, abs=1e-5)


def test_beta_weighs_the_pull_on_what_is_held_at_0() -> None:
    """Of odds in the thousands the pull towards 1 is not small: a slope of 0 must not be free of it."""
    odds = torch.tensor([-1600.0, 200.0, -800.0, 600.0]).double().repeat(5)
    labels = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0])
    p = Predictions(torch.stack([torch.zeros_like(odds), odds], 1), labels)
    features = torch.stack([logsigmoid(odds), -logsigmoid(-odds), torch.ones_like(odds)], 1)
    units, y = features.square().mean(0), labels.double()

    def loss(weights: list[float]) -> float:
        w = torch.tensor(weights).double()
        z = features @ w
        drift = (units * (w - torch.tensor([1.0, 1.0, 0.0])).square()).sum() * 5e-7
        return float((softplus(z) - y * z).mean() + drift)

    found = Beta().fit(p).weights_[0].tolist()
    grid = product(np.linspace(0, 2e-3, 11), np.linspace(0, 2e-3, 11), np.linspace(0, 2, 11))
    assert loss(found) <= min(loss([*map(float, weights)]) for weights in grid)
    assert min(found[:2]) >= 0


@pytest.mark.parametrize(
    "calibrator",
    [HistogramBinning(), HistogramBinning(kind="one-vs-rest"), BBQ(), Isotonic(kind="one-vs-rest")],
)
def test_the_order_of_the_classes_is_of_no_account_where_logits_are_rounded(calibrator) -> None:
    """Many log odds are then equal, in theory."""
    for seed in range(3):
        p = overconfident(1000, 4, 2.0, seed=seed, dtype=torch.float64)
        logits, turned = p.logits.round(), torch.tensor([2, 0, 3, 1])
        one = Predictions(logits, p.labels)
        other = Predictions(logits[:, turned], turned.argsort()[p.labels])
        rows = (logits == logits.amax(1, keepdim=True)).sum(
            1
        ) == 1  # of several largest the first is predicted
        one, other = one[rows], other[rows]
        a, b = (calibrator.fresh().fit(q).calibrate(q).probs for q in (one, other))
        torch.testing.assert_close(a[:, turned], b, rtol=1e-6, atol=1e-6)
