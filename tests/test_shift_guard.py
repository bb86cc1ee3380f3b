"""The shift guard: what it reads, what it learns on real images, and all that it must leave alone."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead import Calibrated, Predictions, ShiftGuard, calibrate, metrics
from doublehead.calibrators import Temperature
from doublehead.data import DATASETS, GaussianNoise, Shifts, corrupt, fashion_subset
from doublehead.models import build
from doublehead.shift_guard import (
    CHANNELS,
    MARGIN,
    N_LAYERS,
    SHRINK,
    Distance,
    Guard,
    Sights,
    StageTap,
    channels_of,
    moments,
    scaled,
)

NORMALISE = DATASETS["fashion"].normalise


def small_net(n_classes: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, n_classes),
    )  # fmt: skip


def some_batches(n: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.rand(20, 3, 8, 8), torch.randint(4, (20,))) for _ in range(n)]


def noisy(images: Tensor) -> Tensor:
    return images + 0.5 * torch.randn_like(images)


def fitted(model: nn.Module | None = None) -> ShiftGuard:
    """Of a network that knows nothing a guard learns nothing: this one gets weights that act on half of all data."""
    guard = ShiftGuard(model or small_net()).fit(some_batches(), noisy, views=1, steps=10)
    return acting(guard, some_batches())


def acting(guard: ShiftGuard, batches: list[Any]) -> ShiftGuard:
    with torch.no_grad():
        guard.guard.last.weight.normal_().abs_()
        guard.guard.threshold.copy_(guard.guard.humility(guard.look(batches).stages).median() / 2)
    return guard


# ------------------------------------------------------------------------------------------- what it reads


def test_moments_by_hand() -> None:
    maps = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]], [[2.0, 2.0], [2.0, 2.0]]]])  # (1, 2 channels, 2, 2)
    assert moments(maps)[0].tolist() == pytest.approx([4, 2, math.sqrt(5), 0])
    tokens = torch.tensor([[[1.0, 10.0], [3.0, 10.0], [8.0, 40.0]]])  # (1, 3 tokens, 2 channels)
    wanted = [4, 20, math.sqrt((9 + 1 + 16) / 3), math.sqrt((100 + 100 + 400) / 3)]
    assert moments(tokens, channels_last=True)[0].tolist() == pytest.approx(wanted)
    vectors = torch.tensor([[1.0, -2.0], [0.5, 4.0]])  # one place each: no deviation
    for channels_last in (False, True):
        assert moments(vectors, channels_last).tolist() == [[1, -2, 0, 0], [0.5, 4, 0, 0]]


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 5, 4, 2), (3, 5, 4, 2, 3)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_moments_one_channel_at_a_time(shape: tuple[int, ...], channels_last: bool) -> None:
    maps = torch.randn(shape) * 7 + 2
    got = moments(maps, channels_last).numpy()
    axis = -1 if channels_last else 1
    for row in range(3):
        for channel in range(shape[axis]):
            values = np.take(maps[row].numpy(), channel, axis=axis if channels_last else 0).astype(float)
            assert got[row, channel] == pytest.approx(values.mean(), abs=1e-5)
            assert got[row, shape[axis] + channel] == pytest.approx(values.std(), rel=1e-5)


def test_moments_of_half_precision_and_of_nothing() -> None:
    maps = torch.full((1, 1, 100, 100), 60000.0, dtype=torch.float16)  # their sum overflows in half precision
    with torch.autocast("cpu", torch.bfloat16):
        assert moments(maps).tolist() == [[60000, 0]]
    assert moments(torch.empty(0, 7, 3, 3)).shape == (0, 14)


class LayerNorm2d(nn.LayerNorm):
    """As in ConvNeXt: normalises the channels of maps (B, C, H, W)."""

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("layer", "shape", "channels_last"),
    [
        (nn.BatchNorm1d(5), (4, 5), False),
        (nn.BatchNorm1d(5), (4, 5, 3), False),
        (nn.BatchNorm2d(5), (4, 5, 3, 2), False),
        (nn.BatchNorm3d(5), (4, 5, 3, 2, 2), False),
        (nn.SyncBatchNorm(5), (4, 5, 3, 2), False),
        (nn.GroupNorm(1, 5), (4, 5, 3, 2), False),
        (nn.LayerNorm(5), (4, 5), True),
        (nn.LayerNorm(5), (4, 3, 5), True),
        (nn.LayerNorm(5), (4, 5, 3, 5), True),  # its own kind is always channels last
        (LayerNorm2d(5), (4, 5, 3, 2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_each_kind_of_normalisation(layer: nn.Module, shape: tuple[int, ...], channels_last: bool) -> None:
    tap, x = StageTap(nn.Sequential(layer)), torch.randn(shape)
    assert channels_of(layer) == 5
    assert tap.widths == [5, 5]
    with tap.recording():
        layer.eval()(x)
    assert torch.equal(tap.take(4), moments(x, channels_last))


def test_stages_are_the_inputs_of_the_layers_side_by_side() -> None:
    net, x = small_net().eval(), torch.rand(5, 3, 8, 8)
    guard = ShiftGuard(net, layers=["7", "1"])
    assert guard.tap.widths == [8, 8, 6, 6]
    look = guard.look([(x[:2], torch.tensor([0, 1])), (x[2:], torch.tensor([2, 3, 0]))])
    with torch.no_grad():
        wanted = torch.cat([moments(net[:7](x)), moments(net[:1](x))], 1)
        torch.testing.assert_close(look.stages, wanted)
        torch.testing.assert_close(look.logits, net(x))
    assert look.labels.tolist() == [0, 1, 2, 3, 0]


def test_layers_are_taken_over_the_depth() -> None:
    deep = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(40)))
    layers = [int(name) for name in StageTap(deep).layers]
    assert len(layers) == N_LAYERS
    assert layers == sorted(set(layers))
    assert layers[0] == 0
    assert layers[-1] == round(39 * (N_LAYERS - 1) / N_LAYERS)
    assert StageTap(deep, n_layers=3).layers == ["0", "13", "26"]
    assert StageTap(deep, n_layers=1).layers == ["0"]
    assert len(StageTap(nn.Sequential(nn.BatchNorm1d(3))).layers) == 1
    assert StageTap(deep[:N_LAYERS]).layers == [
        str(i) for i in range(N_LAYERS)
    ]  # all, where there are no more
    assert len(set(StageTap(deep[: N_LAYERS + 1]).layers)) == N_LAYERS


@pytest.mark.parametrize(("n_channels", "stride", "width"), [(CHANNELS, 1, 128), (130, 2, 65), (512, 4, 128)])
def test_of_wide_layers_some_channels_are_read(n_channels: int, stride: int, width: int) -> None:
    for layer, last in ((nn.BatchNorm2d(n_channels), False), (nn.LayerNorm(n_channels), True)):
        x = torch.rand(4, 3, 3, n_channels) if last else torch.rand(4, n_channels, 3, 3)
        tap = StageTap(nn.Sequential(layer))
        with tap.recording():
            layer(x)
        whole = moments(x, last).view(4, 2, n_channels)
        assert tap.widths == [width, width]
        torch.testing.assert_close(tap.take(4), whole[:, :, ::stride].flatten(1))


def test_nothing_is_kept_between_runs() -> None:
    guard = fitted()
    x = torch.rand(4, 3, 8, 8)
    guard(x)
    guard.model(x)  # the network alone: nobody records
    guard.train()(x)
    assert not guard.tap._caught
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        guard.eval()(torch.rand(4, 3, 20, 20))  # breaks in the last layer
    assert not guard.tap._recording
    with guard.tap.recording():
        pass
    with pytest.raises(RuntimeError, match="these were not"):  # nor what was caught before it broke
        guard.tap.take(4)
    assert guard(x).shape == (4, 4)


# ------------------------------------------------------------------------------------------ the factor


def slow_factor(guard: Guard, clean: Tensor, stages: Tensor) -> np.ndarray:
    """The factor of each row in float64, one row after the other; distances from the clean stages themselves."""
    state = {name: value.double().numpy() for name, value in guard.state_dict().items()}
    mean, square = state["standardise.mean"], state["standardise.square"]
    deviation = np.sqrt(np.maximum(square - mean**2, 1e-6))
    starts = np.cumsum([0, *guard.widths])
    usual = [clean.double().numpy()[:, low:high] for low, high in pairwise(starts)]
    factors = []
    for row in stages.double().numpy():
        far = np.array([slow_distance(one, row[low : low + one.shape[1]]) for one, low in zip(usual, starts)])
        hidden = np.maximum(state["first.weight"] @ ((far - mean) / deviation) + state["first.bias"], 0)
        out = float((state["last.weight"] @ hidden + state["last.bias"])[0])
        humility, threshold = np.logaddexp(0, 4 * out) / 4, float(state["threshold"])
        share = min(max(humility / threshold - 1, 0.0), 1.0)
        factors.append(math.exp(-min(MARGIN * share * humility, 10.0)))
    return np.array(factors)


def slow_distance(usual: np.ndarray, row: np.ndarray) -> float:
    """The logarithm of the mean squared Mahalanobis distance, by an inverse of the covariance."""
    centre, deviation = usual.mean(0), usual.std(0)
    unit = (usual - centre) / deviation
    covariance = (1 - SHRINK) * unit.T @ unit / len(unit) + SHRINK * np.eye(len(row))
    z = (row - centre) / deviation
    return math.log(z @ np.linalg.inv(covariance) @ z / len(row))


def test_distance_by_hand() -> None:
    """Two channels that always agree: a row in which they disagree is far, though each is usual alone."""
    distance = Distance(2)
    distance.set_usual(torch.tensor([[1.0, 10.0], [-1.0, -10.0], [1.0, 10.0], [-1.0, -10.0]]))
    # In units the covariance is [[1, .98], [.98, 1]] after shrinking: 1.98 along (1, 1), 0.02 along (1, -1).
    far = distance(torch.tensor([[1.0, 10.0], [1.0, -10.0], [0.0, 0.0]])).exp()
    torch.testing.assert_close(far[:, 0], torch.tensor([1 / 1.98, 1 / 0.02, 1e-6]), rtol=1e-4, atol=0)


def some_sights(n: int = 301, shift: float = 0.0) -> Sights:
    stages = torch.randn(n, 6) * torch.tensor([1, 2, 3, 0.1, 5, 1]) + 3 + shift
    logits = 3 * torch.randn(n, 4)
    return Sights(stages, logits, torch.multinomial((logits * math.exp(-shift)).softmax(1), 1)[:, 0])


def test_rows_that_are_usual_are_measured_from_the_others() -> None:
    """As if each had been left out by itself: a new row would be as far."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 12, generator=generator) @ torch.rand(12, 12, generator=generator)
    distance = Distance(12)
    apart, near = distance.set_usual(rows).exp(), distance(rows).exp()
    slow = []
    for i in range(60):
        others = Distance(12)
        others.set_usual(torch.cat([rows[:i], rows[i + 1 :]]))
        slow.append(others(rows[i : i + 1]).exp())
    torch.testing.assert_close(apart, torch.cat(slow), rtol=0.05, atol=0)
    assert float(apart.mean()) > 1.2 * float(near.mean())


