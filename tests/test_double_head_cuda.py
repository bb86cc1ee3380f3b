"""On a GPU: the network is bit-identical with and without the companion, and the heads agree with those of the CPU."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import PAPER, DoubleHead, HeadSpec, ShiftGuard, calibrate
from tiny_networks import assert_same

F = torch.nn.functional
CPU, GPU = torch.device("cpu"), torch.device("cuda")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = False, False, True
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before


def some(n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=draw)
    return torch.randn(n, 3, 8, 8, generator=draw) + 0.1 * (y[:, None, None, None] - 2), y


def batches(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    x, y = some(n, seed)
    return list(zip(x.split(64), y.split(64)))


def small_net() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 5))


def steps(
    run: nn.Module, optimizer: Any, double: DoubleHead | None, device: torch.device, cast: Any, scaled: bool
) -> None:
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    for x, y in batches(960, 3) * 3:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, cast, enabled=cast is not None):
            loss = F.cross_entropy(run(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if double is not None:
            with torch.autocast(device.type, cast, enabled=cast is not None):
                double.step()


def trained(
    device: torch.device = GPU,
    *,
    beside: bool = True,
    calib: Any = None,
    compiled: bool = False,
    cast: Any = None,
    scaled: bool = False,
    **options: Any,
) -> tuple[nn.Module, Any]:
    net = small_net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run: Any = torch.compile(net, mode="reduce-overhead") if compiled else net
    calib = batches(640, 2) if calib is None else calib
    double = DoubleHead(run, calib, follow=optimizer, every=3, **options) if beside else None
    steps(run, optimizer, double, device, cast, scaled)
    assert double is None or double.skipped == 0
    return net, double


def heads(double: DoubleHead) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in double.bank.state_dict().items()}


def test_the_network_is_bit_identical_and_bursts_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone, _), (beside, double) = trained(beside=False), trained()
    assert_same(alone.state_dict(), beside.state_dict())
    monkeypatch.setattr("doublehead.head_training.BURST", 7)
    assert_same(heads(trained()[1]), heads(double))


@pytest.mark.parametrize("spec", [PAPER, HeadSpec(kind="temperature", reads=("statistics", "features"))])
def test_heads_agree_with_those_of_the_cpu(spec: HeadSpec) -> None:
    here, there = (heads(trained(device, heads=spec)[1]) for device in (CPU, GPU))
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, atol=2e-3, rtol=2e-2, msg=name)


def forms() -> Iterator[Any]:
    x, y = some(640, 2)
    rows = TensorDataset(x, y)
    yield pytest.param({"calib": (x, y)}, id="arrays")
    yield pytest.param({"calib": DataLoader(rows, 64, shuffle=True, pin_memory=True)}, id="pinned")
    yield pytest.param({"cast": torch.bfloat16}, id="bfloat16")
    yield pytest.param({"cast": torch.float16, "scaled": True}, id="float16")
    yield pytest.param({"compiled": True}, id="CUDA graphs")


@pytest.mark.parametrize("how", list(forms()))
def test_what_is_finished_answers_with_probabilities(how: dict[str, Any]) -> None:
    net, double = trained(**how)
    model, (x, y) = double.finish(), some(500, 9)
    answers = model(x.to(GPU)).detach().cpu()
    torch.testing.assert_close(answers.exp().sum(1), torch.ones(500))
    assert F.nll_loss(answers, y) < F.cross_entropy(net.eval()(x.to(GPU)).detach().cpu(), y)


def test_calibrations_agree_with_those_of_the_cpu() -> None:
    net, _ = trained(beside=False)
    x = some(500, 7)[0]
    here, there = (calibrate(deepcopy(net).to(device), batches(1000, 2)) for device in (CPU, GPU))
    torch.testing.assert_close(there(x.to(GPU)).exp().cpu(), here(x).exp(), atol=2e-3, rtol=0)
    here, there = (
        ShiftGuard(deepcopy(net).to(device)).fit(batches(1280, 2), lambda images: 3 * images)
        for device in (CPU, GPU)
    )
    torch.testing.assert_close(there(2 * x.to(GPU)).cpu(), here(2 * x), atol=1e-2, rtol=1e-2)
