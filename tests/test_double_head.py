"""The method: the companion that trains heads beside a network, and the calibrated module at its end."""

import copy
import math
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from doublehead import PAPER, DoubleHead, HeadSpec, Predictions, ShiftGuard, calibrate, calibrators
from doublehead.calibrated import read
from doublehead.calibration_data import as_batches, fold_of, unpack, until_repeated
from doublehead.head_training import BURST
from doublehead.integrations.callbacks import Attachment
from doublehead.system import require
from doublehead.tasks import find_logits
from doublehead.torch_tools import AsyncFlags
from samples import refused
from tiny_networks import Formed, assert_same, small_net, some_data

pytestmark = pytest.mark.usefixtures("few_fits")
STATISTICS = HeadSpec(kind="temperature")
BOTH = HeadSpec(kind="temperature", reads=("statistics", "features"))


def noisy(images: Tensor) -> Tensor:
    """An augmentation that draws from every global generator there is."""
    return images + 0.1 * torch.randn_like(images) + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002


def train(beside: bool, epochs: int = 2, **options: Any) -> tuple[nn.Module, DoubleHead | None]:
    """A training loop that draws from every generator, with or without the companion's three lines."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    calib = DataLoader(some_data(64, 2), batch_size=16, shuffle=True)
    double = DoubleHead(net, calib, follow=optimizer, every=3, augment=noisy, **options) if beside else None
    train_batches = DataLoader(some_data(96, 1), batch_size=16, shuffle=True)
    for _ in range(epochs):
        net.train()
        for x, y in train_batches:
            x = x + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002, PLW2901
            F.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            if double is not None:
                double.step()
    return net, double


@pytest.mark.parametrize("heads", [None, PAPER, STATISTICS, [PAPER, BOTH]])
def test_the_network_is_bit_identical_with_and_without_the_companion(heads: Any) -> None:
    alone, _ = train(beside=False)
    beside, double = train(beside=True, heads=heads)
    assert_same(alone.state_dict(), beside.state_dict())
    fresh = DoubleHead(small_net(), some_data(64, 2), heads=heads)
    pairs = zip(double.bank.parameters(), fresh.bank.parameters())
    assert not any(torch.equal(a, b) for a, b in pairs if a.numel() and a.shape[-1] > 1)


def test_the_network_answers_as_before_until_the_end() -> None:
    net, double = train(beside=True)
    x = torch.randn(5, 1, 8, 8)
    want = net.eval()(x)
    model = double.finish()
    assert torch.equal(net(x), want)
    assert torch.equal(model.network(x), want)
    torch.testing.assert_close(model(x).exp().sum(1), torch.ones(5))
    torch.testing.assert_close(model.heads(x).main, want.log_softmax(1))
    double.step()  # and training may go on
    assert torch.isfinite(double.finish()(x)).all()


def test_one_step_by_hand() -> None:
    """One calibration step equals one SGD step on cross entropy of beta * logits, worked out beside it."""
    net = small_net().eval()
    x, y = some_data(16, 5).tensors
    spec = HeadSpec(beta0=1.5)
    double = DoubleHead(net, [(x, y)], heads=spec, every=1, clip=math.inf)
    reference = copy.deepcopy(double.bank.take(0))
    with torch.no_grad():
        features, main = net[:8](x), net(x)
    beta = 1.5 - 0.5 * 0.25
    loss = F.cross_entropy(beta * reference(main, features), y)
    loss.backward()
    torch.optim.SGD(reference.parameters(), 0.1, 0.9, weight_decay=5e-5, nesterov=True).step()
    assert double.step(0.25)
    torch.testing.assert_close(double.training.losses[0], loss.detach())
    torch.testing.assert_close([*double.bank.parameters()], [*reference.parameters()])
    norm = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(double.training.grad_norms[0], norm)


def test_a_head_never_learns_from_its_own_fold() -> None:
    net = small_net().eval()
    x, y = some_data(40, 5).tensors
    folds = fold_of(unpack((x, y), torch.device("cpu")))
    changed = y.clone()
    changed[folds == 2] = (y[folds == 2] + 1) % 4  # other labels in one fold
    banks = []
    for labels in (y, changed):
        double = DoubleHead(net, [(x, labels)], every=1)
        for _ in range(3):
            double.step()
        banks.append(double.bank)
    for a, b in zip(*(bank.parameters() for bank in banks)):
        assert torch.equal(a[2], b[2])  # the head that is blind to it does not notice
        assert not torch.equal(a[1], b[1])


def test_opinions_are_those_of_the_head_that_never_saw_the_sample() -> None:
    _, double = train(beside=True)
    readings = read(double.reader, double.calib_data)
    with torch.no_grad():
        every = double.bank.eval()(readings.logits, readings.features).log_softmax(-1)
    want = torch.stack([every[fold, row] for row, fold in enumerate(readings.folds.tolist())])
    assert set(readings.folds.tolist()) == set(range(5))
    torch.testing.assert_close(double.opinion(readings), want)


def test_gradients_are_clipped() -> None:
    x, y = some_data(16, 5).tensors
    double = DoubleHead(small_net().eval(), [(x, y)], heads=PAPER, every=1, clip=1e-3, weight_decay=0.0)
    before = copy.deepcopy(double.bank)
    double.step(0.0)
    moved = torch.cat([(a - b).flatten() for a, b in zip(double.bank.parameters(), before.parameters())])
    # Nesterov: 1 + 0.9
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1 * 1.9 * 1e-3), rtol=1e-3, atol=0)


def test_steps_every_kth_call_and_leaves_no_gradients() -> None:
    net = small_net()
    frozen = net[1].eval()  # a user who freezes BatchNorm
    double = DoubleHead(net, some_data(32, 2), every=4)
    has_read = [double.step(i / 12) for i in range(12)]
    assert [i + 1 for i, has in enumerate(has_read) if has] == [4, 8, 12]
    assert all(p.grad is None for p in (*net.parameters(), *double.bank.parameters()))
    assert not frozen.training
    assert all(m.training for m in net.modules() if m is not frozen)


def test_beta_runs_once_an_epoch_or_once_a_pass_over_the_calibration_data() -> None:
    def betas(n: int, **options: Any) -> list[float]:
        calib = DataLoader(some_data(64, 2), 16)  # four batches
        double = DoubleHead(small_net(), calib, heads=HeadSpec(beta0=2.0), every=1, **options)
        found = []
        for _ in range(n):
            double.step()
            found.append(round(float(double.training.beta[0]), 4))
        return found

    assert betas(6) == [2.0, 1.75, 1.5, 1.25, 2.0, 1.75]
    assert betas(4, steps=2) == [2.0, 1.5, 2.0, 1.5]


@pytest.mark.parametrize(
    ("kind", "heads"),
    [*product(("dataset", "shuffled", "transforming"), (None, BOTH)), ("several labels", None)],
)
def test_resume_is_exact(kind: str, heads: Any, tmp_path: Path) -> None:
    class Jitter(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 0.1 * torch.randn_like(x), y

    def fresh(n: int = 40) -> DoubleHead:
        torch.manual_seed(1)
        x, y = some_data(n, 2).tensors
        labels = (torch.arange(4) <= y[:, None]).float() if kind == "several labels" else y
        data = Jitter(x, y) if kind == "transforming" else TensorDataset(x, labels)
        calib = DataLoader(data, 16, shuffle=True) if kind in ("shuffled", "transforming") else data
        return DoubleHead(small_net(), calib, heads=heads, every=1, augment=noisy, seed=5, batch_size=16)

    double = fresh()
    for i in range(11):
        if i == 5:
            torch.save(double.state_dict(), tmp_path / "state.pt")
        double.step()
    again = fresh()
    torch.manual_seed(99)  # the caller's randomness must not matter
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    before = torch.get_rng_state()
    for _ in range(5, 11):
        again.step()
    assert torch.equal(before, torch.get_rng_state())
    assert_same(double.bank.state_dict(), again.bank.state_dict())
    velocities = (one.training.state_dict()["velocity"] for one in (double, again))
    assert all(torch.equal(a, b) for a, b in zip(*velocities))
    with pytest.raises(ValueError, match="must be those of the saved state, got fewer than its 2 batches"):
        fresh(16).load_state_dict(double.state_dict())


@pytest.mark.parametrize("form", ["classes", "probabilities", "several labels", "weights"])
@pytest.mark.parametrize("heads", [None, PAPER])
def test_rows_in_memory_are_read_as_batches_of_a_list_are(form: str, heads: Any, monkeypatch: Any) -> None:
    """However many batches are taken ahead; the last is smaller than the others."""
    x, y = some_data(74, 2).tensors
    others = {"probabilities": torch.rand(74, 4).softmax(1), "several labels": torch.rand(74, 4).round()}
    arrays = (x, others.get(form, y), *([torch.rand(74)] if form == "weights" else []))

    def trained(data: Any, max_ahead: int = 10**6, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr("doublehead.calibration_data.MAX_AHEAD", max_ahead)
        torch.manual_seed(3)
        double = DoubleHead(small_net(), data, heads=heads, every=1, batch_size=8, **options)
        for _ in range(13):
            assert double.step(0.5)
        return double.bank.state_dict()

    one_by_one, three_ahead = (trained(arrays, 8 * 64 * n) for n in (1, 3))
    together = trained(arrays)
    assert_same(one_by_one, together)
    assert_same(three_ahead, together)
    monkeypatch.setattr("torch.randperm", lambda n, **_: torch.arange(n))  # the list keeps its order
    batches = list(zip(*(part.split(8) for part in arrays)))
    assert_same(trained(batches, to_pair=tuple), trained(arrays))


@pytest.mark.parametrize("heads", [None, [PAPER, replace(BOTH, dropout=0.3)]])
def test_results_do_not_depend_on_the_length_of_bursts(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on where they end: another number of steps than bursts divide, and heads looked at in between."""

    def trained(burst: int, looks: bool = False) -> dict[str, Any]:
        monkeypatch.setattr("doublehead.head_training.BURST", burst)
        torch.manual_seed(3)
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        calib = DataLoader(some_data(60, 2), batch_size=16, shuffle=True)  # the last batch is smaller
        double = DoubleHead(net, calib, follow=optimizer, heads=heads, every=1, augment=noisy, steps=7)
        x, y = some_data(32, 1).tensors
        for i in range(21):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            assert double.step()
            if looks and i % 5 == 2:
                assert torch.isfinite(double.training.losses).all()
        return double.state_dict()

    states = [trained(1), trained(8), trained(8, looks=True)]
    for other in states[1:]:
        assert_same(states[0]["training"]["bank"], other["training"]["bank"])
        for a, b in zip(states[0]["training"]["velocity"], other["training"]["velocity"], strict=True):
            assert torch.equal(a, b)
        for name, value in states[0]["randomness"].items():
            assert str(value) == str(other["randomness"][name])
        assert torch.equal(states[0]["randomness"]["dropout"], other["randomness"]["dropout"])


