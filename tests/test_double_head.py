"""The method: heads, wrapper, annealing, alternation."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import (
    Alternation,
    Annealing,
    CalibrationHead,
    DoubleHead,
    HeadBank,
    ShiftGuard,
    Standardise,
    statistics,
)


def small_net() -> nn.Module:
    """A network with BatchNorm and dropout, so that both would show if they were touched."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


def some_data(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 1, 8, 8, generator=generator)
    return TensorDataset(images, images.mean((1, 2, 3)).mul(8).add(2).long().clamp(0, 3))


def noisy(images: Tensor) -> Tensor:
    """An augmentation that draws from every global generator there is."""
    return images + 0.1 * torch.randn_like(images) + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002


def train(with_head: bool, epochs: int = 2, **options: object) -> tuple[nn.Module, DoubleHead | None]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    net = small_net()
    model: nn.Module = DoubleHead(net, **options.pop("head", {})) if with_head else net  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    calib = DataLoader(some_data(64, 2), batch_size=16, shuffle=True)
    alternation = (
        Alternation(model, calib, every=3, lr=optimizer, augment=noisy, **options) if with_head else None
    )  # type: ignore[arg-type]
    train_batches = DataLoader(some_data(96, 1), batch_size=16, shuffle=True)
    for _ in range(epochs):
        model.train()
        for step, (x, y) in enumerate(train_batches):
            x = x + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002, PLW2901
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            if alternation is not None:
                alternation.step(step / len(train_batches))
    return net, model if with_head else None  # type: ignore[return-value]


@pytest.mark.parametrize("head", [{}, {"kind": "mlp"}, {"reads": ("statistics", "features")}])
def test_main_network_is_bit_identical_with_and_without_the_head(head: dict[str, object]) -> None:
    alone, _ = train(with_head=False)
    beside, model = train(with_head=True, head=head)
    for (name, a), b in zip(alone.state_dict().items(), beside.state_dict().values()):
        assert torch.equal(a, b), f"{name} differs"
    fresh = DoubleHead(small_net(), **head)  # type: ignore[arg-type]
    assert model is not None
    assert any(not torch.equal(a, b) for a, b in zip(model.head.parameters(), fresh.head.parameters()))


def test_head_has_the_papers_shape() -> None:
    head = CalibrationHead(64, 10, kind="mlp")
    assert [tuple(p.shape) for p in head.parameters()] == [(32, 64), (32,), (10, 32), (10,)]
    features = torch.randn(3, 64)
    by_hand = F.relu(features @ head.first.weight.T + head.first.bias) @ head.last.weight.T + head.last.bias
    torch.testing.assert_close(head(features, torch.randn(3, 10)), by_hand)


def test_temperature_head_starts_at_one_and_keeps_every_prediction() -> None:
    head = CalibrationHead(16, 5, reads="features")
    main = torch.randn(1000, 5)
    torch.testing.assert_close(head(torch.randn(1000, 16), main).softmax(1), main.softmax(1))
    nn.init.normal_(head.last.weight, std=3.0)
    main[:500] = main[:500].round()  # plenty of ties at the top
    main[500:] = 1000 + torch.rand(500, 5) * 1e-4  # neighbours that rounding could merge
    calib = head(torch.randn(1000, 16), main)
    assert torch.equal(calib.argmax(1), main.argmax(1))
    assert not torch.allclose(calib.softmax(1), main.softmax(1))


def test_temperature_head_is_softplus_times_main_logits() -> None:
    head = CalibrationHead(2, 3, hidden=0, reads="features")
    with torch.no_grad():
        head.last.weight.copy_(torch.tensor([[0.5, -1.0]]))
        head.last.bias.fill_(0.25)
    main = torch.tensor([[1.0, 3.0, 0.0]])
    scale = math.log1p(math.exp(0.5 * 2.0 - 1.0 * 1.0 + 0.25))
    want = (main * scale).log_softmax(1)
    torch.testing.assert_close(head(torch.tensor([[2.0, 1.0]]), main).log_softmax(1), want)


def test_statistics_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])  # probabilities 1/4 and 3/4
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    want = [math.log(0.75), math.log(0.25), math.log(4.0), entropy, math.log(3.0)]
    torch.testing.assert_close(statistics(logits), torch.tensor([want]))
    assert statistics(torch.randn(6, 100)).shape == (6, 13)


