"""A head for a network that is already trained."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from doublehead import CalibrationHead, DoubleHead, HeadSpec, Predictions, Readings, metrics
from doublehead.calibrators import Temperature
from doublehead.integrations.fit_head import CANDIDATES, LR, STEPS, _choose, _Heads, fit_head, fit_head_on
from doublehead.integrations.nll_curves import NllCurves, inverse_softplus
from doublehead.integrations.overlap import check_disjoint, n_shared


def drawn(n: int, k: int = 5, seed: int = 0, planted: bool = False) -> Readings:
    """Logits with labels drawn from them; `planted` makes samples of a small largest logit far too bold."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=generator) * (1 + 3 * torch.rand(n, 1, generator=generator))
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    if planted:
        logits = torch.where(logits.amax(1, keepdim=True) < 3, 4 * logits, logits)
    return Readings(torch.randn(n, 3, generator=generator), 2 * logits, labels)


def nll(logits: Tensor, labels: Tensor) -> float:
    return float(F.cross_entropy(logits, labels))


def test_curves_are_the_nll_and_its_slope() -> None:
    _, logits, labels = drawn(200, 7)
    curves = NllCurves(logits, labels, centre=math.log(0.5))
    for spread in (0.0, 0.7, 2.0):
        u = (math.log(0.5) + (spread * torch.randn(3, 200)).clamp(-2.5, 2.5)).requires_grad_()
        exact = torch.stack([F.cross_entropy(logits * s[:, None].exp(), labels, reduction="none") for s in u])
        torch.testing.assert_close(curves(u), exact, atol=1e-3, rtol=1e-3)
        got, want = (torch.autograd.grad(values.sum(), u)[0] for values in (curves(u), exact))
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_curves_go_on_as_straight_lines() -> None:
    _, logits, labels = drawn(50, 4)
    curves = NllCurves(logits, labels)
    for end in (-2.5, 2.5):
        at = torch.tensor([[0.0], [0.5], [1.0]]) * math.copysign(1, end) + end
        first, second, third = curves(at.expand(3, 50))
        torch.testing.assert_close(third - second, second - first, atol=1e-3, rtol=1e-3)


def test_inverse_softplus() -> None:
    for value in (1e-6, 0.3, 1.0, 29.0, 500.0):
        assert float(F.softplus(torch.tensor(inverse_softplus(value), dtype=torch.float64))) == pytest.approx(
            value
        )


def test_training_agrees_with_a_plain_head() -> None:
    """Two folds beside each other, against each fold by itself: an ordinary head, Adam and exact cross entropy."""
    readings = drawn(120, 4, planted=True)
    spec = HeadSpec(beta0=1.3, kind="temperature", hidden=6, reads=("statistics", "features"), seed=3)
    learns = torch.stack([torch.arange(120) % 2 == fold for fold in (0, 1)]).float()
    starts = [0.4, 0.8]
    heads = _Heads(spec, readings, starts)
    curves = NllCurves(readings.main, readings.labels, math.log(0.5))
    heads.train_one_pass(curves, learns)
    got = heads.log_inverse().detach()
    for fold, start in enumerate(starts):
        head = CalibrationHead(3, 4, "temperature", 6, reads=spec.reads, standardise=True, seed=3)
        head.standardise.load_state_dict(heads.head.standardise.state_dict())
        nn.init.constant_(head.last.bias, inverse_softplus(start))
        optimizer = torch.optim.Adam(head.parameters(), LR)
        mine = learns[fold].bool()
        for step in range(STEPS):
            beta = 1.3 - 0.3 * step / STEPS
            logits = beta * head.eval()(readings.features, readings.main)
            optimizer.zero_grad()
            F.cross_entropy(logits[mine], readings.labels[mine]).backward()
            optimizer.step()
        logits = head(readings.features, readings.main)
        below = readings.main - readings.main.amax(1, keepdim=True)
        want = (logits.sum(1) / below.sum(1)).log()
        torch.testing.assert_close(got[fold], want.detach(), atol=2e-3, rtol=0)
        held_back = F.cross_entropy(logits, readings.labels, reduction="none")[~mine]
        torch.testing.assert_close(
            heads.held_back(curves, learns)[~mine], held_back.detach(), atol=5e-3, rtol=5e-3
        )


def test_finds_a_planted_fault_and_beats_temperature_on_fresh_data() -> None:
    calib, test = drawn(1500, seed=1, planted=True), drawn(4000, seed=2, planted=True)
    head = fit_head_on(calib)
    assert head.choice.spec in CANDIDATES
    assert head.choice.nll < head.choice.nll_of_temperature
    temperature = Temperature().fit(Predictions(calib.main, calib.labels))
    logits = head(test.features, test.main).detach()
    assert nll(logits, test.labels) < nll(temperature(test.main), test.labels) - 0.02
    assert torch.equal(logits.argmax(1), test.main.argmax(1))


def test_keeps_the_scalar_where_it_is_the_truth() -> None:
    calib = drawn(400, seed=4)
    head = fit_head_on(calib)
    assert head.choice.spec is None
    temperature = Temperature().fit(Predictions(calib.main, calib.labels))
    assert head.choice.temperature == pytest.approx(float(temperature.temperature_), rel=1e-5)
    got, want = head(calib.features, calib.main).softmax(1), temperature(calib.main).softmax(1)
    torch.testing.assert_close(got.detach(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 7, 49])
def test_few_samples_give_plain_temperature_scaling(n: int) -> None:
    calib = drawn(n, seed=n, planted=True)
    head = fit_head_on(calib)
    assert head.choice.spec is None
    temperature = Temperature().fit(Predictions(calib.main, calib.labels))
    torch.testing.assert_close(
        head(calib.features, calib.main).softmax(1).detach(),
        temperature(calib.main).softmax(1),
        atol=1e-4,
        rtol=1e-3,
    )