def test_factor_and_threshold_against_a_slow_reference() -> None:
    guard, clean, shifted = Guard([4, 2]), some_sights(), some_sights(shift=2.0)
    guard.fit(clean, shifted, keep=0.8)
    with torch.no_grad():
        factor = guard(clean.stages)
        parts = zip(guard.widths, clean.stages.split(guard.widths, 1))
        apart = torch.cat([Distance(width).set_usual(part) for width, part in parts], 1)
        humility = guard._humility(apart)[:, 0].double().numpy()
    slow = slow_factor(guard, clean.stages, clean.stages)
    np.testing.assert_allclose(factor[:, 0].numpy(), slow, rtol=1e-4)
    far = torch.cat([clean.stages * scale for scale in (-30, 1, 1.5, 30)])
    slow = slow_factor(guard, clean.stages, far)
    np.testing.assert_allclose(guard(far)[:, 0].detach().numpy(), slow, rtol=1e-3)
    assert ((slow > 0) & (slow < 1)).sum() > 100
    ordered = np.sort(humility)
    place = 0.8 * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    assert float(guard.threshold) == pytest.approx(below + (place % 1) * (above - below), rel=1e-5)
    assert int((factor == 1).sum()) >= math.floor(place) + 1
    assert float(guard(shifted.stages).detach().mean()) < float(factor.mean()) - 0.1


