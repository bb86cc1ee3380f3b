"""Vector, matrix and Dirichlet scaling, the temperature ensemble and their optimiser, against slow references."""

import math
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from doublehead import calibrators
from doublehead.calibrators import Dirichlet, Matrix, Temperature, Vector, fit_inverse_temperature
from doublehead.calibrators.optimise import fit_logistic, minimise
from doublehead.predictions import Predictions


def skewed(n: int = 300, k: int = 3, seed: int = 0) -> Predictions:
    """Logits whose classes are scaled, shifted and mixed differently."""
    generator = torch.Generator().manual_seed(seed)
    true = 1.5 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator)[:, 0]
    mix = torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator, dtype=torch.float64)
    return Predictions(2 * true @ mix + torch.arange(k), labels)


def reference(loss, size: int) -> np.ndarray:
    """A minimiser that shares no code with ours."""
    optimize = pytest.importorskip("scipy.optimize")
    return optimize.minimize(loss, np.zeros(size), method="BFGS", options={"gtol": 1e-8, "maxiter": 5000}).x


def vector(z: np.ndarray, v: np.ndarray) -> np.ndarray:
    return z * (1 + v[:3]) + v[3:]


def matrix(z: np.ndarray, v: np.ndarray) -> np.ndarray:
    return z + z @ v[:9].reshape(3, 3).T + v[9:]


