"""Train a classifier on arrays in memory, stop early on the calibration part, and give it a calibration head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead.double_head import Alternation, Annealing, DoubleHead
from doublehead.head_inputs import Standardise
from doublehead.integrations.fit_head import fit_head
from doublehead.plumbing import evaluating

Make = Callable[[int, int], nn.Module]  # (n_features, n_classes) -> network
ROWS = 256  # predicted together: always this many, so that a row's answer does not hang on its neighbours


@dataclass(frozen=True)
class Training:
    """How to train a network on arrays."""

    calibrate: Literal["after", "beside"] = "after"
    epochs: int = 200
    patience: int = 10
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 1e-4
    every: int = 10
    beta0: float = 1.2
    seed: int = 0


def mlp(hidden: Sequence[int], inputs: Tensor) -> Make:
    """Layers with ReLU between, on features brought to mean 0 and deviation 1 by the moments of `inputs` (N, F)."""

    def make(n_features: int, n_classes: int) -> nn.Module:
        scale = Standardise(n_features).eval()
        scale.mean.copy_(inputs.mean(0))
        scale.square.copy_(inputs.square().mean(0))
        layers: list[nn.Module] = [_Fixed(scale)]
        for size in hidden:
            layers += [nn.Linear(n_features, size), nn.ReLU()]
            n_features = size
        return nn.Sequential(*layers, nn.Linear(n_features, n_classes))

    return make


class _Fixed(nn.Module):
    """A module that stays in evaluation mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def train(self, mode: bool = True) -> _Fixed:
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.inner(inputs)
        return out


def train(net: nn.Module, data: TensorDataset, calib: TensorDataset, how: Training) -> tuple[DoubleHead, int]:
    """The trained network with its head, and how many epochs it took. Call it with the random seed set.

    The network is kept as it was after the epoch with the lowest NLL on the calibration part.
    """
    batch_size = min(how.batch_size, len(data))
    batches = DataLoader(
        data, batch_size, shuffle=True, drop_last=len(data) % batch_size == 1
    )  # for BatchNorm
    calib_batches = DataLoader(calib, min(128, len(calib)), shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), how.lr, weight_decay=how.weight_decay)
    model, alternation = None, None
    if how.calibrate == "beside":
        model = DoubleHead(
            net, kind="temperature", reads=("statistics", "features"), hidden=32, seed=how.seed
        )
        annealing = Annealing(how.beta0)
        alternation = Alternation(
            model, calib_batches, every=how.every, annealing=annealing, lr=0.03, seed=how.seed
        )
    whole = model or net
    best, kept, best_epoch, epoch = float("inf"), whole.state_dict(), 0, 0
    while epoch < how.epochs and epoch - best_epoch < how.patience:
        _one_epoch(net, batches, optimizer, alternation)
        epoch += 1
        now = _nll(net, calib)
        if now < best:
            best, kept, best_epoch = now, copy.deepcopy(whole.state_dict()), epoch
    whole.load_state_dict(kept)
    model = model or fit_head(net, DataLoader(calib, len(calib)), seed=how.seed)
    return model.eval(), epoch


def _one_epoch(
    net: nn.Module,
    batches: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    alternation: Alternation | None,
) -> None:
    net.train()
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if alternation is not None:
            alternation.step(step / len(batches))


@torch.no_grad()
def _nll(net: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with evaluating(net):
        return float(F.cross_entropy(net(x), y))


@torch.no_grad()
def predict_probs(model: DoubleHead, inputs: Tensor) -> Tensor:
    """(N, K) calibrated probabilities in float64."""
    parts = []
    for rows in inputs.split(ROWS):
        padded = torch.cat([rows, rows[:1].expand(ROWS - len(rows), *rows.shape[1:])])
        parts.append(model(padded)[: len(rows)].double().softmax(1).cpu())
    return torch.cat(parts)