def test_the_factor_lies_in_0_to_1_whatever_comes() -> None:
    guard = Guard([4, 2])
    guard.fit(some_sights(), some_sights(shift=2.0))
    odd = torch.tensor([0.0, 1e-30, -1e30, 3e38, math.inf, -math.inf, math.nan])
    factor = guard(odd[:, None].expand(-1, 6))
    assert ((factor > 0) & (factor <= 1)).all()
    assert factor[-1].item() == pytest.approx(math.exp(-10))  # nobody knows: as humble as can be
    assert guard(torch.empty(0, 6)).shape == (0, 1)


def test_before_it_is_fitted_it_does_nothing() -> None:
    net, x = small_net().eval(), torch.rand(4, 3, 8, 8)
    guard = ShiftGuard(net).eval()
    assert (guard.guard(torch.randn(9, sum(guard.tap.widths)) * 100) == 1).all()
    torch.testing.assert_close(guard(x).softmax(1), net(x).softmax(1))


def test_scaled_makes_no_new_tie() -> None:
    least = torch.tensor([[5.0, np.nextafter(np.float32(5), np.float32(6)), 1.0]])
    out = scaled(least, torch.tensor([[math.exp(-10)]]))
    assert out.argmax().item() == 1
    assert (out == 0).sum() == 1
    double = torch.tensor([[1.0, 1 + 1e-14, 0.0]], dtype=torch.float64)  # equal in float32
    assert scaled(double, torch.tensor([[0.5]])).argmax().item() == 1
    assert scaled(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 1)).dtype == torch.float32