YES = torch.tensor(True)


def test_standardise_follows_the_data_it_is_given() -> None:
    moments = Standardise(2)
    data = torch.randn(40, 50, 2) * torch.tensor([3.0, 0.1]) + torch.tensor([5.0, -1.0])
    for batch in data:
        moments.follow(batch, YES)
    torch.testing.assert_close(moments.mean, data.flatten(0, 1).mean(0), rtol=1e-4, atol=1e-4)
    before = copy.deepcopy(moments.state_dict())
    out = moments.train()(data.flatten(0, 1))
    torch.testing.assert_close(out.mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(out.std(0), torch.ones(2), atol=1e-2, rtol=0)
    assert all(torch.equal(before[key], value) for key, value in moments.state_dict().items())


def test_modes() -> None:
    net = small_net()
    model = DoubleHead(net, kind="mlp")
    x = torch.randn(5, 1, 8, 8)
    model.eval()
    main, calib = model.heads(x)
    torch.testing.assert_close(main, net(x))
    torch.testing.assert_close(model(x), calib)
    assert not torch.allclose(main, calib)
    model.train()
    torch.manual_seed(3)
    out = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(out, net(x), rtol=0, atol=0)
    model.heads(x).calib.sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_reads_logits_alone_needs_no_layer() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3]

    model = DoubleHead(Odd(), n_classes=3).eval()
    assert model(torch.randn(4, 5)).shape == (4, 3)
    with pytest.raises(
        ValueError, match=r"no last layer found in Odd: looked for get_classifier\(\).*layer='...'"
    ):
        DoubleHead(Odd(), n_classes=3, reads="features")


def test_layer_can_be_named_and_wrong_names_are_refused() -> None:
    model = DoubleHead(small_net(), layer="6", n_classes=4, reads="features").eval()
    assert model.head.first.in_features == 24
    assert model.heads(torch.randn(2, 1, 8, 8)).calib.shape == (2, 4)
    with pytest.raises(
        ValueError, match="layer must name a module of Sequential, got 'head'; its last linear layers"
    ):
        DoubleHead(small_net(), layer="head")
    with pytest.raises(
        ValueError, match=r"n_features must be given: layer '0\.?.*' \(.*\) does not state it"
    ):
        DoubleHead(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), layer="0", n_classes=2, reads="features")
    with pytest.raises(ValueError, match="n_classes must be given: layer '0' does not state it"):
        DoubleHead(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), layer="0")


def test_layer_that_never_runs_is_named() -> None:
    class Bypassed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(RuntimeError, match="layer 'unused' was not run in the model's forward"):
        DoubleHead(Bypassed(), reads="features").eval()(torch.randn(2, 4))
    assert DoubleHead(Bypassed()).eval()(torch.randn(2, 4)).shape == (2, 3)  # reads no features


def test_unknown_reads_and_kind() -> None:
    with pytest.raises(ValueError, match="reads must be one or several of .* got 'pixels'"):
        CalibrationHead(4, 3, reads="pixels")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be 'mlp' or 'temperature', got 'cnn'"):
        CalibrationHead(4, 3, kind="cnn")  # type: ignore[arg-type]


def test_annealing_by_hand() -> None:
    for beta0 in (0.1, 0.6, 1.0, 1.2, 3.0):
        anneal = Annealing(beta0)
        assert anneal(1.0) == 1.0
        for t, s in ((0, 10), (3, 10), (7, 9)):
            assert anneal(t / s) == pytest.approx(beta0 - (beta0 - 1) * t / s)  # Eq. 5
    with pytest.raises(ValueError, match="beta0 must be positive, got 0"):
        Annealing(0)
    with pytest.raises(ValueError, match=r"progress must lie in 0..1 .* got 1.5"):
        Annealing(1.2)(1.5)


def test_one_step_by_hand() -> None:
    """One calibration step equals one SGD step on cross entropy of beta * logits, worked out beside it."""
    net = small_net().eval()
    model = DoubleHead(net, kind="mlp")
    x, y = some_data(16, 5).tensors
    reference = copy.deepcopy(model.head)
    with torch.no_grad():
        features = net[:8](x)
    beta = 1.5 - 0.5 * 0.25
    loss = F.cross_entropy(beta * reference(features, net(x).detach()), y)
    loss.backward()
    torch.optim.SGD(reference.parameters(), 0.1, 0.9, weight_decay=5e-5, nesterov=True).step()
    alternation = Alternation(model, [(x, y)], every=1, annealing=Annealing(1.5), lr=0.1, clip=math.inf)
    got = alternation.step(0.25)
    assert got is not None
    torch.testing.assert_close(got, loss.detach())
    for a, b in zip(model.head.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b)
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    torch.testing.assert_close(alternation.grad_norm, norm)


