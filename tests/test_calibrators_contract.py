"""What every calibrator promises, checked for all of them."""

from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy

from doublehead.calibrators import CALIBRATORS, Calibrator, NotFitted, describe, load, make, save
from doublehead.predictions import Predictions
from samples import overconfident, refused

# Every class as it comes, and the variants that take another path.
VARIANTS: dict[str, Calibrator] = {name: kind() for name, kind in CALIBRATORS.items()} | {
    "histogram one-vs-rest": make("histogram", kind="one-vs-rest"),
    "isotonic one-vs-rest": make("isotonic", kind="one-vs-rest"),
    "spline as published": make("spline", temper=False),
}
every = pytest.mark.parametrize("name", VARIANTS)


def new(name: str) -> Calibrator:
    return VARIANTS[name].fresh()


def suited(name: str, n: int = 240, dtype: torch.dtype = torch.float32, seed: int = 0) -> Predictions:
    k = 2 if new(name).binary_only else 4
    p = overconfident(n, k, spread=2.0, seed=seed, dtype=torch.float64)
    return Predictions(p.logits.to(dtype), p.labels)


@cache
def fitted(name: str) -> Calibrator:
    """Fitted once per session; tests that change it must make their own."""
    return new(name).fit(suited(name))


@every
def test_fit_returns_self_and_leaves_its_data_alone(name: str) -> None:
    p, calibrator = suited(name), new(name)
    logits, labels = p.logits.clone(), p.labels.clone()
    assert calibrator.fit(p) is calibrator
    assert torch.equal(p.logits, logits)
    assert torch.equal(p.labels, labels)
    assert bool(calibrator.converged_)


@every
def test_unfitted_use_says_what_to_do(name: str) -> None:
    calibrator = new(name)
    assert not calibrator.is_fitted
    refused(r"not fitted: call fit\(predictions\) first", calibrator, suited(name).logits, error=NotFitted)
    refused("nothing to save", save, calibrator, "never.safetensors", error=NotFitted)
    assert "not fitted" in repr(calibrator)
    assert "learned: " in repr(fitted(name))


@every
def test_state_restores_a_fresh_instance_completely(name: str) -> None:
    p = suited(name, seed=1)
    state = fitted(name).state_dict()
    restored = CALIBRATORS[_registry_name(name)]()  # default parameters: the state alone must suffice
    restored.load_state_dict(state)
    assert restored.is_fitted
    assert torch.equal(restored(p.logits), fitted(name)(p.logits))
    restored.load_state_dict(new(name).state_dict())  # an unfitted state unfits
    assert not restored.is_fitted
    inner, outer = (torch.nn.Sequential(one) for one in (fitted(name), new(name)))  # in another module
    outer.load_state_dict(inner.state_dict())
    assert torch.equal(outer(p.logits), inner(p.logits))


@every
def test_save_and_load(name: str, tmp_path) -> None:
    p = suited(name, seed=1)
    path = save(fitted(name), tmp_path / "deep" / "kept.safetensors")
    restored = load(path)
    assert type(restored) is type(fitted(name))
    assert restored.get_params() == fitted(name).get_params()
    assert torch.equal(restored(p.logits), fitted(name)(p.logits))
    assert [f.name for f in path.parent.iterdir()] == ["kept.safetensors"]
    assert describe(restored)["method"] == _registry_name(name)


@every
def test_float64_agrees_with_float32_and_half_precision_is_widened(name: str) -> None:
    p = suited(name)
    wide = Predictions(p.logits.double(), p.labels)
    calibrator = new(name).fit(wide)
    out = calibrator(wide.logits)
    assert out.dtype == torch.float64
    assert all(v.dtype == torch.float64 for v in calibrator.state_dict().values() if v.is_floating_point())
    assert fitted(name)(p.logits).dtype == torch.float32
    torch.testing.assert_close(out.softmax(1).float(), fitted(name)(p.logits).softmax(1), rtol=0, atol=2e-4)
    logits = p.logits.bfloat16()
    assert torch.equal(fitted(name)(logits), fitted(name)(logits.float()))


@every
def test_output_is_finite_of_the_same_shape_and_keeps_the_argmax_where_promised(name: str) -> None:
    k = suited(name).n_classes
    ends = 300 * torch.eye(k), torch.zeros(1, k), -1e4 * torch.eye(k)
    logits = torch.cat([suited(name, seed=2).logits, *ends])
    out = fitted(name)(logits)
    assert out.shape == logits.shape
    assert torch.isfinite(out).all()
    stacked = logits[:40].reshape(2, 20, k)
    torch.testing.assert_close(fitted(name)(stacked).reshape(40, k), out[:40])
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2000, k, generator=generator) * torch.logspace(-3, 2, 2000)[:, None]
    if fitted(name).keeps_argmax:
        assert torch.equal(fitted(name)(logits).argmax(1), logits.argmax(1))


