"""The method in two real processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from doublehead import PAPER, DoubleHead, calibrate, load, torch_tools
from processes import in_two_processes
from tiny_networks import assert_same


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def data(seed: int, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return x, x[:, :3].argmax(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have done everything below: starting them takes longer than what they do."""
    folder = tmp_path_factory.mktemp("two")
    in_two_processes(everything, folder)
    return folder


def everything(rank: int, folder: Path) -> None:
    for work in (train, half_the_work, untouched, sharded, several_labels, processes_of_all_kinds):
        work(rank, folder)
        (folder / f"{work.__name__}-{rank}").touch()


def six_steps(rank: int, model: nn.Module, optimizer: Any, double: DoubleHead | None) -> None:
    """With this process's half of each batch."""
    for step in range(6):
        x, y = data(10 + step)
        F.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if double is not None:
            double.step()


def train(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data(2, 400)
    double = DoubleHead(model, [(x[rank::2], y[rank::2])], follow=optimizer, every=2)
    six_steps(rank, model, optimizer, double)
    model.eval()
    calibrated = double.finish()
    state = {"bank": double.bank.state_dict(), "head": calibrated.head.state_dict()}
    torch.save(state, folder / f"train-{rank}.pt")


def test_two_processes_share_one_head_and_one_calibration(folder: Path) -> None:
    first, second = (torch.load(folder / f"train-{rank}.pt", weights_only=True) for rank in range(2))
    for part, values in first.items():
        assert_same(values, second[part])
    fresh = DoubleHead(net(), data(2))
    assert not torch.equal(first["bank"]["stacks.0.first_weight"], fresh.bank.stacks[0].first_weight)


def test_two_processes_step_like_one_with_both_halves(folder: Path) -> None:
    together = torch.load(folder / "half-0.pt", weights_only=True)
    double = DoubleHead(net().eval(), [data(2)], every=1, heads=PAPER)
    for _ in range(3):
        double.step(0.5)
    torch.testing.assert_close(together, double.bank.state_dict())


def half_the_work(rank: int, folder: Path) -> None:
    x, y = data(2)
    double = DoubleHead(net().eval(), [(x[rank::2], y[rank::2])], every=1, heads=PAPER)
    for _ in range(3):
        double.step(0.5)
    torch.save(double.bank.state_dict(), folder / f"half-{rank}.pt")


def untouched(rank: int, folder: Path) -> None:
    """BatchNorm's averages too: those of a process that has seen other batches than the first."""
    states = []
    for beside in (False, True):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        double = DoubleHead(model, data(2, 400), follow=optimizer, every=2) if beside else None
        six_steps(rank, model, optimizer, double)
        states.append(model.module.state_dict())
    assert_same(*states)


def calib_loader(rank: int, n: int) -> DataLoader[Any]:
    data_set = TensorDataset(*data(5, n))
    return DataLoader(data_set, 32, sampler=DistributedSampler(data_set, 2, rank, shuffle=False))


def processes_of_all_kinds(rank: int, folder: Path) -> None:
    """Shares of a DistributedSampler, one process alone, and one that waits for another in vain."""
    network = net().eval()
    together = calibrate(network, calib_loader(rank, 401))  # an odd number: one sample is dealt out twice
    whole = calibrate(network, data(5, 401), alone=True)  # works in one process or in all
    torch.testing.assert_close(together.head.temperature_, whole.head.temperature_, rtol=1e-4, atol=0)
    assert together.head.choice.n == 401
    if rank == 0:
        torch_tools.WARN_WAIT, torch_tools.MAX_WAIT = 0.1, 0.3
        assert calibrate(network, data(5, 401), alone=True).head.choice.n == 401
        refused = pytest.raises(RuntimeError, match="called by all 2 processes")
        with refused, pytest.warns(UserWarning, match=r"all 2 processes, got no call from \[1\]"):
            calibrate(network, data(5, 401))
        with pytest.raises(RuntimeError, match=r"DistributedSampler.*called by all 2 processes"):
            together.report(calib_loader(rank, 401))


def sharded(rank: int, folder: Path) -> None:
    """FSDP2: the same network with and without the companion, and one file with all weights."""
    weights = []
    for beside in (False, True):
        network = net()
        for layer in (network[0], network[3], network):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        double = DoubleHead(network, data(2, 400), follow=optimizer, every=2) if beside else None
        six_steps(rank, network, optimizer, double)
        weights.append([value.full_tensor() for value in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))
    assert double.skipped == 0
    model = double.finish()
    model.save(folder / str(rank))  # all processes: the weights are put together
    again = load(folder / str(rank), net())
    x, _ = data(3)
    torch.testing.assert_close(again(x), model(x))
    many = nn.Linear(8, 40)  # too many classes for means of each: the last layer gives an opinion
    fully_shard(many, mesh=init_device_mesh("cpu", (2,)))
    assert calibrate(many, data(2, 400)).head.last_layer_.shape == (40, 8)


def several_labels(rank: int, folder: Path) -> None:
    """Both processes learn the same heads and end with one calibration, fitted to the samples of both."""
    x, _ = data(5, 401)
    data_set = TensorDataset(x, (x[:, :3] + x[:, 3:6] > 0).float())
    sampler = DistributedSampler(data_set, 2, rank, shuffle=False)
    double = DoubleHead(net().eval(), DataLoader(data_set, 32, sampler=sampler), every=1)
    for _ in range(6):
        double.step()
    model = double.finish()
    assert model.head.shared.choice.n == 3 * 401
    assert model.opinion is not None
    first, second = torch_tools.from_every_process((model.state_dict(), double.bank.state_dict()))
    for mine, theirs in zip(first, second):
        assert_same(mine, theirs)


@pytest.mark.parametrize("work", [untouched, sharded, several_labels, processes_of_all_kinds])
def test_what_is_asserted_in_the_processes_holds(work: Any, folder: Path) -> None:
    assert all((folder / f"{work.__name__}-{rank}").exists() for rank in range(2))