def turned(z: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A matrix that turns about the mean."""
    return z + (z - z.mean(0)) @ v[:9].reshape(3, 3).T + v[9:]


PRIOR = 0.5 / (0.2**2 * 300) * np.ones(6)  # of each squared change
OFF = (1 - np.eye(3)).ravel()
MATRIX_PRIOR = PRIOR[0] * np.concatenate([1 + 2 * OFF, np.ones(3)])  # off the diagonal K times as strong
ODIR = np.concatenate([0.1 * OFF / 6, [0.02 / 3] * 3])  # of Kull et al.


@pytest.mark.parametrize(
    ("calibrator", "change", "pulls"),
    [
        (Vector(prior=math.inf), vector, 0 * PRIOR),
        (Vector(prior=0.2), vector, PRIOR),
        (Matrix(odir=(0.1, 0.02)), matrix, ODIR),
        (Matrix(prior=0.2), turned, MATRIX_PRIOR),
        (Dirichlet(prior=0.2), turned, MATRIX_PRIOR),
    ],
    ids=["maximum likelihood", "vector", "odir", "matrix", "dirichlet"],
)
def test_fits_are_those_of_a_slow_reference(calibrator: Vector, change: Any, pulls: np.ndarray) -> None:
    """By logits that a temperature has scaled, what changes them being pulled towards nothing."""
    p = skewed()
    inputs = p.logits.log_softmax(1) if isinstance(calibrator, Dirichlet) else p.logits
    z = inputs.numpy() * fit_inverse_temperature(p.logits, p.labels)
    nll = lambda v: float(cross_entropy(torch.as_tensor(change(z, v)), p.labels))  # noqa: E731
    loss = lambda v: nll(v) + (pulls * v**2).sum()  # noqa: E731
    expected = torch.as_tensor(change(z, reference(loss, len(pulls))))
    found = calibrator.fit(p)(p.logits)
    torch.testing.assert_close(found.log_softmax(1), expected.log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "calibrator", [Matrix(odir=(0.1, 0.02)), Matrix(odir=(0.0, 0.0)), Vector(prior=math.inf)]
)
def test_free_weights_reach_their_optimum_on_logits_worse_than_chance(calibrator: Vector) -> None:
    """Reversing all signs is one of the fits that cost nothing; the temperature is infinite."""
    generator = torch.Generator().manual_seed(1)
    true = 3 * torch.randn(400, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator)[:, 0]
    for best in (labels, true.argmax(1)):  # the second are separable
        p = Predictions(-true, best)
        fitted = calibrator.fresh().fit(p)
        assert bool(fitted.converged_)
        wanted = 0.01 if best is not labels else float(cross_entropy(true, best)) + 1e-6
        assert float(cross_entropy(fitted(p.logits), best)) <= wanted


def test_a_strong_prior_leaves_temperature_scaling() -> None:
    p = skewed()
    with pytest.raises(ValueError, match="prior must be above 0, got -1"):
        Dirichlet(prior=-1).fit(p)
    stiff = Vector(prior=1e-5).fit(p)
    torch.testing.assert_close(stiff(p.logits), Temperature().fit(p)(p.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [Vector, Matrix])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_scale_of_the_logits_is_of_no_account(kind: type[Vector | Matrix], scale: float) -> None:
    p = skewed()
    q = Predictions(p.logits * scale, p.labels)
    one, other = (kind().fit(some).calibrate(some).probs for some in (p, q))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_dirichlet_sees_only_probabilities() -> None:
    p = skewed()
    shifted = Predictions(p.logits + 50 * torch.randn(len(p), 1, dtype=torch.float64), p.labels)
    same = Predictions.from_probs(p.probs, p.labels)
    expected = Dirichlet().fit(p).calibrate(p).probs
    for q in (shifted, same):
        torch.testing.assert_close(Dirichlet().fit(q).calibrate(q).probs, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("key", ["vector", "matrix", "dirichlet", "ensemble_temperature", "gaussian_process"])
def test_a_fit_cut_short_says_so(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = calibrators.CALIBRATORS[key]
    module = sys.modules[kind._learn.__module__]
    monkeypatch.setattr(module, "minimise", partial(minimise, max_steps=1, restarts=0))
    message = rf"{kind.__name__} did not converge: the largest gradient entry is [\d.e-]+"
    with pytest.warns(calibrators.NotConverged, match=message):
        fitted = kind().fit(skewed())
    assert not bool(fitted.converged_)


def test_ensemble_weights_are_the_best_of_a_fine_grid() -> None:
    generator = torch.Generator().manual_seed(1)
    p = skewed(n=200)
    wrong, other = torch.rand(200, generator=generator) < 0.15, torch.randint(3, (200,), generator=generator)
    labels = torch.where(wrong, other, p.labels)
    p = Predictions(3 * p.logits, labels)
    fitted = calibrators.EnsembleTemperature().fit(p)
    parts = [p.logits / fitted.temperature_, p.logits, torch.zeros_like(p.logits)]
    at_label = torch.stack([part.softmax(1).gather(1, labels[:, None])[:, 0] for part in parts])
    steps = torch.linspace(0, 1, 201, dtype=torch.float64)
    first, second = (grid.flatten() for grid in torch.meshgrid(steps, steps, indexing="ij"))
    inside = first + second <= 1 + 1e-12
    grid = torch.stack([first, second, (1 - first - second).clamp(min=0)], 1)[inside]
    losses = -(grid @ at_label).log().mean(1)
    own = -(fitted.weights_ @ at_label).log().mean()
    assert own <= losses.min() + 1e-7
    assert torch.allclose(fitted.weights_, grid[losses.argmin()], atol=0.02)
    assert float(cross_entropy(fitted(p.logits), labels)) == pytest.approx(float(own), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_ensemble_weights_reach_the_lowest_nll(seed: int) -> None:
    """Also small weights do, whose gradient in the logarithm is small wherever they are."""
    optimize = pytest.importorskip("scipy.optimize")
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(400, 5, generator=generator, dtype=torch.float64)
    p = Predictions(logits, (logits / 2).softmax(1).multinomial(1, generator=generator)[:, 0])
    fitted = calibrators.EnsembleTemperature().fit(p)
    parts = [p.logits / fitted.temperature_, p.logits, torch.zeros_like(p.logits)]
    at_label = torch.stack([part.softmax(1).gather(1, p.labels[:, None])[:, 0] for part in parts]).numpy()

    def nll(weights: np.ndarray) -> float:
        return -float(np.log(np.maximum(weights @ at_label, 1e-300)).mean())

    sum_to_one = {"type": "eq", "fun": lambda weights: weights.sum() - 1}
    options = {"bounds": [(0, 1)] * 3, "constraints": [sum_to_one], "options": {"ftol": 1e-13}}
    best = optimize.minimize(nll, np.ones(3) / 3, method="SLSQP", **options).fun
    assert nll(fitted.weights_.numpy()) <= best + 1e-7


def test_minimise_finds_the_valley_of_rosenbrock() -> None:
    found = minimise(lambda v: 100 * (v[1] - v[0] ** 2) ** 2 + (1 - v[0]) ** 2, [torch.tensor([-1.2, 1.0])])
    assert found.converged
    torch.testing.assert_close(found.values[0], torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-5)


def test_logistic_fits_agree_with_a_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 80, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 1e3])
    targets = torch.rand(3, 80, generator=generator, dtype=torch.float64)
    for each_x, each_y in zip(features, targets):
        weight, loss, converged = fit_logistic(each_x, each_y, towards=torch.tensor([1.0, 0.0]), ridge=0.0)
        assert converged
        x, y = each_x.numpy(), each_y.numpy()
        unit = x / np.array([1.0, 1e3])
        slow = lambda v, x=unit, y=y: float(np.mean(np.logaddexp(0, x @ v) - y * (x @ v)))  # noqa: E731
        best = reference(slow, 2)
        np.testing.assert_allclose(weight.numpy() * [1.0, 1e3], best, rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(slow(best), abs=1e-9)


def test_the_ridge_pulls_towards_the_given_weights_in_units_of_the_features() -> None:
    x, y = torch.tensor([-2.0, 4.0, 6.0]), torch.tensor([0.0, 1.0, 0.0])
    unit = float(x.square().mean().sqrt())
    weights, _, _ = fit_logistic(x[:, None], y, towards=torch.tensor([1.0]), ridge=0.5)
    grid = torch.linspace(-1, 2, 300_001)
    odds = grid[:, None] * x
    losses = (torch.nn.functional.softplus(odds) - y * odds).mean(1) + 0.25 * (unit * (grid - 1)).square()
    assert float(weights) == pytest.approx(float(grid[losses.argmin()]), abs=1e-3)
    stiff, _, _ = fit_logistic(x[:, None], y, towards=torch.tensor([1.0]), ridge=1e6)
    assert float(stiff) == pytest.approx(1, abs=1e-4)
    features = torch.tensor([[-1.0, 1.0], [1.0, 1.0]])  # separable: the fit stays finite
    weights, _, converged = fit_logistic(features, torch.tensor([0.0, 1.0]), towards=torch.tensor([1.0, 0.0]))
    assert converged
    assert torch.isfinite(weights).all()
    assert float(weights[0]) > 5