def test_heads_are_up_to_date_wherever_they_are_looked_at() -> None:
    x, y = some_data(16, 5).tensors
    net = small_net().eval()
    features, main = net[:8](x).detach(), net(x).detach()

    def companion(n_steps: int = 3, **options: Any) -> DoubleHead:
        double = DoubleHead(net, [(x, y)], heads=PAPER, every=1, **options)
        for _ in range(n_steps):
            double.step(0.5)
        return double

    want = companion().bank.state_dict()
    assert not torch.equal(want["stacks.0.last_bias"], companion(2).bank.state_dict()["stacks.0.last_bias"])
    assert_same(companion().state_dict()["training"]["bank"], want)
    assert_same(companion().training.bank.state_dict(), want)
    head = companion().bank.take(0).eval()
    assert torch.equal(companion().answer(main, features), head(main, features))
    assert torch.equal(companion().finish()(x), head(main, features).log_softmax(1))
    assert DoubleHead(net, [(x, y)]).training.losses is None
    loaded, waiting = companion(1), companion()
    loaded.load_state_dict(waiting.state_dict())  # what waited before is not learned from
    assert_same(loaded.bank.state_dict(), want)


def test_a_batch_may_be_overwritten_once_it_is_read() -> None:
    """As by loaders with memory of their own, and by compiled networks with CUDA graphs."""
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    banks = []
    for overwrites in (False, True):
        inputs, labels = x.clone(), y.clone()
        torch.manual_seed(0)
        double = DoubleHead(nn.Linear(6, 3), [(inputs, labels)], heads=PAPER, every=1)
        for progress in (0.0, 0.5):  # the second time in memory that is there already
            assert torch.isfinite(double.bank.take(0).last_bias).all()
            double.step(progress)  # the features are the inputs themselves
        if overwrites:
            inputs.zero_()
            labels.zero_()
        banks.append(double.bank.state_dict())
    assert_same(*banks)


