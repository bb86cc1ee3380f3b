"""The method in two real processes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from doublehead import PAPER, DoubleHead
from processes import in_two_processes


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def data(seed: int, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return x, x[:, :3].argmax(1)


def work(rank: int, folder: Path) -> None:
    inner = net()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data(2, 400)
    double = DoubleHead(model, [(x[rank::2], y[rank::2])], follow=optimizer, every=2)
    for step in range(6):
        x, y = data(10 + step)
        F.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        double.step()
    model.eval()
    calibrated = double.finish()
    state = {"bank": double.bank.state_dict(), "head": calibrated.head.state_dict()}
    torch.save(state, folder / f"{rank}.pt")


def test_two_processes_share_one_head_and_one_calibration(tmp_path: Path) -> None:
    in_two_processes(work, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for part, values in first.items():
        for name, value in values.items():
            torch.testing.assert_close(value, second[part][name], rtol=0, atol=0, msg=name)
    fresh = DoubleHead(net(), data(2))
    assert not torch.equal(first["bank"]["stacks.0.first_weight"], fresh.bank.stacks[0].first_weight)


def test_two_processes_step_like_one_with_both_halves(tmp_path: Path) -> None:
    in_two_processes(half_the_work, tmp_path)
    together = torch.load(tmp_path / "0.pt", weights_only=True)
    double = DoubleHead(net().eval(), [data(2)], every=1, heads=PAPER)
    for _ in range(3):
        double.step(0.5)
    for name, value in double.bank.state_dict().items():
        torch.testing.assert_close(together[name], value, msg=name)


def half_the_work(rank: int, folder: Path) -> None:
    x, y = data(2)
    double = DoubleHead(net().eval(), [(x[rank::2], y[rank::2])], every=1, heads=PAPER)
    for _ in range(3):
        double.step(0.5)
    torch.save(double.bank.state_dict(), folder / f"{rank}.pt")