def test_a_fit_knows_nothing_of_the_one_before() -> None:
    """Guards that leave families of shift out must not start from one that has seen them."""
    clean, shifted, other = some_sights(), some_sights(shift=2.0), some_sights(shift=-1.0)
    once, twice = Guard([4, 2], seed=3), Guard([4, 2], seed=3)
    once.fit(clean, shifted, steps=100)
    twice.fit(other, other, steps=100)
    twice.fit(clean, shifted, steps=100)
    assert all(torch.equal(value, twice.state_dict()[name]) for name, value in once.state_dict().items())
    differently = Guard([4, 2], seed=3)
    differently.fit(clean, shifted, steps=100, seed=1)
    assert not torch.equal(once.first.weight, differently.first.weight)


def test_overconfidence_everywhere_is_not_the_guards_matter() -> None:
    """It learns what is left when a temperature has been fitted to the clean data."""
    clean, shifted = some_sights(), some_sights(shift=2.0)
    one, other = Guard([4, 2]), Guard([4, 2])
    one.fit(clean, shifted, steps=100)  # more steps would add up what is rounded otherwise
    other.fit(*(sights._replace(logits=8 * sights.logits) for sights in (clean, shifted)), steps=100)
    torch.testing.assert_close(one(shifted.stages), other(shifted.stages), rtol=1e-3, atol=0)


# ----------------------------------------------------------------------------------------- real images


def calibrated(network: nn.Module, method: str = "temperature") -> Calibrated:
    data = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(5)), torch.arange(300) % 4
    return calibrate(network, data, method=method)