def test_batches_that_do_not_fit_are_found_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = some_data(8, 1).tensors
    double = DoubleHead(small_net(), [(x, y), (x, y[:7])], every=1)
    assert double.step()
    with pytest.warns(UserWarning, match=r"must be \(7, 4\) and \(7, 16\) for 7 labels, got \(8, 4\)"):
        assert not double.step()
    assert double.skipped == 1
    assert double.step()
    assert not double.step()  # the second batch again
    for limit, waiting in ((3, 2), (1, 0)):  # nothing large is kept
        monkeypatch.setattr("doublehead.head_training.MAX_WAITING", limit * 8 * (4 + 16))
        double = DoubleHead(small_net(), [(x, y)], every=1)
        for _ in range(5):
            assert double.step()
        assert len(double._training._waiting) == waiting


def test_heads_do_not_depend_on_the_default_dtype() -> None:
    """Lightning trains in half precision with another one."""

    def trained(dtype: torch.dtype) -> Mapping[str, Tensor]:
        torch.manual_seed(0)
        net, data = small_net(), some_data(64, 2)
        torch.set_default_dtype(dtype)
        try:
            double = DoubleHead(net, data, heads=[BOTH, replace(BOTH, beta0=1.5, lr=0.03)], every=1)
            for _ in range(3):
                double.step()
        finally:
            torch.set_default_dtype(torch.float32)
        assert double.skipped == 0
        return double.bank.state_dict()

    assert_same(trained(torch.float16), trained(torch.float32))


