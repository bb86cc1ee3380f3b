"""The method in two real processes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from doublehead import Alternation, DoubleHead
from processes import in_two_processes


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def data(seed: int, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return x, x[:, :3].argmax(1)


def work(rank: int, folder: Path) -> None:
    double = DoubleHead(
        net(), reads=("features", "statistics"), seed=rank
    )  # ranks start different on purpose
    model = DistributedDataParallel(double)  # strict about unused parameters
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data(2)
    alternation = Alternation(model, [(x[rank::2], y[rank::2])], every=2, lr=0.1)
    for step in range(6):
        x, y = data(10 + step)
        F.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        alternation.step(step / 6)
    torch.save(double.state_dict(), folder / f"{rank}.pt")


def test_two_processes_share_one_head(tmp_path: Path) -> None:
    in_two_processes(work, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, value in first.items():
        if not name.startswith("model.1."):  # BatchNorm's running moments are each process's own
            torch.testing.assert_close(value, second[name], rtol=0, atol=0, msg=name)
    fresh = DoubleHead(net(), reads=("features", "statistics"))
    assert not torch.equal(first["head.first.weight"], fresh.head.first.weight)


def test_two_processes_step_like_one_with_both_halves(tmp_path: Path) -> None:
    in_two_processes(half_the_work, tmp_path)
    together = torch.load(tmp_path / "0.pt", weights_only=True)
    model = DoubleHead(net().eval(), kind="mlp")
    alternation = Alternation(model, [data(2)], every=1, lr=0.1)
    for _ in range(3):
        alternation.step(0.5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(together[name], value, msg=name)


def half_the_work(rank: int, folder: Path) -> None:
    model = DoubleHead(net().eval(), kind="mlp")
    x, y = data(2)
    alternation = Alternation(model, [(x[rank::2], y[rank::2])], every=1, lr=0.1)
    for _ in range(3):
        alternation.step(0.5)
    torch.save(model.state_dict(), folder / f"{rank}.pt")