def test_gradients_are_clipped() -> None:
    model = DoubleHead(small_net().eval())
    x, y = some_data(16, 5).tensors
    before = copy.deepcopy(model.head)
    alternation = Alternation(model, [(x, y)], every=1, lr=0.1, clip=1e-3, weight_decay=0.0)
    alternation.step(0.0)
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.head.parameters(), before.parameters())])
    torch.testing.assert_close(
        moved.norm(), torch.tensor(0.1 * 1.9 * 1e-3), rtol=1e-3, atol=0
    )  # Nesterov: 1 + 0.9


def test_steps_every_kth_call_and_leaves_no_gradients() -> None:
    model = DoubleHead(small_net())
    alternation = Alternation(model, DataLoader(some_data(32, 2), 16), every=4)
    stepped = [alternation.step(i / 12) is not None for i in range(12)]
    assert [i + 1 for i, was in enumerate(stepped) if was] == [4, 8, 12]
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert all(m.training for m in model.modules())


def test_modules_get_back_their_own_mode() -> None:
    model = DoubleHead(small_net())
    frozen = model.model[1].eval()  # a user who freezes BatchNorm
    Alternation(model, [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))], every=1).step(0.0)
    assert not frozen.training
    assert model.model[0].training


@pytest.mark.parametrize("loader", ["plain", "shuffled", "transforming"])
def test_resume_is_exact(loader: str) -> None:
    class Jitter(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 0.1 * torch.randn_like(x), y

    def calib() -> DataLoader:
        data = some_data(40, 2) if loader != "transforming" else Jitter(*some_data(40, 2).tensors)
        return DataLoader(data, batch_size=16, shuffle=loader != "plain")

    def fresh() -> tuple[DoubleHead, Alternation]:
        torch.manual_seed(1)
        model = DoubleHead(small_net(), reads=("statistics", "features"))
        return model, Alternation(model, calib(), every=1, augment=noisy, seed=5)

    model, alternation = fresh()
    for i in range(11):
        if i == 5:
            saved = copy.deepcopy({"model": model.state_dict(), "alternation": alternation.state_dict()})
        alternation.step(i / 11)
    again, resumed = fresh()
    torch.manual_seed(99)  # the caller's randomness must not matter
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["alternation"])
    before = torch.get_rng_state()
    for i in range(5, 11):
        resumed.step(i / 11)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), name


def test_state_survives_a_safe_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = DoubleHead(small_net())
    alternation = Alternation(model, DataLoader(some_data(32, 2), 16), every=1)
    alternation.step(0.0)
    torch.save(alternation.state_dict(), tmp_path / "state.pt")
    alternation.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    alternation.step(0.5)