def test_a_win_smaller_than_its_error_does_not_count() -> None:
    readings = drawn(60, seed=4)
    curves = NllCurves(readings.main, readings.labels, math.log(0.5))
    eager = [HeadSpec(kind="temperature", hidden=64, reads="features", lr=3.0)]  # features are noise here
    choice = _choose(readings, curves, 0.5, eager, 5)
    assert choice.spec is None
    assert choice.nll == choice.nll_of_temperature


def test_real_logits_of_cifar(shared: Path) -> None:
    data = np.load(shared / "data/logits/resnet110_c10.npz")
    val, test = (
        Predictions(data[f"{part}_logits"], data[f"{part}_labels"].astype(np.int64))
        for part in ("val", "test")
    )
    head = fit_head_on(Readings(torch.empty(len(val), 0), val.logits, val.labels))
    calibrated = Predictions(head(torch.empty(len(test), 0), test.logits), test.labels)
    scaled = Temperature().fit(val).calibrate(test)
    assert metrics.nll(calibrated) < metrics.nll(scaled)
    assert metrics.accuracy(calibrated) == metrics.accuracy(test)


def test_real_imagenet_features_and_logits(shared: Path) -> None:
    data = np.load(shared / "data/imagenet/resnet50_val5k.npz")
    logits, labels = torch.from_numpy(data["logits"]).float(), torch.from_numpy(data["labels"]).long()
    half = torch.arange(len(labels)) % 5 % 2 == labels % 2  # 2 or 3 of the 5 images of each class
    calib, test = Predictions(logits[half], labels[half]), Predictions(logits[~half], labels[~half])
    assert len(calib) == len(test) == 2500
    head = fit_head_on(Readings(torch.empty(2500, 0), calib.logits, calib.labels))
    calibrated = Predictions(head(torch.empty(2500, 0), test.logits), test.labels)
    scaled = Temperature().fit(calib).calibrate(test)
    assert metrics.nll(calibrated) < metrics.nll(scaled)
    assert metrics.brier(calibrated) < metrics.brier(scaled)


def trained_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3))


def some_data(n: int, seed: int = 0) -> TensorDataset:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


@pytest.mark.parametrize("reads", ["statistics", ("statistics", "features")])
def test_one_call_on_a_network(reads: str) -> None:
    net = trained_net()
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    candidates = [HeadSpec(kind="temperature", hidden=4, reads=reads)]  # type: ignore[arg-type]
    model = fit_head(net, DataLoader(some_data(200), 32, shuffle=True), candidates=candidates)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert isinstance(model, DoubleHead)
    assert not model.training
    x = torch.randn(9, 6)
    main, calib = model.heads(x)
    torch.testing.assert_close(model(x), calib)
    assert torch.equal(main.argmax(1), calib.argmax(1))
    assert "held-back NLL" in repr(model.head)
    again = fit_head(model, DataLoader(some_data(200), 32), candidates=candidates)
    assert again.model is net
    assert set(again._ddp_params_and_buffers_to_ignore) == {f"head.{key}" for key in again.head.state_dict()}


def test_a_generator_of_batches_is_read_whole() -> None:
    batches = (some_data(30, seed)[:] for seed in range(3))
    assert fit_head(trained_net(), batches).head.choice.n == 90


def test_bad_use() -> None:
    net = trained_net()
    with pytest.raises(ValueError, match="batches must hold at least one batch, got none"):
        fit_head(net, [])
    with pytest.raises(ValueError, match="logits must have at least one row"):
        fit_head_on(Readings(torch.empty(0, 2), torch.empty(0, 3), torch.empty(0, dtype=torch.long)))
    with pytest.raises(TypeError, match="labels of a calibration batch must be a whole-number tensor"):
        fit_head(net, [(torch.randn(4, 6), torch.rand(4))])
    with pytest.raises(ValueError, match="candidates must be of kind 'temperature'"):
        fit_head_on(drawn(60), candidates=[HeadSpec(kind="mlp")])
    with pytest.raises(ValueError, match="candidates must have no dropout"):
        fit_head_on(drawn(60), candidates=[HeadSpec(dropout=0.5)])
    with pytest.raises(ValueError, match="folds must be at least 2, got 1"):
        fit_head_on(drawn(60), folds=1)
    with pytest.raises(ValueError, match=r"features must have shape \(60, F\), got \(3, 2\)"):
        fit_head_on(drawn(60)._replace(features=torch.randn(3, 2)))
    data = some_data(100)
    with pytest.raises(ValueError, match="must not be training data: at least 100 of 100"):
        fit_head(net, DataLoader(data, 10), train_loader=DataLoader(data, 10))


def test_shared_samples_are_counted() -> None:
    x, y = torch.randn(20, 2), torch.arange(20)
    data, other = TensorDataset(x, y), TensorDataset(torch.randn(20, 2), y)
    assert n_shared(Subset(data, [1, 2, 3]), Subset(data, [3, 4])) == 1
    assert n_shared(Subset(Subset(data, [5, 6, 7]), [0, 1]), DataLoader(Subset(data, [6]))) == 1
    assert n_shared(Subset(data, torch.tensor([1, 2])), ConcatDataset([other, Subset(data, [2, 9])])) == 1
    assert n_shared(TensorDataset(x[12:]), TensorDataset(x[:15])) == 3
    assert n_shared(TensorDataset(x[:12]), TensorDataset(x[12:])) == 0
    assert n_shared(data, other) == 0
    assert n_shared([(x, y)], [(x, y)]) == 0  # bare batches cannot be told apart
    assert n_shared(data, [DataLoader(other), DataLoader(data)]) == 20
    check_disjoint(data, other)