def test_which_calibrators_keep_the_argmax() -> None:
    keep = {name for name, calibrator in VARIANTS.items() if calibrator.keeps_argmax}
    assert keep == {
        "none", "temperature", "temperature_grid", "ensemble_temperature", "histogram", "isotonic",
        "spline", "spline as published", "head", "per_label",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["none", "temperature", "ensemble_temperature", "vector", "matrix", "dirichlet"]
)
def test_nll_of_the_fitted_data_does_not_rise(name: str) -> None:
    """No change, or temperature scaling, is among what these may learn, at no penalty."""
    calibrator, usual = new(name), suited(name)
    k = usual.n_classes
    for p in (usual, Predictions(50 * torch.randn(12, k), torch.arange(12) % k)):  # few, mostly wrong
        out = calibrator.fresh().fit(p).calibrate(p)
        before, after = (cross_entropy(q.logits.double(), q.labels) for q in (p, out))
        assert after <= before + 1e-6


@every
def test_overconfidence_is_repaired_on_new_data(name: str) -> None:
    if name == "none":
        return
    calibrator = new(name).fit(suited(name, n=2000))
    fresh = suited(name, n=2000, seed=9)
    before, after = (cross_entropy(q.logits, q.labels) for q in (fresh, calibrator.calibrate(fresh)))
    assert after < before - 0.1


@every
def test_clones_have_the_parameters(name: str) -> None:
    copy = pytest.importorskip("sklearn.base").clone(fitted(name))
    assert copy.get_params() == VARIANTS[name].get_params()
    assert not copy.is_fitted


STRANGE = {
    "one row": lambda z, y: (z[:1], y[:1]),
    "two rows": lambda z, y: (z[:2], y[:2]),
    "one class": lambda z, y: (z, torch.zeros_like(y)),
    "all correct": lambda z, y: (z, z.argmax(1)),
    "all wrong": lambda z, y: (z, z.argmin(1)),
    "flat": lambda z, y: (torch.zeros_like(z[:6]), torch.arange(6) % z.shape[1]),
    "tiny": lambda z, y: (z * 1e-6, y),
    "huge": lambda z, y: (z * 1e4, y),
}


@every
@pytest.mark.parametrize("case", STRANGE)
def test_strange_data_gives_finite_answers(name: str, case: str) -> None:
    usual = suited(name, n=30)
    p = Predictions(*STRANGE[case](usual.logits, usual.labels))
    assert torch.isfinite(new(name).fit(p).calibrate(p).logits).all()


@every
def test_it_compiles_without_breaks(name: str) -> None:
    p = suited(name, seed=1)
    calibrator = fitted(name)
    torch._dynamo.reset()
    compiled = torch.compile(calibrator, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(p.logits), calibrator(p.logits))


@every
def test_a_fit_wants_predictions_and_a_call_logits_of_as_many_classes(name: str) -> None:
    if fitted(name)._n_classes() is not None:
        refused(r"logits must have shape \(\.\.\., \d\).* got \(3, 7\)", fitted(name), torch.zeros(3, 7))
    with pytest.raises(TypeError, match="predictions must be a Predictions, got Tensor"):
        new(name).fit(torch.zeros(3, 2))
    with pytest.raises(TypeError, match=r"logits must be a tensor .*, got Predictions; calibrate\(\) takes"):
        fitted(name)(Predictions(torch.zeros(3, 2), [0, 1, 0]))


@every
def test_gradients_flow_to_the_logits(name: str) -> None:
    """A calibrator may stand inside a network that is explained or attacked; gradients must be finite."""
    logits = suited(name, seed=1).logits.clone().requires_grad_()
    out = fitted(name)(logits)
    if name in ("bbq", "histogram one-vs-rest"):  # steps have no slope
        assert not out.requires_grad
        return
    out.log_softmax(1)[:, 0].sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    p = suited(name)
    on_gpu = new(name).fit(Predictions(p.logits.cuda(), p.labels.cuda()))
    assert all(value.is_cuda for value in on_gpu.state_dict().values())
    want = fitted(name)(p.logits).softmax(1)
    torch.testing.assert_close(on_gpu(p.logits.cuda()).softmax(1).cpu(), want, atol=1e-4, rtol=0)
    moved = fitted(name).fresh().fit(p).cuda()
    # As probabilities: where one is near 1, a rounding of it is a large step of its logit. A spline is steep in places.
    close = 5e-5 if name.startswith("spline") else 1e-6
    torch.testing.assert_close(moved(p.logits.cuda()).softmax(1).cpu(), want, atol=close, rtol=1e-5)


def _registry_name(name: str) -> str:
    return next(key for key, kind in CALIBRATORS.items() if kind is type(VARIANTS[name]))


@every
def test_classes_excluded_by_minus_infinity_keep_probability_0(name: str) -> None:
    logits = suited(name, seed=3).logits.clone()
    n, k = logits.shape
    if k > 2:
        logits[: n // 2, 1] = -torch.inf
    logits[n // 2 :, 1:] = -torch.inf  # a single class is left
    logits[-1] = torch.tensor([-torch.inf] * (k - 1) + [2.0])
    probs = fitted(name)(logits).softmax(1)
    torch._dynamo.reset()
    compiled = torch.compile(fitted(name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits).softmax(1), probs)
    assert torch.isfinite(probs).all()
    assert not probs[logits == -torch.inf].any()
    assert torch.equal(probs[n // 2 :], (logits[n // 2 :] > -torch.inf).float())
    if k > 2:
        assert (probs[: n // 2, [0, 2, 3]] > 0).all()
    if fitted(name).keeps_argmax:
        assert torch.equal(probs.argmax(1), logits.argmax(1))