def test_the_state_of_another_process_brings_its_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the first process saved: the others must not all draw its batches from then on."""
    seen: list[Tensor] = []

    def noting(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def alternation(rank: int) -> Alternation:
        monkeypatch.setattr("doublehead.double_head.rank", lambda: rank)
        calib = DataLoader(some_data(64, 2), 16, shuffle=True)
        return Alternation(DoubleHead(small_net()), calib, every=2, augment=noting)

    first = alternation(0)
    for _ in range(3):
        first.step(0.5)
    saved = first.state_dict()
    first.step(0.5)
    same = alternation(0)
    same.load_state_dict(saved)
    same.step(0.5)
    second = alternation(1)
    second.load_state_dict(saved)
    second.step(0.5)
    assert first.calls == same.calls == second.calls == 4
    assert len(second.optimizer.state) == len(first.optimizer.state) > 0
    assert torch.equal(seen[-2], seen[-3])  # the first process itself goes on where it was
    assert not torch.equal(seen[-1], seen[-2])


def defaults(head: CalibrationHead) -> tuple[object, ...]:
    return head.kind, head.reads, head.hidden, head.lr, head.annealing


def test_defaults_of_both_kinds() -> None:
    """For 64 features and 10 classes: 10 + 3 statistics, so 16 hidden units and not 6."""
    temperature = "temperature", ("statistics",), 16, 0.03, Annealing(1.0)
    paper = "mlp", ("features",), 32, 0.1, Annealing(1.2)
    assert defaults(CalibrationHead(64, 10)) == temperature
    assert defaults(CalibrationHead(64, 10, kind="mlp")) == paper
    assert CalibrationHead(64, 10).first.weight.shape == (16, 13)
    assert defaults(CalibrationHead(64, 10, reads="features"))[1:3] == (("features",), 32)
    assert defaults(CalibrationHead(20, 10, reads="features"))[1:3] == (("features",), 16)
    assert defaults(CalibrationHead(20, 10, kind="mlp"))[1:3] == (("features",), 10)
    assert defaults(CalibrationHead(64, 10, kind="mlp", reads="statistics"))[1:3] == (("statistics",), 6)
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10))
    assert defaults(DoubleHead(net).head) == defaults(DoubleHead(net, 10).head) == temperature
    assert defaults(DoubleHead(net, kind="mlp").head) == paper
    assert defaults(DoubleHead(net, reads=("logits", "features")).head)[1:3] == (("logits", "features"), 37)
    assert (HeadBank.auto(64, 10).lr, Annealing().beta0) == (0.1, 1.2)


def test_the_papers_method_is_one_argument_away() -> None:
    def trained(head: dict[str, object], **how: object) -> DoubleHead:
        torch.manual_seed(4)
        model = DoubleHead(small_net(), **head)  # type: ignore[arg-type]
        alternation = Alternation(model, DataLoader(some_data(64, 2), 16), every=1, **how)  # type: ignore[arg-type]
        for step in range(6):
            alternation.step(step / 6)
        return model

    short = trained({"kind": "mlp"})
    explicit = {"kind": "mlp", "reads": "features", "hidden": 8}
    written_out = trained(explicit, annealing=Annealing(1.2), lr=0.1)
    for (name, a), b in zip(short.state_dict().items(), written_out.state_dict().values()):
        assert torch.equal(a, b), name
    for other in ({"annealing": Annealing(1.0)}, {"lr": 0.03}):
        assert not torch.equal(short.head.last.weight, trained({"kind": "mlp"}, **other).head.last.weight)


def rate(alternation: Alternation) -> float:
    return float(alternation.optimizer.param_groups[0]["lr"])


def test_a_constant_rate_may_be_changed_from_outside() -> None:
    alternation = Alternation(DoubleHead(small_net()), [some_data(8, 1)[:]], every=1, lr=0.1)
    alternation.optimizer.param_groups[0]["lr"] = 0.0  # as a scheduler on it would
    before = copy.deepcopy(alternation.head.state_dict())
    alternation.step(0.5)
    assert alternation.optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(alternation.head.last.bias, before["last.bias"])


@pytest.mark.parametrize(
    ("head", "own"),
    [({}, 0.03), ({"kind": "mlp"}, 0.1), ({"head": HeadBank.auto}, 0.1), ({"head": nn.Linear(16, 4)}, 0.1)],
)
def test_a_head_has_a_rate_of_its_own(head: dict[str, object], own: float) -> None:
    model = DoubleHead(small_net(), **head)  # type: ignore[arg-type]
    adam = torch.optim.Adam(model.main_parameters(), 2e-4)
    calib = [some_data(8, 1)[:]]
    assert rate(Alternation(model, calib)) == own
    assert rate(Alternation(model, calib, lr=0.2)) == 0.2
    assert rate(Alternation(model, calib, lr=adam)) == pytest.approx(own)
    assert rate(Alternation(model, calib, lr=adam, lr_scale=3.0)) == 3.0 * 2e-4


def test_the_rate_follows_the_schedule_and_is_the_heads_own_at_its_peak() -> None:
    model, calib = DoubleHead(small_net()), [some_data(8, 1)[:]]

    def followed(make: object, n: int) -> list[float]:
        optimizer = torch.optim.SGD(model.main_parameters(), lr=0.3)
        scheduler = make(optimizer)  # type: ignore[operator]
        alternation, seen = Alternation(model, calib, every=1, lr=optimizer), []
        for _ in range(n):
            alternation.step(0.0)
            seen.append(rate(alternation))
            optimizer.step()
            scheduler.step()
        return seen

    schedulers = torch.optim.lr_scheduler
    decay = followed(lambda optimizer: schedulers.StepLR(optimizer, 2, 0.1), 4)
    assert decay == pytest.approx([0.03, 0.03, 0.003, 0.003])
    warmup = followed(lambda optimizer: schedulers.LambdaLR(optimizer, lambda i: min(1.0, i / 2)), 4)
    assert warmup == pytest.approx([0.0, 0.015, 0.03, 0.03])
    cycle = followed(lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.5, total_steps=20), 20)
    assert max(cycle) == pytest.approx(0.03)
    assert cycle[0] == pytest.approx(0.03 / 25)
    there_and_back = followed(lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.5, step_size_up=2), 5)
    assert max(there_and_back) == pytest.approx(0.03)  # CyclicLR notes its foot as the initial rate
    assert there_and_back[4] == pytest.approx(0.03 * 0.01 / 0.5)


def test_a_warmup_by_hand_from_zero_and_a_group_that_rests() -> None:
    model = DoubleHead(small_net())
    first, *others = model.main_parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.0}])
    alternation, seen = Alternation(model, [some_data(8, 1)[:]], every=1, lr=optimizer), []
    for lr in (0.0, 0.1, 0.2, 0.05):
        optimizer.param_groups[1]["lr"] = lr
        alternation.step(0.0)
        seen.append(rate(alternation))
    assert seen == pytest.approx([0.0, 0.03, 0.03, 0.0075])
    assert alternation.skipped == 0
    at_half = Alternation(model, [some_data(8, 1)[:]], lr=optimizer, peak_lr=0.5)
    assert rate(at_half) == pytest.approx(0.5)


def test_rates_that_are_none_are_named() -> None:
    model, calib = DoubleHead(small_net()), [some_data(8, 1)[:]]
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.main_parameters(), lr=0.1), 1)
    for lr, got in ((-1.0, "-1.0"), (math.nan, "nan"), (scheduler, "StepLR"), ([0.1], "list")):
        wanted = f"lr must be a finite number from 0 on, an optimizer or None, got {got}"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            Alternation(model, calib, lr=lr)  # type: ignore[arg-type]
    for name in ("lr_scale", "peak_lr"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number from 0 on, got -2"):
            Alternation(model, calib, **{name: -2})  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_that_belongs_outside_goes_inside(compiled: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    for inner, kind in ((DoubleHead(net), "DoubleHead"), (ShiftGuard(net), "ShiftGuard")):
        model = torch.compile(inner, backend="eager") if compiled else inner
        with pytest.raises(
            ValueError, match=f"without a DoubleHead or ShiftGuard, got a {kind}: put the Double"
        ):
            DoubleHead(model, 4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"got Sequential with a {kind} as '0': put"):
            DoubleHead(nn.Sequential(inner), 4)
    assert DoubleHead(net).eval()(torch.randn(2, 8)).shape == (2, 4)


def test_a_resumed_run_goes_on_at_the_same_rate() -> None:
    """The rate has fallen when the run is resumed, and nobody noted the peak."""

    def made(lr: float) -> tuple[Alternation, torch.optim.Optimizer]:
        model = DoubleHead(small_net())
        optimizer = torch.optim.SGD(model.main_parameters(), lr=lr)
        return Alternation(model, [some_data(8, 1)[:]], every=1, lr=optimizer), optimizer

    alternation, optimizer = made(0.3)
    optimizer.param_groups[0]["lr"] = 0.03
    alternation.step(0.0)
    resumed, _ = made(0.03)
    resumed.load_state_dict(alternation.state_dict())
    resumed.step(0.0)
    assert rate(alternation) == rate(resumed) == pytest.approx(0.003)
    older = {
        key: value for key, value in alternation.state_dict().items() if key not in ("lr_scale", "peak_lr")
    }
    again, _ = made(0.3)
    again.load_state_dict(older)
    assert again.rate.scale == pytest.approx(0.1)


def test_another_optimizer() -> None:
    model = DoubleHead(small_net())
    alternation = Alternation(
        model, DataLoader(some_data(32, 2), 16), every=1, lr=1e-3, optimizer=torch.optim.Adam
    )
    assert isinstance(alternation.optimizer, torch.optim.Adam)
    assert alternation.step(0.0) is not None


def test_non_finite_losses_are_skipped_counted_and_finally_raised() -> None:
    bad = torch.full((4, 1, 8, 8), float("nan")), torch.tensor([0, 1, 2, 3])
    good = some_data(4, 1)[:]
    model = DoubleHead(small_net().eval())
    alternation = Alternation(model, [bad, good], every=1, patience=3)
    assert isinstance(model.head, CalibrationHead)
    weights = copy.deepcopy(model.head.state_dict())
    with pytest.warns(UserWarning, match="this step of the calibration head is skipped"):
        alternation.step(0.0)
    assert all(torch.equal(weights[key], value) for key, value in model.head.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned about once only
        for i in range(1, 9):
            alternation.step(i / 9)
    assert alternation.skipped == 5
    hopeless = Alternation(model, [bad], every=1, patience=3)
    with pytest.warns(UserWarning), pytest.raises(FloatingPointError, match="not finite 3 times in a row"):
        for _ in range(3):
            hopeless.step(0.0)


def test_moments_leave_out_what_is_not_finite_or_not_fine() -> None:
    moments = Standardise(2)
    moments.follow(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), YES)
    before = copy.deepcopy(moments.state_dict())
    moments.follow(torch.tensor([[float("nan"), 2.0], [3.0, float("inf")]]), YES)
    moments.follow(torch.tensor([[1e9, 2.0], [3.0, 1.0]]), ~YES)
    assert all(torch.equal(before[key], value) for key, value in moments.state_dict().items())


@pytest.mark.parametrize("head", [{}, {"kind": "mlp"}, {"reads": "features"}])
def test_features_that_explode_at_the_start_do_not_end_a_head(head: dict[str, object]) -> None:
    """A deep network's first calibration batches come with features of 1e9: BatchNorm's averages are not there yet."""

    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 3)
            self.size = 1e9

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x * self.size)

    torch.manual_seed(0)
    x = torch.randn(256, 8)
    net = Exploding()
    nn.init.normal_(net.last.weight)
    y = (2 * x @ net.last.weight.T + torch.randn(256, 3)).argmax(1)
    model = DoubleHead(net, **head)  # type: ignore[arg-type]
    alternation = Alternation(model, [(x, y)], every=1, lr=0.1, annealing=Annealing(1.0))
    for _ in range(3):
        alternation.step(0.0)
    net.size = 1.0
    for _ in range(200):
        last = alternation.step(0.0)
    assert last is not None
    assert float(last) < 0.8  # guessing scores log 3 = 1.10
    assert alternation.skipped == 0


def test_bad_calibration_batches_are_named() -> None:
    model = DoubleHead(small_net())
    x = torch.randn(4, 1, 8, 8)
    with pytest.raises(ValueError, match="calib_batches must hold at least one batch"):
        Alternation(model, [], every=1).step(0.0)
    with pytest.raises(ValueError, match="start again when iterated again"):
        used_up = iter([(x, torch.zeros(4, dtype=torch.long))])
        alternation = Alternation(model, used_up, every=1)
        alternation.step(0.0)
        alternation.step(0.0)
    with pytest.raises(
        TypeError, match=r"whole-number tensor of shape \(B,\), got torch.float32 of shape \(4,\)"
    ):
        Alternation(model, [(x, torch.zeros(4))], every=1).step(0.0)
    with pytest.raises(TypeError, match="a batch must be .* got Tensor"):
        Alternation(model, [x], every=1).step(0.0)
    with pytest.raises(TypeError, match="model must be a DoubleHead .* got Linear"):
        Alternation(nn.Linear(2, 2), [x])
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Alternation(model, [x], every=0)


def test_dict_batches_and_outputs_with_logits() -> None:
    class Output(dict):  # the shape of a Hugging Face output
        @property
        def logits(self) -> Tensor:
            return self["logits"]

    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
            return Output(logits=self.net(pixel_values))

    model = DoubleHead(Keyed())
    x, y = some_data(8, 1)[:]
    alternation = Alternation(model, [{"pixel_values": x, "labels": y}], every=1, augment=lambda batch: batch)
    assert alternation.step(0.0) is not None
    model.eval()
    out = model(pixel_values=x)
    assert isinstance(out, Output)
    torch.testing.assert_close(out["logits"], model.heads(pixel_values=x).calib)


def test_token_logits_find_their_features() -> None:
    """A decoder that scores every token and keeps one: the features must come from the same token."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 3, bias=False)

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return self.score(x)[torch.arange(len(x)), at]

    model = DoubleHead(Decoder(), kind="mlp").eval()
    x, at = torch.randn(4, 7, 6), torch.tensor([0, 6, 3, 2])
    features = model._tap.run(model.model, (x, at), {})[1]
    torch.testing.assert_close(features, x[torch.arange(4), at])


