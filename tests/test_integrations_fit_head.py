"""A head for a network that is already trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from doublehead import (
    Alternation,
    CalibrationHead,
    DoubleHead,
    HeadBank,
    HeadSpec,
    Predictions,
    Readings,
    metrics,
    refit,
)
from doublehead.calibrators import Temperature
from doublehead.integrations.fit_head import (
    CANDIDATES,
    LR,
    STEPS,
    _choose,
    _Heads,
    fit_head,
    fit_head_on,
    how_many,
    refit_on,
)
from doublehead.integrations.nll_curves import NllCurves, inverse_softplus
from doublehead.integrations.overlap import check_disjoint, n_shared, until_repeated


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
    calib.labels[0] = calib.main[0].argmin()  # one is wrong, or there would be no best temperature
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


class Given(nn.Module):
    """A network whose logits are its inputs, with features before them: readings become batches."""

    def __init__(self, n_classes: int = 5) -> None:
        super().__init__()
        self.last = nn.Linear(n_classes, n_classes, bias=False)
        nn.init.eye_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


def batches(readings: Readings) -> list[tuple[Tensor, Tensor]]:
    return list(zip(readings.main.split(64), readings.labels.split(64)))


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(
    "head", [{}, {"hidden": 0}, {"reads": ("statistics", "features")}, {"reads": "features"}, {"seed": 5}]
)
def test_refit_is_fit_head_in_place(head: dict[str, Any], planted: bool) -> None:
    calib, x = drawn(900, seed=1, planted=planted), drawn(9, seed=3).main
    model = DoubleHead(Given(), **head)
    modules, shapes = list(model.modules()), {name: v.shape for name, v in model.state_dict().items()}
    for parameter in model.head.parameters():
        nn.init.normal_(parameter)  # what it learned in training
    random, before = torch.get_rng_state(), model.training
    choice = refit(model, batches(calib))
    assert torch.equal(random, torch.get_rng_state())
    assert model.training == before
    assert list(model.modules()) == modules
    assert {name: v.shape for name, v in model.state_dict().items()} == shapes
    spec = HeadSpec(hidden=model.head.hidden, reads=model.head.reads)
    candidates = [spec, HeadSpec(beta0=1.1, hidden=spec.hidden, reads=spec.reads)]
    wanted = fit_head_on(calib._replace(features=calib.main), candidates=candidates)
    assert choice == wanted.choice
    assert (choice.spec is not None) == planted
    assert choice.nll <= choice.nll_of_temperature
    assert model.head.after.bends == wanted.after.bends
    exact = {"rtol": 1e-4, "atol": 1e-4} if head == {"reads": "features"} else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(model.eval()(x), wanted.eval()(x, x), **exact)
    if not planted:
        temperature = Temperature().fit(Predictions(calib.main, calib.labels))
        torch.testing.assert_close(model(x).softmax(1), temperature(x).softmax(1), atol=1e-4, rtol=1e-3)


def test_a_refitted_head_trains_on_and_starts_over() -> None:
    """The curve after it is in its state; another fit leaves none of it behind."""
    calib = drawn(1200, seed=1, planted=True)
    one_in_five = torch.rand(1200, generator=torch.Generator().manual_seed(0)) < 0.2
    calib.labels[one_in_five] = torch.randint(5, (int(one_in_five.sum()),))
    model = DoubleHead(Given())
    alternation = Alternation(model, batches(calib), every=1)
    first = refit(model, batches(calib))
    assert first.bends
    assert model.head.after.bends
    again = DoubleHead(Given()).eval()
    again.load_state_dict(model.state_dict())
    assert again.head.after.bends
    assert torch.equal(again(calib.main), model.eval()(calib.main))
    before = model.head.last.bias.clone()
    for _ in range(3):
        assert torch.isfinite(alternation.step(0.5))
    assert not torch.equal(before, model.head.last.bias)
    few = drawn(40, seed=2)
    assert not refit(model, batches(few)).bends
    assert not model.head.after.bends
    assert refit(model, batches(calib)) == first
    torch.testing.assert_close(model(calib.main), again(calib.main), rtol=0, atol=0)


def test_refit_under_autocast_and_on_a_wrapped_or_fitted_model() -> None:
    calib = drawn(300, seed=1, planted=True)
    model, wrapped = DoubleHead(Given()), DoubleHead(Given())
    readings = model.read(batches(calib))
    want = refit_on(model, readings)
    with torch.autocast("cpu", torch.bfloat16):
        assert refit_on(wrapped, readings) == want
    assert refit(nn.ModuleDict({"module": wrapped}), batches(calib)) == want  # as DDP holds it
    fitted = fit_head(Given(), batches(drawn(300, seed=4)))
    choice = refit(fitted, batches(calib))
    assert fitted.head.choice == choice
    assert choice.in_words() == (
        f"a head, held-back NLL {choice.nll:.4f} (temperature {choice.nll_of_temperature:.4f}, 300 samples)"
    )
    scalar = refit(fitted, batches(drawn(40, seed=4)))
    assert scalar.in_words().startswith(f"the scalar temperature {scalar.temperature:.4g}, held-back NLL")


def test_refit_takes_enough_of_batches_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doublehead.integrations.fit_head.ENOUGH", 250)
    x, y = drawn(100, seed=1)[1:]

    class Endless(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return (drawn(100, seed=seed)[1:] for seed in count())

    model = DoubleHead(Given())
    assert refit(model, DataLoader(Endless(), batch_size=None)).n == 250
    assert len(model.read([(x, y)] * 4, enough=250).labels) == 300  # no batch more than it takes
    assert len(model.read([(x, y)] * 4).labels) == 400
    assert (how_many([(x, y)]), how_many(iter([(x, y)]))) == (math.inf, 250)


def test_a_stream_that_begins_again_is_read_once() -> None:
    """Else every fold would know the others' samples, and the head that learns them by heart would win."""
    data, fresh = drawn(120, seed=1), drawn(1000, seed=2)
    model, alone = DoubleHead(Given()), DoubleHead(Given())
    whole, labels = data.main, data.labels

    def shuffled() -> Iterator[tuple[Tensor, Tensor]]:
        for seed in range(30):
            order = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
            yield from zip(whole[order].split(50), labels[order].split(50))

    assert refit(model, shuffled()).n == 120
    refit(alone, batches(data))
    for double in (model, alone):
        assert nll(double.eval()(fresh.main).detach(), fresh.labels) < 1.3 * nll(fresh.main / 2, fresh.labels)


