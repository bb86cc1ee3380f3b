"""The Gaussian-process calibrator: its parts against closed forms and sampling, the whole by what it learns."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn.functional import cross_entropy

from doublehead.calibrators import GaussianProcess, Temperature, smooth
from doublehead.calibrators.smooth import JITTER, _by_entries, _by_sums, _divergence, _posterior
from doublehead.predictions import Predictions
from samples import overconfident


def test_sums_over_classes_give_the_likelihood_of_all_entries() -> None:
    """And its gradient; a class below the grid counts too."""
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(30, 50, generator=generator, dtype=torch.float64)).log_softmax(1)
    x[:, 0] -= 30
    labels = torch.randint(1, 50, (30,), generator=generator)
    grid = torch.linspace(-15, 0, 256, dtype=torch.float64)
    f, variance = (part.requires_grad_() for part in ((grid / 5).sin() * 0.5, 0.1 + 0.05 * (grid / 3).cos()))
    values = (one(x, grid, labels)(f, variance) for one in (_by_entries, _by_sums))
    found = [(value, *torch.autograd.grad(value, (f, variance))) for value in values]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=3e-4)
    assert all(gradient.abs().max() > 1e-3 for gradient in found[0][1:])


def test_many_classes_get_the_same_map_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(400, 40, generator=generator)
    labels = torch.multinomial(0.8 * logits.softmax(1) + 0.2 / 40, 1, generator=generator)[:, 0]
    by_sums = GaussianProcess().fit(Predictions(logits, labels))(logits)
    monkeypatch.setattr(smooth, "MANY", 100)
    by_entries = GaussianProcess().fit(Predictions(logits, labels))(logits)
    assert not torch.equal(by_sums, by_entries)
    torch.testing.assert_close(by_sums.softmax(1), by_entries.softmax(1), rtol=0, atol=2e-3)


def spd_root(m: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, m, generator=generator, dtype=torch.float64).tril() * 0.3 + 0.5 * torch.eye(m)


def test_divergence_is_that_of_two_gaussians() -> None:
    mean, root = torch.randn(4, dtype=torch.float64), spd_root(4)
    q = MultivariateNormal(mean, root @ root.T)
    p = MultivariateNormal(torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(_divergence(mean, root), kl_divergence(q, p))


def test_posterior_agrees_with_the_dense_formula() -> None:
    grid = torch.linspace(-6, 0, 13, dtype=torch.float64)
    inducing = torch.linspace(-6, 0, 4, dtype=torch.float64)
    mean, root = torch.randn(4, dtype=torch.float64), spd_root(4)
    kernel = torch.tensor([1.3, 0.7], dtype=torch.float64)

    def k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 0.7**2 * (-((a[:, None] - b) ** 2) / (2 * 1.3**2)).exp()

    prior = k(inducing, inducing) + JITTER * 0.7**2 * torch.eye(4, dtype=torch.float64)
    whiten = torch.linalg.cholesky(prior)
    gain = k(grid, inducing) @ prior.inverse()
    u_mean, u_cov = whiten @ mean, whiten @ root @ root.T @ whiten.T
    expected_cov = k(grid, grid) + gain @ (u_cov - prior) @ gain.T
    found_mean, found_variance = _posterior(grid, inducing, mean, root, kernel.log())
    torch.testing.assert_close(found_mean, gain @ u_mean)
    torch.testing.assert_close(found_variance, expected_cov.diagonal(), rtol=1e-6, atol=1e-9)


def test_expected_log_likelihood_agrees_with_sampling_where_variances_are_small() -> None:
    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(-4, 0, 5, dtype=torch.float64)
    x = grid[torch.randint(5, (3, 4), generator=generator)]
    f = torch.randn(5, generator=generator).double()
    spread = 0.05 * torch.rand(5, generator=generator).double()
    place = (x + 4).long()
    mean, variance = x + f[place], spread[place]
    labels = torch.tensor([0, 3, 2])
    noise = torch.randn(100_000, 3, 4, generator=generator, dtype=torch.float64)
    noise = torch.cat([noise, -noise])  # antithetic: the linear part cancels
    sampled = (mean + variance.sqrt() * noise).log_softmax(-1)
    expected = sampled.gather(2, labels.expand(200_000, 3)[..., None]).mean()
    assert float(_by_entries(x, grid, labels)(f, spread)) == pytest.approx(float(expected), abs=1e-4)


def test_it_learns_a_bend_that_a_temperature_cannot() -> None:
    generator = torch.Generator().manual_seed(0)
    true = (2 * torch.randn(8000, 3, generator=generator, dtype=torch.float64)).log_softmax(1)
    labels = torch.multinomial(true.exp(), 1, generator=generator)[:, 0]
    p = Predictions(true - 0.3 * true.square(), labels)  # small probabilities made smaller still
    fit, new = p[:4000], p[4000:]
    calibrated = (kind().fit(fit).calibrate(new).logits for kind in (GaussianProcess, Temperature))
    learned, scaled, best = (cross_entropy(z, new.labels) for z in (*calibrated, true[4000:]))
    assert learned < scaled - 0.005
    assert learned < best + 0.01


def test_it_leaves_what_is_already_right() -> None:
    p = overconfident(4000, 3, factor=1.0, spread=2.0, dtype=torch.float64)
    change = GaussianProcess().fit(p).calibrate(p).probs - p.probs
    assert float(change.abs().mean()) < 0.01