def test_bf16_autocast_and_channels_last() -> None:
    model = DoubleHead(small_net().to(memory_format=torch.channels_last), reads=("features", "statistics"))
    x, y = some_data(16, 1)[:]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        loss = Alternation(model, [(x.to(memory_format=torch.channels_last), y)], every=1).step(0.0)
        assert loss is not None
        assert loss.dtype == torch.float32
        assert model.eval()(x).dtype == torch.float32


@pytest.mark.parametrize("what", ["network", "whole"])
def test_compiled_models(what: str) -> None:
    torch._dynamo.reset()
    net = small_net()
    plain = DoubleHead(net, kind="mlp").eval()
    x, y = some_data(8, 1)[:]
    want = plain.heads(x)
    if what == "network":
        model: nn.Module = DoubleHead(torch.compile(net, backend="aot_eager"), head=plain.head)
    else:
        model = torch.compile(DoubleHead(net, head=plain.head), backend="aot_eager")
    model.eval()
    torch.testing.assert_close(model(x), want.calib)
    model.train()
    alternation = Alternation(model, [(x, y)], every=1)
    F.cross_entropy(model(x), y).backward()
    assert alternation.step(0.0) is not None
    model.eval()
    assert not torch.allclose(model(x), want.calib)


def test_heads_on_one_network_share_its_tap() -> None:
    net, x = small_net().eval(), torch.randn(3, 1, 8, 8)
    one, other = (DoubleHead(net, kind=kind, reads="features").eval() for kind in ("mlp", "temperature"))
    assert one._tap is other._tap
    assert len(net[8]._forward_hooks) == 1
    features = net[:8](x)
    for model in (one, other, one):
        torch.testing.assert_close(model(x), model.head(features, net(x)))
        torch.testing.assert_close(model.read([(x, torch.tensor([0, 1, 2]))]).features, features)
        assert one._tap.caught is None
    alone = copy.deepcopy(one)
    assert alone._tap is not one._tap
    assert DoubleHead(alone.model, reads="features")._tap is alone._tap
    deeper = DoubleHead(net, 3, layer="6", reads="features")  # another layer, another tap
    assert deeper._tap is not one._tap
    assert DoubleHead(net, 3, layer="6", n_features=7, reads="features")._tap is not deeper._tap