class Images(SimpleNamespace):
    calib: list[tuple[Tensor, Tensor]]
    net: nn.Module
    base: Calibrated
    test: tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def fashion() -> Images:
    """A small convolutional network after ten epochs of Fashion-MNIST, alone and temperature-scaled."""
    torch.manual_seed(0)
    splits = fashion_subset().first(3000, 1000, 1000)
    data = {}
    for name in ("train", "calib", "test"):
        part = getattr(splits, name)
        pixels = torch.from_numpy(part.images).permute(0, 3, 1, 2) / 255
        data[name] = NORMALISE(pixels), torch.from_numpy(part.labels)
    net = build("small_cnn", 10, channels=(16, 32, 32), hidden=64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4)
    x, y = data["train"]
    for epoch in range(10):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - epoch / 10)
        for rows in torch.randperm(len(y)).split(50):
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    calib = list(zip(*(part.split(250) for part in data["calib"])))
    return Images(
        calib=calib, net=net.eval(), base=calibrate(net, calib, method="temperature"), test=data["test"]
    )


def ece(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(metrics.ece(Predictions(model(x), y)))


def under_noise(images: Tensor, sigma: float = 0.8) -> Tensor:
    draw = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return NORMALISE((NORMALISE.undo(images) + sigma * draw).clamp(0, 1))


def pale(images: Tensor) -> Tensor:
    return NORMALISE(corrupt(NORMALISE.undo(images), "contrast", 5, torch.Generator()))


@pytest.mark.parametrize(
    ("teacher", "harm"),
    [(GaussianNoise(0.5, 1.0, NORMALISE), under_noise), (Shifts(1.0, NORMALISE), pale)],
    ids=["noise", "shifts"],
)
def test_on_real_images(
    fashion: Images, teacher: Callable[[Tensor], Tensor], harm: Callable[[Tensor], Tensor]
) -> None:
    guard = ShiftGuard(fashion.base).fit(fashion.calib, teacher, views=3)
    seen = torch.cat([guard.look([batch]).stages for batch in fashion.calib])
    with torch.no_grad():
        on_calib = guard.guard(seen)
    assert int((on_calib == 1).sum()) >= 0.9 * len(on_calib)
    assert ((on_calib > 0) & (on_calib <= 1)).all()

    x, y = fashion.test
    shifted = harm(x)
    # Eight networks (four seeds, two instruction sets) had an ECE of 0.21 to 0.57, the guard 0.07 to 0.31 of that.
    assert ece(fashion.base, shifted, y) > 0.1
    assert ece(guard, shifted, y) < 0.6 * ece(fashion.base, shifted, y)
    assert ece(guard, x, y) < ece(fashion.base, x, y) + 0.02
    for images in (x, shifted):
        with torch.no_grad():
            assert torch.equal(guard(images).argmax(1), fashion.net(images).argmax(1))


def test_a_network_alone_is_guarded_too(fashion: Images) -> None:
    guard = ShiftGuard(fashion.net).fit(fashion.calib, Shifts(1.0, NORMALISE), views=3, keep=0.95)
    x, y = fashion.test
    assert ece(guard, pale(x), y) < 0.75 * ece(fashion.net, pale(x), y)  # 0.28 to 0.49 for eight networks
    with torch.no_grad():
        factor = guard.guard(guard.look([(x, y)]).stages)
    assert 0 < (factor < 1).float().mean() < 0.15  # of data that was not calibrated on; a twentieth of that


def test_settling_is_temperature_scaling_of_what_the_guard_gives(fashion: Images) -> None:
    plain = ShiftGuard(fashion.net).fit(fashion.calib, Shifts(1.0, NORMALISE), views=2, steps=50)
    settled = ShiftGuard(fashion.net).fit(
        fashion.calib, Shifts(1.0, NORMALISE), views=2, steps=50, settle=True
    )
    with torch.no_grad():
        rows = [(plain(x), y) for x, y in fashion.calib]
    logits, labels = (torch.cat(part) for part in zip(*rows))
    temperature = Temperature().fit(Predictions(logits, labels)).temperature_
    assert float(temperature) > 1.05  # the network alone is too sure
    x = fashion.test[0]
    torch.testing.assert_close(settled(x), plain(x) / temperature, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------- what is left alone


def test_model_and_random_numbers_stay_as_they_were() -> None:
    net = small_net().train()
    net[4].eval()
    modes = [module.training for module in net.modules()]
    before = copy.deepcopy(net.state_dict())

    def draws() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    data = torch.utils.data.TensorDataset(torch.rand(40, 3, 8, 8), torch.randint(4, (40,)))
    loader = torch.utils.data.DataLoader(data, 20, shuffle=True)
    states = draws()
    guard = ShiftGuard(net, seed=1)
    guard.look(loader)
    assert [module.training for module in net.modules()] == modes
    assert not guard.guard.training
    states = draws()  # the loader's own draws are the caller's
    results = []
    for seed in (5, 5, 6):
        np.random.rand(seed)  # noqa: NPY002 (what happened before must not matter)
        torch.rand(seed)
        states = draws()
        guard.fit(loader, noisy, views=2, steps=50, seed=seed)
        assert draws() == states
        results.append(copy.deepcopy(guard.guard.state_dict()))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert not torch.equal(results[0]["first.weight"], results[2]["first.weight"])
    assert not guard.training


def test_in_training_mode_it_is_the_model() -> None:
    guard, x = fitted(), torch.rand(20, 3, 8, 8)
    torch.testing.assert_close(guard.train()(x), guard.model(x), rtol=0, atol=0)
    guard(x).sum().backward()
    assert all(p.grad is None for p in guard.guard.parameters())


def test_predictions_never_change() -> None:
    guard = fitted()
    x = torch.cat([torch.rand(200, 3, 8, 8), 5 * torch.randn(200, 3, 8, 8)])
    with torch.no_grad():
        out, plain = guard(x), guard.model(x)
    assert torch.equal(out.argmax(1), plain.argmax(1))
    assert (out.softmax(1).amax(1) <= plain.softmax(1).amax(1) + 1e-6).all()  # never surer
    assert (out.softmax(1).amax(1) < plain.softmax(1).amax(1) - 1e-3).any()


def test_two_guards_on_one_network() -> None:
    net, x = small_net(), torch.rand(20, 3, 8, 8)
    one = fitted(net)
    before = one(x)
    other = ShiftGuard(net, layers=["7"]).fit(some_batches(), torch.zeros_like, keep=0.2)
    assert torch.equal(one(x), before)
    assert not torch.allclose(one(x), other(x))
    assert not one.tap._caught


# ------------------------------------------------------------------------- copies, compilers, precision


def test_copies_stand_on_their_own() -> None:
    guard, x = fitted(), torch.rand(6, 3, 8, 8)
    out = guard(x)
    for other in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert torch.equal(other(x), out)
        nn.init.zeros_(other.model[0].weight)
        assert not torch.equal(other(x), out)
        assert torch.equal(guard(x), out)


def test_state_goes_round() -> None:
    guard, x = fitted(), torch.rand(20, 3, 8, 8)
    again = ShiftGuard(small_net(), seed=9).eval()
    assert not torch.equal(again(x), guard(x))
    again.load_state_dict(guard.state_dict())
    assert torch.equal(again(x), guard(x))
    assert {name.split(".")[0] for name in guard.state_dict()} == {"model", "guard"}


@pytest.mark.parametrize("what", ["whole", "network", "network that ran", "calibrated network"])
def test_compiled(what: str) -> None:
    torch.compiler.reset()
    net, x = small_net().eval(), torch.rand(20, 3, 8, 8)
    compiled = torch.compile(net, backend="aot_eager")
    if what != "network":
        with torch.no_grad():
            compiled(x)  # what is compiled already knows no hook
    plain = copy.deepcopy(net)
    wanted = fitted(calibrated(plain) if "calibrated" in what else plain)
    if what == "whole":
        model = torch.compile(wanted, backend="aot_eager", fullgraph=True)
    else:
        model = ShiftGuard(calibrated(compiled) if "calibrated" in what else compiled).eval()
        model.guard.load_state_dict(wanted.guard.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted(x))
        torch.testing.assert_close(model(x[:7]), wanted(x[:7]))
    if what == "network that ran":
        assert model.fit(some_batches(), noisy, steps=10)(x).shape == (20, 4)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    guard = fitted(calibrated(small_net()))
    x = torch.rand(6, 3, 8, 8)
    free = {"args": ({0: torch.export.Dim("n", min=1)},)}
    program = torch.export.export(guard, (x,), dynamic_shapes=free, strict=strict).module()
    for some in (torch.cat([x, 3 * x]), x[:1]):
        torch.testing.assert_close(program(some), guard(some))
    assert not torch.allclose(program(3 * x).softmax(1), guard.model(3 * x).softmax(1))
    assert not guard.tap._caught


def test_half_precision_models_and_autocast() -> None:
    guard, x = fitted(), torch.rand(20, 3, 8, 8)
    out, exact = guard(x), copy.deepcopy(guard.guard.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        mixed = guard(x)
        assert guard.guard(torch.rand(2, sum(guard.tap.widths))).dtype == torch.float32
        assert fitted()(x).dtype == torch.float32
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.softmax(1), out.softmax(1), atol=0.02, rtol=0)
    half = copy.deepcopy(guard).bfloat16()
    assert half.model[0].weight.dtype == torch.bfloat16
    assert all(torch.equal(value, exact[name]) for name, value in half.guard.state_dict().items())
    torch.testing.assert_close(half(x.bfloat16()).softmax(1), out.softmax(1), atol=0.02, rtol=0)
    double = copy.deepcopy(guard).double()
    assert double(x.double()).dtype == torch.float64
    torch.testing.assert_close(double(x.double()).softmax(1).float(), out.softmax(1))


def test_empty_batch(recwarn: pytest.WarningsRecorder) -> None:
    guard = fitted()
    assert guard(torch.rand(0, 3, 8, 8)).shape == (0, 4)
    look = guard.look([*some_batches(1), (torch.rand(0, 3, 8, 8), torch.empty(0, dtype=torch.long))])
    assert look.stages.shape == (20, sum(guard.tap.widths))
    assert not recwarn


# ------------------------------------------------------------------------------ other kinds of models


class Tokens(nn.Module):
    """A transformer over words, called by keyword, with an output as Hugging Face has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, dropout=0.0)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(16, 4)

    def forward(self, words: Tensor, scale: float = 1.0) -> Any:
        hidden = self.encode(scale * self.embed(words))
        return SimpleNamespace(logits=self.classify(hidden[:, 0]), hidden=hidden)


def test_dicts_and_outputs_with_logits() -> None:
    torch.backends.mha.set_fastpath_enabled(False)  # it would pass the norm layers by
    try:
        net = Tokens()
        batches = [{"words": torch.randint(25, (20, 7)), "labels": torch.randint(4, (20,))} for _ in range(3)]
        kept = [batch["words"].clone() for batch in batches]
        seen = []

        def other_words(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            seen.append(set(inputs))
            return {**inputs, "words": inputs["words"] + 25}

        guard = acting(ShiftGuard(net).fit(batches, other_words, views=2, steps=10), batches)
        assert seen == [{"words"}] * 6
        assert all(torch.equal(batch["words"], words) for batch, words in zip(batches, kept))
        output = guard(words=kept[0] + 25, scale=1.0)
        plain = net(kept[0] + 25)
        assert torch.equal(output.logits.argmax(1), plain.logits.argmax(1))
        assert not torch.allclose(output.logits.softmax(1), plain.logits.softmax(1))
        torch.testing.assert_close(output.hidden, plain.hidden)
        assert plain.logits.amax() != 0  # the model's own output is not written into
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_dict_of_an_image_model() -> None:
    class Wants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(pixel_values)}

    batches = [{"pixel_values": x, "labels": y} for x, y in some_batches()]
    shifts = Shifts(share=1.0)
    with pytest.raises(TypeError, match=r"images must be a tensor \(B, C, H, W\), got dict"):
        ShiftGuard(Wants()).fit(batches, shifts)
    by_key = ShiftGuard(Wants()).fit(
        batches, lambda inputs: {"pixel_values": shifts(inputs["pixel_values"])}, views=1, steps=10
    )
    assert by_key(pixel_values=batches[0]["pixel_values"])["logits"].shape == (20, 4)


@pytest.mark.parametrize("method", ["temperature", "head"])
def test_round_a_calibrated_network(method: str) -> None:
    double, x = calibrated(small_net(), method), torch.rand(20, 3, 8, 8)
    guard = fitted(double)
    with torch.no_grad():
        stages = guard.look([(x, torch.zeros(20, dtype=torch.long))]).stages
        wanted = scaled(double.eval()(x), guard.guard.scale * guard.guard(stages))
        torch.testing.assert_close(guard(x), wanted)
        assert torch.equal(guard(x).argmax(1), double.heads(x).main.argmax(1))


# ---------------------------------------------------------------------------------------- bad input


def test_models_that_cannot_be_guarded() -> None:
    with pytest.raises(
        ValueError, match=r"model must have normalisation layers .* got Sequential without any"
    ):
        ShiftGuard(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"layers must name .* such as \['1', '4', '7'\], got \['fc'\]"):
        ShiftGuard(small_net(), layers=["1", "fc"])
    with pytest.raises(ValueError, match=r"layers must name normalisation layers, .* got \[\]"):
        ShiftGuard(small_net(), layers=[])
    unused = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    unused.forward = unused[1].forward
    with pytest.raises(RuntimeError, match=r"layers must be run .* these were not: \['0'\]"):
        ShiftGuard(unused).eval()(torch.rand(2, 4))
    folded = nn.Sequential(
        nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Unflatten(0, (-1, 3)), nn.Flatten(), nn.Linear(12, 2)
    )
    with pytest.raises(
        RuntimeError, match=r"one row for each of the 5 samples, .* these do not: \['1'\]; name"
    ):
        ShiftGuard(folded).eval()(torch.rand(5, 3, 4))


def test_a_guard_round_a_guard() -> None:
    net = small_net()
    guard = ShiftGuard(net)
    said = "model must be a classifier without a ShiftGuard, got "
    for model, got in (
        (guard, "a ShiftGuard: guard what that one guards"),
        (torch.compile(guard, backend="eager"), "a ShiftGuard: guard what that one guards"),
        (nn.Sequential(nn.Identity(), guard), "Sequential with one as '1': "),
    ):
        with pytest.raises(ValueError, match=said + got):
            ShiftGuard(model)
    assert len(net[1]._forward_hooks) == 1  # what was refused left none
    ShiftGuard(guard.model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"views": 0}, "views must be at least 1, got 0"),
        ({"keep": 1.1}, r"keep must lie in 0..1, got 1.1"),
        ({"keep": math.nan}, r"keep must lie in 0..1, got nan"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_bad_settings(options: dict[str, Any], said: str) -> None:
    guard = ShiftGuard(small_net())
    with pytest.raises(ValueError, match=said):
        guard.fit(some_batches(1), noisy, **options)
    assert not torch.isfinite(guard.guard.threshold)  # as before


def test_bad_data() -> None:
    guard, ((x, y),) = ShiftGuard(small_net()), some_batches(1)
    for none in ([], iter([])):
        with pytest.raises(ValueError, match="calib_batches must hold at least one batch .* got none"):
            guard.fit(none, noisy)
    with pytest.raises(ValueError, match="start again when iterated again"):
        guard.fit(iter([(x, y)]), noisy)
    with pytest.raises(ValueError, match="labels must lie in 0..3"):
        guard.fit([(x, y + 4)], noisy)
    with pytest.raises(ValueError, match="logits must not be empty|at least one|got 0|no rows|empty"):
        guard.fit([(x[:0], y[:0])], noisy)
    with pytest.raises(ValueError, match="logits must be finite"):
        guard.fit([(x * math.nan, y)], noisy)
    with pytest.raises(TypeError, match=r"a calibration batch must be \(inputs, labels\)"):
        guard.fit([x], noisy)
    hidden = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    hidden.forward = lambda x: hidden[1](hidden[0](x).nan_to_num())
    with pytest.raises(ValueError, match="what the model's layers see must be finite"):
        ShiftGuard(hidden).fit([(torch.tensor([[1.0, 2.0, math.nan]]), torch.tensor([0]))], lambda x: x)