def test_the_state_of_another_process_brings_its_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def noting(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def companion(rank: int) -> DoubleHead:
        monkeypatch.setattr("doublehead.double_head.rank", lambda: rank)
        return DoubleHead(small_net(), some_data(64, 2), every=2, augment=noting, batch_size=16)

    first = companion(0)
    for _ in range(3):
        first.step()
    saved = first.state_dict()
    first.step()
    for rank in (0, 1):
        again = companion(rank)
        again.load_state_dict(saved)
        again.step()
        assert again.calls == first.calls == 4
    assert torch.equal(seen[-2], seen[-3])  # the first process itself goes on where it was
    assert not torch.equal(seen[-1], seen[-2])


def test_a_network_that_always_draws_leaves_the_callers_generators_alone_beside_arrays() -> None:
    x, y = some_data(64, 2)[:]
    net = Formed(small_net(), lambda logits: F.dropout(logits, 0.2))
    before = torch.get_rng_state()
    doubles = [DoubleHead(net, (x, y), every=1, batch_size=16, seed=seed) for seed in (0, 0, 1)]
    for _ in range(6):  # into the second pass
        for double in doubles:
            assert double.step()
    assert torch.equal(torch.get_rng_state(), before)
    orders = [double.state_dict()["randomness"]["rows"] for double in doubles]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    first, second, _ = doubles
    second.load_state_dict(first.state_dict())  # in the middle of a pass
    for _ in range(6):
        first.step()
        second.step()
    assert_same(first.bank.state_dict(), second.bank.state_dict())


def test_a_generator_that_loaders_may_share_is_left_as_it_was() -> None:
    """PyTorch's recipe for reproducible runs gives all loaders one generator."""
    net = small_net()
    draw, again = (torch.Generator().manual_seed(3) for _ in range(2))
    loaders = [DataLoader(some_data(32, 1), 8, shuffle=True, generator=one) for one in (draw, again)]
    before, everywhere = draw.get_state(), torch.get_rng_state()
    double, other = (DoubleHead(net, one, every=1) for one in loaders)
    for _ in range(6):  # into the second pass
        double.step()
    other.load_state_dict(double.state_dict())
    for _ in range(5):  # into the third
        double.step()
        other.step()
    assert_same(double.bank.state_dict(), other.bank.state_dict())
    double.finish().report(DataLoader(some_data(32, 9), 8, shuffle=True))
    assert torch.equal(draw.get_state(), before)
    assert torch.equal(torch.get_rng_state(), everywhere)


def rate(double: DoubleHead) -> float:
    return double.training.schedule.now()


def test_a_loader_with_a_state_draws_from_the_companions_generators_when_it_is_resumed() -> None:
    class Loader:
        def __iter__(self) -> Any:
            torch.randperm(3)
            return iter([some_data(8, 1)[:]] * 3)

        def __len__(self) -> int:
            return 3

        def state_dict(self) -> dict[str, Any]:
            return {"place": 1}

        def load_state_dict(self, state: Any) -> None:
            assert state == {"place": 1}

    double = DoubleHead(small_net(), Loader(), every=1)
    double.step()
    before, state = torch.get_rng_state(), double.state_dict()
    double.load_state_dict(state)
    assert torch.equal(before, torch.get_rng_state())


def test_steps_under_way_are_not_counted_in_a_state_that_is_loaded() -> None:
    x, y = some_data(8, 1)[:]
    double = DoubleHead(small_net(), [(x, y), (x * math.nan, y)], every=1)
    state = double.state_dict()
    for _ in range(2):
        double.step()
    assert double.training.losses is not None  # both steps are made, and not counted yet
    double.load_state_dict(state)
    assert double.skipped == 0


def test_the_rate_follows_the_shape_of_the_schedule() -> None:
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-5, total_steps=100)
    double = DoubleHead(net, some_data(32, 2), follow=optimizer)
    shares = []
    for _ in range(99):
        shares.append(rate(double))
        optimizer.step()
        scheduler.step()
    assert max(shares) == pytest.approx(1.0, abs=0.01)
    assert shares[0] == pytest.approx(1 / 25, rel=0.01)
    assert shares[-1] < 0.01
    assert rate(DoubleHead(net, some_data(32, 2))) == 1.0
    resumed = DoubleHead(net, some_data(32, 2), follow=optimizer)
    optimizer.param_groups[0]["lr"] = 1.0  # a peak that no scheduler announced
    assert rate(double) == 1.0
    resumed.load_state_dict(double.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    assert rate(double) == rate(resumed) == 0.25
    with pytest.raises(TypeError, match=r"follow must be the network's optimizer, got float"):
        DoubleHead(net, some_data(32, 2), follow=0.1)


def test_bad_batches_never_stop_the_users_training() -> None:
    x, y = some_data(8, 1)[:]
    broken = [
        (x, y),  # the first is checked at construction
        (x, y + 100),  # labels out of range: left out of the loss
        (torch.full_like(x, math.nan), y),
        (x[:, :, :2], y),  # an error inside the network
        (x,),
    ]
    double = DoubleHead(small_net(), broken, every=1)
    with pytest.warns(UserWarning, match="calibration step was skipped") as caught:
        for _ in range(5):
            double.step()
    assert caught[0].filename == __file__  # the user's own line
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned about once
        for _ in range(5):
            double.step()
    assert double.skipped == 6
    assert double.active
    assert all(torch.isfinite(p).all() for p in double.bank.parameters())
    with pytest.warns(UserWarning, match="4 calibration batches were left out, the first for ValueError"):
        assert double.finish().head.choice.n == 8
    refused("labels must lie in", calibrate, double.network, broken)


def test_classes_masked_with_infinity_are_noticed_while_training() -> None:
    masked = Formed(small_net(), lambda logits: logits.masked_fill(torch.arange(4) == 3, -math.inf))
    images, labels = some_data(40, 1)[:]
    double = DoubleHead(masked, (images, labels.clamp(max=2)), every=1)
    with pytest.warns(UserWarning, match="loss is not finite"):
        for _ in range(2 * BURST):
            double.step()
    assert double.skipped == BURST  # too many in a row: no more are tried
    assert not double.active


def test_processes_give_up_at_the_same_call_however_late_their_flags_arrive() -> None:
    """One that went on alone would wait for the others' gradients."""

    class Late(AsyncFlags):
        def arrived(self, wait: bool = False) -> Iterator[bool]:
            return super().arrived() if wait else iter(())

    x, y = some_data(8, 1)[:]
    ends = []
    for flags in (AsyncFlags(), Late()):
        double = DoubleHead(small_net(), [(x, y), *[(x * math.nan, y)] * 99], every=1)
        double._training._flags, double._training.is_alone = flags, False
        with pytest.warns(UserWarning, match="no longer trained"):
            for _ in range(30):
                double.step()
        ends.append(double._batches.taken)
    assert ends[0] == ends[1] < 30


def test_flags_are_awaited_on_the_stream_of_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: Any = SimpleNamespace(device=torch.device("cuda:1"), shape=(1, 1))
    here = SimpleNamespace(copy_=lambda *_, **__: None, tolist=lambda: [[True]])
    event = MagicMock()
    monkeypatch.setattr(torch, "empty", lambda *_, **__: here)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"that of {device}")
    sent = AsyncFlags()
    sent.send(flags)
    event.record.assert_called_once_with("that of cuda:1")
    assert list(sent.arrived()) == [True]


def test_a_file_that_cannot_be_read_never_stops_the_users_training() -> None:
    class Files(torch.utils.data.Dataset[Any]):
        data = some_data(60, 1)

        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> Any:
            if i == 27:
                raise OSError("cannot identify image file")
            return self.data[i]

    double = DoubleHead(small_net(), DataLoader(Files(), 10), every=1)
    with pytest.warns(UserWarning, match="calibration step was skipped: OSError: cannot identify"):
        for _ in range(6):
            double.step()
    assert double.skipped == 1
    with pytest.warns(UserWarning, match="1 calibration batches were left out, the first for OSError"):
        assert double.finish().head.choice.n == 50


def test_persistent_trouble_ends_the_heads_training_and_finish_does_without_them() -> None:
    class Turning:
        """Batches that are fine at first, and never again until they are needed at the end."""

        good = True

        def __iter__(self) -> Any:
            x, y = some_data(300, 1)[:]
            yield (x if self.good else x * math.nan), y

        def __len__(self) -> int:
            return 1

    data = Turning()
    double = DoubleHead(small_net(), data, every=1)
    data.good = False
    with pytest.warns(UserWarning, match="no longer trained"):
        for _ in range(BURST + 1):
            double.step()
    assert not double.active
    data.good = True
    model = double.finish()
    assert model.opinion is None
    assert torch.isfinite(model(torch.randn(3, 1, 8, 8))).all()


