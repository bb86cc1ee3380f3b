"""Calibrated networks of every kind, for tests of what is saved and exported."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead import PAPER, Calibrated, DoubleHead, HeadSpec, ShiftGuard, calibrate

N_CLASSES = 5


def network() -> nn.Sequential:
    body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(144, N_CLASSES))


class Odd(nn.Module):
    """A network without a last layer, hence without features."""

    def forward(self, images: Tensor) -> Tensor:
        return 3 * images.flatten(1)[:, :N_CLASSES]


@cache
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(600, 1, 8, 8, generator=generator)
    logits = 2 * images.flatten(1)[:, :N_CLASSES]
    return images, logits.softmax(1).multinomial(1, generator=generator)[:, 0]


KINDS = (
    "temperature", "matrix", "head", "no features", "opinion", "paper", "temperature head", "flip", "guard",
)  # fmt: skip


def make(kind: str) -> tuple[Any, nn.Module]:
    """A model of this kind, and a fresh network of the same architecture."""
    return copy.deepcopy(_made(kind)), Odd() if kind == "no features" else network()


@cache
def _made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "no features":
        return calibrate(Odd(), data())
    trained = network()
    optimizer = torch.optim.Adam(trained.parameters(), 0.01)
    both = HeadSpec(kind="temperature", reads=("statistics", "features"))
    heads = {"paper": PAPER, "temperature head": both}.get(kind)
    double = DoubleHead(trained, data(), follow=optimizer, heads=heads, every=1)
    for rows in torch.arange(600).split(200):
        optimizer.zero_grad()
        F.cross_entropy(trained(data()[0][rows]), data()[1][rows]).backward()
        optimizer.step()
        double.step()
    if kind in ("paper", "temperature head"):
        return double.finish()
    if kind == "opinion":
        return with_stages(double.finish())
    method = kind if kind in ("temperature", "matrix") else "head"
    model = calibrate(trained, data(), method=method, views=["flip"] if kind == "flip" else [])
    if kind in ("head", "flip"):
        with_stages(model)
    return guarded(model) if kind == "guard" else model


def with_stages(model: Calibrated, stages: Sequence[bool] = (True,) * 6) -> Calibrated:
    """The model with these stages of its head in use, none of them without effect."""
    state, generator = model.head.state_dict(), torch.Generator().manual_seed(1)
    for name, scale in (("weight_", 0.1), ("bias_", 0.3), ("slope_", 0.1), ("curve_", 0.1), ("pool_", 0.3)):
        state[name] = state[name] + scale * torch.rand(state[name].shape, generator=generator)
    model.head.load_state_dict({**state, "temperature_": torch.tensor(1.7), "stages_": torch.tensor(stages)})
    return model


def guarded(model: nn.Module) -> ShiftGuard:
    """A guard round a model that acts on all data, differently: one fitted to random pixels would not act."""
    layer = "network.1" if isinstance(model, Calibrated) else "1"
    guard = ShiftGuard(model, layers=[layer], window=0)
    guard.fit([data()], lambda x: x + torch.randn_like(x), views=1)
    generator = torch.Generator().manual_seed(0)
    for name, bias in (("single", -1.5), ("posterior", 0.5)):
        weights = 0.1 * torch.randn(len(getattr(guard.guard, name)), generator=generator)
        weights[-1] = bias
        setattr(guard.guard, name, weights)
    return guard