def test_samples_are_the_same_bit_for_bit() -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.zeros(6, dtype=torch.long)
    half = torch.cat([x[:3], x[:3] + 100])

    def n_read(*some: Any) -> int:
        return len(list(until_repeated(some)))

    assert n_read((x, y), (x, y)) == n_read((x, y), (half, y)) == n_read((x, y), (half, y), (x, y)) == 1
    assert n_read((x, y), (x, y + 1)) == n_read((x, y), (x + 1e-3, y)) == n_read((x, y), (half + 50, y)) == 2
    assert n_read((x.bfloat16(), y), (x.bfloat16(), y)) == 1
    named = {"a": x, "b": x.long(), "labels": y}
    assert n_read(named, named) == n_read(([x, x], y), ([x, x], y)) == 1
    assert n_read(named, {**named, "b": x.long() + 1}) == n_read(("no tensor", y), ("no tensor", y)) == 2
    long = torch.arange(5000.0).expand(6, -1) + torch.arange(6.0)[:, None] * 5000
    assert n_read((long, y), (long + 1, y), (long.clone(), y)) == 2


@pytest.mark.parametrize("n", [1, 2, 10, 60, 1200])
def test_data_without_a_wrong_label_do_not_make_it_certain(n: int) -> None:
    """There the NLL falls with the temperature down to 0, and says nothing of how often the network is wrong."""
    logits = drawn(n, seed=3).main
    right = Readings(torch.empty(n, 0), logits, logits.argmax(1))
    head = fit_head_on(right)
    assert head.choice.spec is None
    assert not head.choice.bends
    # By hand: as sharp as one wrong sample more allows, the usual one with its second label, but not softer than 1.
    first, second = logits.topk(2).values.T
    usual = int((first - second).argsort()[n // 2])
    more = Predictions(
        torch.cat([logits, logits[usual, None]]), torch.cat([right.labels, logits[usual].topk(2).indices[1:]])
    )
    want = min(1.0, float(Temperature().fit(more).temperature_))
    assert head.choice.temperature == pytest.approx(want, rel=1e-4)
    torch.testing.assert_close(head(*right[:2]).softmax(1), (logits / want).softmax(1), atol=1e-4, rtol=0)
    assert n != 1200 or want < 0.5  # with many it may be sharp


@pytest.mark.parametrize("wrong", [9, 10])
def test_few_wrong_labels_are_no_school_for_a_head(wrong: int) -> None:
    """Those of the boldest samples, so that a head has something to learn."""
    logits = 4 * drawn(400, seed=5).main
    labels = logits.argmax(1)
    boldest = logits.amax(1).topk(wrong).indices
    labels[boldest] = logits[boldest].topk(2).indices[:, 1]
    readings = Readings(torch.empty(400, 0), logits, labels)
    choice = fit_head_on(readings).choice
    assert (choice.spec is None) == (wrong == 9)
    assert len(choice.nlls) == (0 if wrong == 9 else len(CANDIDATES))


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min, -1e30, -1e9])
def test_classes_that_are_masked_out(masked: float) -> None:
    """The head answers as it does for a network without them."""
    _, logits, labels = drawn(300, 4, planted=True)
    more = torch.cat([logits, torch.full((300, 1), masked)], 1)

    class Masks(Given):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), torch.full((len(x), 1), masked)], 1)

    model = DoubleHead(Masks(4), 5)
    alternation = Alternation(model, [(logits, labels)], every=1)
    for _ in range(5):
        alternation.step(0.5)
    assert alternation.skipped == 0
    choice = refit(model, [(logits, labels)])
    without = fit_head_on(Readings(torch.empty(300, 0), logits, labels)).choice
    assert choice.temperature == pytest.approx(without.temperature, rel=1e-3)
    assert choice.nll == pytest.approx(without.nll, abs=0.03)
    probs = model.head(torch.empty(300, 0), more).softmax(1)
    assert torch.isfinite(probs).all()
    assert torch.equal(probs[:, 4], torch.zeros(300))
    with pytest.raises(ValueError, match=r"logits must not be above 1e\+09, got 1e\+30"):
        fit_head_on(Readings(torch.empty(300, 0), logits + 1e30, labels))