@pytest.mark.parametrize("heads", [None, PAPER, BOTH])
def test_features_that_explode_at_the_start_do_not_end_a_head(heads: Any) -> None:
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
    double = DoubleHead(net, [(x, y)], every=1, heads=heads)
    for _ in range(3):
        double.step(1.0)
    net.size = 1.0
    for _ in range(200):
        double.step(1.0)
    assert float(double.training.losses.max()) < 0.9  # guessing scores log 3 = 1.10
    assert double.skipped == 0


def test_what_is_wrong_is_said_at_construction() -> None:
    net, x = small_net(), torch.randn(4, 1, 8, 8)
    y = torch.arange(4)
    for data, message in (
        ([], "at least one batch"),
        ([(x, torch.zeros(4))], r"labels must be whole numbers, .* got torch.float32 of shape \(4,\)"),
        ([(x, "abcd")], r"labels .* must be a tensor .* got str"),
        ([x], r"must be \(inputs, labels\) or a dict"),
        ([(x, y, y)], "got tuple of 3; give to_pair="),
        ([(x, y + 1)], r"labels must lie in 0..3 .* got 1..4"),
        (iter([(x, y)]), "read again and again"),
        (3, "read again and again, got int"),
        ((x, y[:3]), "equally long, got 4 and 3"),
        (x, "pair of arrays .* got Tensor"),
        ("calib.csv", "pair of arrays .* got str"),
        ({"inputs": x, "labels": y}, "pair of arrays .* got dict"),
        (((x, x), y), "must hold the inputs in one array, got them as tuple: give a loader"),
        (({"x": x}, y), "must hold the inputs in one array, got them as dict"),
        ((x[:0], y[:0]), "at least one sample in its first batch, got none"),
        ((x, np.array(list("abcd"))), "must hold numbers, got <U1"),
        (list(zip(x, y)), r"got one of shape \(\); put single samples into batches"),
    ):
        refused(message, DoubleHead, net, data, error=(TypeError, ValueError))
    for options, message in (
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"layer": "9"}, "layer must name a module of Sequential, got '9'"),
        ({"heads": []}, "at least one HeadSpec"),
    ):
        refused(message, DoubleHead, net, (x, y), error=(TypeError, ValueError), **options)
    double = DoubleHead(net, (x, y))
    for progress in (1.5, -0.1, math.nan):
        refused(r"progress must lie in 0\.\.1, .* got ", double.step, progress)
    assert double.calls == double.skipped == 0
    with pytest.raises(TypeError, match="network must be a plain classifier, got function"):
        DoubleHead(small_net, (x, y))  # type: ignore[arg-type]
    refused(r"give its \.network", DoubleHead, calibrate(net, some_data(120, 1)), (x, y), error=TypeError)
    refused("at least one batch", calibrate, net, [])
    with pytest.raises(ValueError, match=r"outputs have shape \(4, 3, 6, 6\) .* supported are classes"):
        DoubleHead(nn.Conv2d(1, 3, 3), (x, y))
    guarded = ShiftGuard(net).fit([(x, y)] * 8)
    refused("network must be without a ShiftGuard", calibrate, guarded, (x, y))


def test_inputs_that_the_network_cannot_take_are_described() -> None:
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    for batch, got in (
        ((x.double().numpy(), y), r"RuntimeError for torch.float64 \(6, 5\): "),
        ((x[:, :4], y), r"RuntimeError for torch.float32 \(6, 4\): "),
        ([{"x": x, "labels": y}], r"TypeError for x=torch.float32 \(6, 5\): "),
        ([((x, x), y)], r"TypeError for torch.float32 \(6, 5\), torch.float32 \(6, 5\): "),
    ):
        for make in (DoubleHead, calibrate):
            with pytest.raises(
                RuntimeError, match=f"must run on the inputs of a calibration batch, got {got}"
            ):
                make(nn.Linear(5, 3), batch)
    x, y = torch.randn(300, 5), torch.arange(300) % 3
    x[[130, 140]] = torch.nan
    with pytest.raises(
        ValueError, match="finite, got nan in 2 of 128 rows of calibration batch 1, counted from 0"
    ):
        calibrate(nn.Linear(5, 3), (x, y))


def test_other_forms_of_data_and_outputs() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(pixel_values), "more": pixel_values}

    x, y = some_data(8, 1)[:]
    double = DoubleHead(Keyed(), [{"pixel_values": x, "labels": y}], every=1, augment=dict, heads=PAPER)
    assert double.step()
    model = double.finish()
    out = model(pixel_values=x)
    torch.testing.assert_close(out["logits"].exp().sum(1), torch.ones(8))
    assert out["more"] is x
    tupled = Formed(small_net(), lambda logits: (-logits, logits))
    how = {"to_pair": lambda batch: batch[:2], "logits_of": lambda output: output[1]}
    assert DoubleHead(tupled, [(x, y, "id")], every=1, **how).step()
    refused("give logits_of=", DoubleHead, tupled, (x, y), error=TypeError)
    assert DoubleHead(small_net(), (x.numpy(), y.numpy()), every=1).step()
    series = require("pandas", extra="tables").Series(y.numpy())
    assert DoubleHead(small_net(), (x, series), every=1).step()


@dataclass(frozen=True)
class Frozen:
    logits: Tensor


class Named(NamedTuple):
    logits: Tensor
    more: int = 3


@pytest.mark.parametrize("form", [Frozen, Named, lambda logits: {"out": logits, "aux": -logits}])
def test_calibrated_logits_take_the_place_of_the_networks(form: Any) -> None:
    x, y = some_data(8, 1)[:]
    logits_of = None if isinstance(form, type) else (lambda output: output["out"])
    output = DoubleHead(Formed(small_net(), form), (x, y), heads=PAPER, logits_of=logits_of).finish()(x)
    assert type(output) is (form if isinstance(form, type) else Tensor)
    torch.testing.assert_close(find_logits(output).exp().sum(1), torch.ones(8))