def test_a_head_that_reads_no_features_puts_no_hook_on_the_network() -> None:
    net = small_net()
    model = DoubleHead(net)
    assert not any(module._forward_hooks for module in net.modules())
    assert model.read([some_data(5, 1)[:]]).features.shape == (5, 0)


def test_deep_copy_stands_on_its_own() -> None:
    model = DoubleHead(small_net()).eval()
    other = copy.deepcopy(model)
    x = torch.randn(3, 1, 8, 8)
    nn.init.zeros_(model.model[6].weight)
    torch.testing.assert_close(other.heads(x).main, other.model(x))
    assert not torch.allclose(other(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_stays_float32_in_a_half_precision_model(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    for model in (
        DoubleHead(net, reads=("features", "statistics")),
        DoubleHead(net, head=HeadBank.auto),
    ):
        half = copy.deepcopy(model).to(dtype).eval()
        assert {value.dtype for value in half.model.parameters()} == {dtype}
        assert {value.dtype for value in half.head.parameters()} == {torch.float32}
        x = torch.randn(4, 8)
        with torch.no_grad():
            torch.testing.assert_close(half(x.to(dtype)), model.eval()(x), atol=0.1, rtol=0.1)


def test_a_network_that_was_compiled_and_run_before() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    compiled, x = torch.compile(net, backend="eager"), torch.randn(4, 8)
    with torch.no_grad():
        compiled(x)
        compiled(x)
        model = DoubleHead(compiled, 3, kind="mlp").eval()
        torch.testing.assert_close(model.heads(x).main, net(x))
        torch.testing.assert_close(model(x), model.head(net[:3](x), net(x)))