def test_fitting_inside_inference_mode() -> None:
    model, data = DoubleHead(Given()), batches(drawn(200))
    with torch.inference_mode():
        choice = refit(model, data)
        fitted = fit_head(model.model, data)
    assert choice == refit(model, data)
    assert not any(value.is_inference() for value in fitted.state_dict().values())
    Alternation(model, data, every=1).step(0.5)


def test_refit_refuses_other_heads() -> None:
    data = batches(drawn(60))
    wanted = "double must be a DoubleHead whose head is a CalibrationHead of kind 'temperature', got a head "
    for head, got in (
        ({"kind": "mlp"}, "CalibrationHead of kind 'mlp'"),
        ({"head": HeadBank.auto}, "HeadBank"),
        ({"head": nn.Linear(2, 2)}, "Linear"),
    ):
        with pytest.raises(TypeError, match=wanted + got):
            refit(DoubleHead(Given(), **head), data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="double must be a DoubleHead .* got Given"):
        refit(Given(), data)
    with pytest.raises(
        ValueError, match="calib_batches must hold at least one batch and start again .* got none"
    ):
        refit(DoubleHead(Given()), [])


def test_the_scalar_comes_in_the_shape_of_the_first_candidate() -> None:
    calib = drawn(40, seed=4)
    for candidates, hidden in ((CANDIDATES, 0), (CANDIDATES[2:], 16), ((), 0)):
        head = fit_head_on(calib, candidates=candidates)
        assert head.choice.spec is None
        assert head.hidden == hidden
        assert not head.last.weight.any()
        scale = float(F.softplus(head.last.bias.detach()))
        assert scale == pytest.approx(1 / head.choice.temperature, rel=1e-5)
        torch.testing.assert_close(
            head(calib.features, calib.main).softmax(1), (scale * calib.main).softmax(1)
        )


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