def test_a_stream_ends_where_it_starts_over_but_not_for_discrete_data() -> None:
    def batches(rows: Tensor, passes: int) -> list[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        order = torch.cat([torch.randperm(len(rows), generator=draw) for _ in range(passes)])
        return [(rows[some], torch.zeros(len(some), dtype=torch.int64)) for some in order.split(64)]

    draw = torch.Generator().manual_seed(1)
    read = list(until_repeated(batches(torch.randn(500, 8, generator=draw), 4)))
    assert 500 <= sum(len(y) for _, y in read) < 600
    few_values = batches(torch.randint(2, (1000, 8), generator=draw).float(), 1)  # 256 different rows
    assert len(list(until_repeated(few_values))) == len(few_values)


def test_data_on_a_gpu_are_awaited_where_the_network_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the CPU that does not block is read before it has arrived."""
    move, blocking = Tensor.to, []

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        blocking.append(not options.get("non_blocking", False))
        return move(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", to)
    x, y = some_data(8, 1)[:]
    unpack(({"x": x, "y": [x]}, y), torch.device("cpu"))
    assert blocking == [True, True, True]


def test_a_plain_loader_of_tensors_is_read_as_rows() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10))
    for loader in (DataLoader(data, 4), DataLoader(data, 4, drop_last=True)):
        rows = as_batches(loader)
        assert rows is not loader
        assert [x.tolist() for x, _ in rows] == [x.tolist() for x, _ in loader]
        assert len(rows) == len(loader)
    passes = [torch.cat([x for x, _ in as_batches(DataLoader(data, 4, shuffle=True))]) for _ in range(2)]
    assert not torch.equal(*passes)
    assert all(torch.equal(one.sort().values, torch.arange(10)) for one in passes)
    ways = {"generator": torch.Generator(), "sampler": RandomSampler(data, True), "collate_fn": list}
    for name, way in ways.items():
        loader = DataLoader(data, 4, **{name: way})
        assert as_batches(loader) is loader  # in its own way


@pytest.mark.parametrize("last", [nn.Identity(), nn.LogSoftmax(1), nn.Softmax(1)])
def test_log_probabilities_and_probabilities_are_recognised(last: nn.Module) -> None:
    """Networks of pytorch/examples return log-softmax: their loss must not be taken for that of logits."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    data = some_data(600, 1)
    model = calibrate(nn.Sequential(net, last), data)
    plain = calibrate(net, data)
    x, y = some_data(200, 9)[:]
    torch.testing.assert_close(model.heads(x).main, net(x).log_softmax(1), atol=1e-5, rtol=1e-5)
    # Logits also say how large they are, so what is fitted may differ a little.
    torch.testing.assert_close(model(x), plain(x), atol=0.05, rtol=0)
    loss = F.nll_loss(model(x), y)
    torch.testing.assert_close(F.cross_entropy(model(x), y), loss)  # the same either way


def test_probabilities_in_half_precision_are_recognised() -> None:
    x, y = some_data(200, 1)[:]
    for dtype in (torch.bfloat16, torch.float16):
        net = small_net(nn.Softmax(1)).to(dtype)
        model = calibrate(net, (x.to(dtype), y))
        assert model.reader.outputs == "probs"
        main = model.heads(x.to(dtype)).main.exp()
        torch.testing.assert_close(main, net(x.to(dtype)).float(), atol=0.01, rtol=0)


def test_the_last_layer_is_the_one_that_gives_the_logits() -> None:
    class Auxiliary(nn.Module):
        """Registers another layer after the one whose output are the logits."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.unused = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)
            self.aux = nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x).relu()
            self.aux(hidden)
            return self.score(hidden)

    class Several(nn.Module):
        """Two heads with as many outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"first": self.first(x), "second": self.second(x)}

    x, y = torch.randn(12, 6), torch.arange(12) % 3
    reader = DoubleHead(Auxiliary(), (x, y)).reader
    assert (reader.layer, reader.n_features, reader.n_classes) == ("score", 5, 3)
    for head in ("first", "second"):
        double = DoubleHead(Several(), (x, y), logits_of=lambda output, head=head: output[head])
        assert double.reader.layer == head
    alone = DoubleHead(nn.Linear(6, 3), (x, y)).reader  # the network is its last layer
    assert (alone.layer, alone.n_features) == ("", 6)


def test_token_logits_find_their_features() -> None:
    """A decoder that scores every token and keeps one: the features must come from the same token."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 3, bias=False)

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return self.score(x)[torch.arange(len(x)), at]

    x, at = torch.randn(4, 7, 6), torch.tensor([0, 6, 3, 2])
    double = DoubleHead(Decoder(), [((x, at), torch.tensor([0, 1, 2, 0]))])
    torch.testing.assert_close(read(double.reader, double.calib_data).features, x[torch.arange(4), at])

    class Options(Decoder):
        """Some of a language model's words are the options."""

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return super().forward(x, at)[:, :2]

    with pytest.raises(
        ValueError, match=r"become the 2 logits, got 'score' with outputs of shape \(4, 7, 3\)"
    ):
        DoubleHead(Options(), [((x, at), torch.tensor([0, 1, 1, 0]))], layer="score")


def test_a_network_without_a_linear_layer_has_no_features() -> None:
    means = Formed(nn.Identity(), lambda x: torch.stack([x.mean(1), x.std(1), x.amax(1)], 1))
    x, y = torch.randn(300, 6), torch.arange(300) % 3
    refused("name the last layer", DoubleHead, means, (x, y))
    assert DoubleHead(means, (x, y), heads=STATISTICS, every=1).step()
    assert calibrate(means, (x, y))(x).shape == (300, 3)


def test_bf16_autocast_and_channels_last() -> None:
    net = small_net().to(memory_format=torch.channels_last)
    x, y = some_data(16, 1)[:]
    double = DoubleHead(net, [(x.to(memory_format=torch.channels_last), y)], every=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16
        assert double.step()
        assert double.training.losses.dtype == torch.float32
        assert double.finish()(x).dtype == torch.float32


def test_compiled_networks() -> None:
    torch._dynamo.reset()
    net = small_net()
    x, y = some_data(8, 1)[:]
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x)  # compiled and run before the companion comes
    double = DoubleHead(compiled, [(x, y)], every=1, heads=PAPER)
    F.cross_entropy(compiled(x), y).backward()
    assert double.step()
    model = double.finish()
    net.eval()
    torch.testing.assert_close(model(x), model.head(net(x), net[:8](x)).log_softmax(1))
    again = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(again(x), model(x))


def test_the_network_inside_data_parallel_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies on several GPUs would each leave the features of some samples."""
    double = DoubleHead(nn.DataParallel(small_net()), some_data(16, 1), every=1)
    monkeypatch.setattr(nn.DataParallel, "forward", None)
    assert double.step()


def test_a_network_in_float64() -> None:
    x, y = some_data(120, 1)[:]
    double = DoubleHead(small_net().double(), (x.double(), y), every=1, heads=STATISTICS)
    assert double.step()
    assert double.finish()(x.double()).dtype == torch.float32


class Observer(nn.Module):
    """Keeps the largest values it sees, in evaluation mode too, and limits its outputs by them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.zeros(1))
        self.register_buffer("tops", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.top.copy_(torch.maximum(self.top, x.detach().max()))
        self.tops = torch.cat([self.tops, self.top])
        return x.clamp(max=0.9 * float(self.top))


def prepared_for_quantisation() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(net)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["observer", "quantisation"])
def test_buffers_that_change_in_evaluation_mode_are_as_without_the_companion(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), Observer(), nn.ReLU(), nn.Linear(16, 3))
    if kind == "quantisation":
        net = prepared_for_quantisation()
    x, y, alone = torch.randn(96, 8), torch.randint(3, (96,)), copy.deepcopy(net)
    double = DoubleHead(net, (3 * x, y), every=1)
    for trained in (net, alone):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        for batch, labels in zip(x.split(32), y.split(32)):
            F.cross_entropy(trained(batch), labels).backward()
            optimizer.step()
            if trained is net:
                assert double.step()
    double.finish()
    torch.testing.assert_close(net.train().state_dict(), alone.state_dict(), rtol=0, atol=0)


def test_companions_hook_the_network_only_while_they_read_it() -> None:
    net, data = small_net(), some_data(32, 2)
    seen: list[int] = []
    net[0].register_forward_hook(lambda *_: seen.append(len(net[8]._forward_hooks)))
    pair = DoubleHead(net, data, every=1), DoubleHead(net, data, heads=PAPER, every=1)
    seen.clear()
    for double in pair:
        assert not net[8]._forward_hooks
        assert double.step()
        double.close()
    assert seen == [1, 1]
    assert not any(module._forward_hooks for module in list(net.modules())[2:])


def test_companions_on_a_compiled_network_share_a_hook_and_take_it_off() -> None:
    net, data = small_net(), some_data(32, 2)
    compiled = torch.compile(net, backend="eager")
    one, other = DoubleHead(compiled, data), DoubleHead(compiled, data, heads=PAPER)
    assert one.reader.tap is other.reader.tap
    assert len(net[8]._forward_hooks) == 1
    one.close()
    assert len(net[8]._forward_hooks) == 1
    other.close()
    assert not any(module._forward_hooks for module in net.modules())
    torch.jit.script(net)


@pytest.mark.parametrize("when", ["before the companion", "after it"])
def test_networks_compiled_in_their_place(when: str) -> None:
    net, (x, y) = small_net().eval(), some_data(32, 1)[:]
    plain = DoubleHead(copy.deepcopy(net), [(x, y)], every=1, heads=PAPER)
    if when == "before the companion":
        net.compile(backend="eager")
        net(x)
    double = DoubleHead(net, [(x, y)], every=1, heads=PAPER)
    if when == "after it":
        net.compile(backend="eager")
        with torch.no_grad():
            net(x)  # in the mode of a reading, so that this code runs again
    for one in (plain, double):
        assert one.step()
        assert one.step()
    torch.testing.assert_close(double.bank.state_dict(), plain.bank.state_dict())


@pytest.mark.parametrize("heads", [None, PAPER])
def test_a_finished_model_keeps_its_hook(heads: Any) -> None:
    x, y = some_data(120, 1)[:]
    double = DoubleHead(small_net(), (x, y), heads=heads, every=1)
    double.step()
    first, second = double.finish(), double.finish()
    want = first(x)
    double.close()
    double.close()
    assert torch.equal(first(x), want)
    first.reader.close()
    assert torch.equal(second(x), want)
    second.reader.close()
    assert not double.network[8]._forward_hooks


def test_a_model_in_evaluation_mode_answers_so_while_its_network_is_trained_on() -> None:
    x, y = some_data(120, 1)[:]
    net = small_net()
    model = calibrate(net, (x, y))
    want, before = model(x), copy.deepcopy(net.state_dict())
    net.train()
    assert torch.equal(model(x), want)
    assert torch.equal(model.heads(x).calib, want)
    assert net.training
    assert net[1].training
    assert_same(before, net.state_dict())
    assert not torch.equal(model.train()(x), want)  # dropout


@pytest.mark.parametrize("form", ["model", "guard", "attached"])
def test_threads_that_run_one_model_do_not_disturb_each_other(form: str) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Pause(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 3 and not go_on.is_set():
                entered.set()
                assert go_on.wait(60)
            return x

    net = nn.Sequential(Pause(), small_net())
    model: nn.Module = calibrate(net, some_data(120, 1))
    if form == "guard":
        model = ShiftGuard(model, window=0).fit(some_data(120, 1))
    if form == "attached":
        Attachment(net, model.reader, model.calibrated)
        model = net
    x = some_data(8, 2)[:][0]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(model, x[:3])
        assert entered.wait(60)
        others = model(x)
        go_on.set()
        torch.testing.assert_close(answer.result(), others[:3])


def test_finish_refuses_unknown_options_and_takes_known_ones() -> None:
    _, double = train(beside=True)
    for said, options in (
        (r"'keeps' here; did you mean keep\?", {"keeps": 1}),
        (r"'nonsense' here$", {"nonsense": 1}),
    ):
        match = f"calibrate has no option {said}"
        refused(match, double.finish, error=TypeError, **options)
        for what in ((small_net(), some_data(32, 2)), (Predictions(torch.randn(9, 2), [1] * 9),)):
            refused(match, calibrate, *what, error=TypeError, **options)
    with pytest.raises(ZeroDivisionError):
        double.finish(to_pair=lambda batch: 1 // 0)
    assert double.finish(layer=None, outputs=None, task=None).reader.layer == double.reader.layer


def test_what_finish_refuses() -> None:
    one, several = (DoubleHead(small_net(), some_data(32, 2), heads=h) for h in (PAPER, [PAPER, BOTH]))
    refused(r"finish takes no \['views'\]", one.finish, views=["flip"], error=TypeError)
    refused(r"double\.bank\.take", several.finish)
    with pytest.raises(
        ValueError, match=r"second opinion, got one with heads of its own: .* double\.bank\.take"
    ):
        calibrate(one.network, some_data(300, 1), beside=one)


class NamedInputs(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, scale: float) -> Tensor:
        return self.net(images) * scale


@pytest.mark.parametrize("method", ["head", "temperature"])
def test_flipped_views_are_averaged(method: str) -> None:
    net = small_net()
    data = some_data(300, 1)
    model = calibrate(net, data, method=method, views=["flip"])
    x = torch.randn(5, 1, 8, 8)
    net.eval()
    with torch.no_grad():
        want = (net(x).log_softmax(1) + net(x.flip(-1)).log_softmax(1)) / 2
    torch.testing.assert_close(model.heads(x).main, want.log_softmax(1))
    torch.testing.assert_close(model(x), model(x.flip(-1)), atol=1e-4, rtol=1e-4)
    by_name = [{"images": data.tensors[0], "scale": 1.0, "labels": data.tensors[1]}]
    named = calibrate(NamedInputs(net), by_name, method=method, views=["flip"])
    torch.testing.assert_close(named.heads(images=x, scale=1.0).main, want.log_softmax(1))
    with pytest.raises(ValueError, match=r"views must be functions or among \['flip'\], got \['turn'\]"):
        calibrate(net, data, views=["turn"])


def test_before_and_after_on_held_back_and_on_test_data(tmp_path: Path) -> None:
    """Of a network that is twice too confident the temperature and what was chosen have a lower NLL and ECE."""
    x = torch.randn(1500, 6, generator=torch.Generator().manual_seed(1))
    y = (2 * x[:, :3]).softmax(1).multinomial(1, generator=torch.Generator().manual_seed(2))[:, 0]
    net = nn.Linear(6, 3)
    with torch.no_grad():
        net.weight.copy_(4 * torch.eye(3, 6))
        net.bias.zero_()
    model = calibrate(net, (x[:750], y[:750]))
    found = model.report((x[750:], y[750:]), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert list(found) == ["network", "temperature", "calibrated"]
    want = float(F.nll_loss(model(x[750:]), y[750:]))
    assert found["calibrated"].values["nll"] == pytest.approx(want, abs=1e-5)
    scores = model.head.choice.scores
    assert list(scores)[:2] == ["none", "temperature"]
    for before, after in (
        (found["network"].values, found["calibrated"].values),
        (scores["none"]._asdict(), scores[model.head.choice.chosen]._asdict()),
    ):
        assert before["nll"] > after["nll"]
        assert before["ece"] > 3 * after["ece_floor"]
        assert before["accuracy"] == after["accuracy"]
    assert all(name in str(found) for name in found)
    assert str(model.head.choice) in repr(model).replace("\n  ", "\n")


@pytest.mark.filterwarnings("default")
def test_warnings_point_at_the_users_line() -> None:
    x, y = some_data(40, 1).tensors
    net, broken = small_net(), [(x[:20], y[:20]), (x[20:], y[20:] + 100)]
    double, other = DoubleHead(net, (x, y)), DoubleHead(net, broken)
    p = Predictions(torch.randn(40, 3), torch.arange(40) % 3)
    for call, n in (
        (lambda: calibrate(net, (x, y)), 1),
        (lambda: calibrate(p), 1),
        (lambda: calibrators.make("head").fit(p), 1),
        (double.finish, 1),
        (other.finish, 2),  # and of the batch that is left out
    ):
        with pytest.warns(UserWarning) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__] * n


@pytest.mark.parametrize("form", [lambda x, y: (x, y), lambda x, y: (x.numpy(), y.numpy()), TensorDataset])
def test_arrays_that_share_memory_with_the_training_data_are_found(form: Any) -> None:
    x, y = torch.randn(400, 3), torch.randint(2, (400,))
    network = nn.Linear(3, 2)
    disjoint = form(x[:200], y[:200]), form(x[200:], y[200:])
    calibrate(network, disjoint[0], train_data=disjoint[1])
    for rows, shared in ((slice(0, 200), 200), (slice(150, 350), 50), (slice(1, None, 2), 100)):
        calib = form(x[rows], y[rows])
        with pytest.raises(ValueError, match=f"at least {shared} of 200 calibration samples are in both"):
            calibrate(network, calib, train_data=form(x[:200], y[:200]))


def test_arrays_that_cannot_be_written_are_not_taken_for_each_other() -> None:
    x, y = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32), np.arange(400) % 2
    x.flags.writeable = False
    network = nn.Linear(3, 2)
    calibrate(network, (x[:200], y[:200]), train_data=(x[200:], y[200:]))
    with pytest.raises(ValueError, match="at least 200 of 200"):
        calibrate(network, (x[:200], y[:200]), train_data=(x, y))
