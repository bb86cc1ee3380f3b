"""Train a classifier on arrays in memory, stop early on the calibration part, and calibrate it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead.calibrate import calibrate
from doublehead.calibration_head import Standardise
from doublehead.double_head import Calibrated, DoubleHead
from doublehead.tasks import class_scores, recognise_task
from doublehead.torch_tools import evaluating

Make = Callable[[int, int], nn.Module]  # (n_features, n_classes) -> network
ROWS = 256  # predicted together: always this many, so that a row's answer does not depend on its neighbours


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
    seed: int = 0


def mlp(hidden: Sequence[int], inputs: Tensor) -> Make:
    """Layers with ReLU between, on features brought to mean 0 and deviation 1 by the moments of `inputs` (N, F)."""

    def make(n_features: int, n_classes: int) -> nn.Module:
        layers: list[nn.Module] = [Standardise(n_features)]
        layers[0].set_moments(inputs)  # type: ignore[operator]
        for size in hidden:
            layers += [nn.Linear(n_features, size), nn.ReLU()]
            n_features = size
        return nn.Sequential(*layers, nn.Linear(n_features, n_classes))

    return make


def train(net: nn.Module, data: TensorDataset, calib: TensorDataset, how: Training) -> tuple[Calibrated, int]:
    """The trained and calibrated network, and how many epochs it took. Call it with the random seed set.

    Both parts hold inputs, labels and weights. The weights count in the network's loss, on which training stops early,
    and not in the calibration. The network is kept as it was after the epoch with the lowest loss on `calib`.
    """
    batch_size, calib_data = min(how.batch_size, len(data)), calib.tensors[:2]
    last_alone = len(data) % batch_size == 1  # which BatchNorm refuses
    batches = DataLoader(data, batch_size, shuffle=True, drop_last=last_alone)
    optimizer = torch.optim.Adam(net.parameters(), how.lr, weight_decay=how.weight_decay)
    double = None
    if how.calibrate == "beside":
        options = {"every": how.every, "steps": len(batches), "seed": how.seed}
        double = DoubleHead(net, calib_data, follow=optimizer, **options)  # type: ignore[arg-type]
    whole = nn.ModuleList([net] if double is None else [net, double.bank])
    best, kept, best_epoch, epoch = float("inf"), whole.state_dict(), 0, 0
    while epoch < how.epochs and epoch - best_epoch < how.patience:
        _one_epoch(net, batches, optimizer, double)
        epoch += 1
        now = _held_back_loss(net, calib)
        if now < best:
            best, kept, best_epoch = now, copy.deepcopy(whole.state_dict()), epoch
    whole.load_state_dict(kept)
    if double is None:
        return calibrate(net, calib_data, seed=how.seed), epoch
    return double.finish(seed=how.seed), epoch


def _one_epoch(
    net: nn.Module,
    batches: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    double: DoubleHead | None,
) -> None:
    net.train()
    for x, y, weights in batches:
        optimizer.zero_grad()
        _loss(net(x), y, weights).backward()
        optimizer.step()
        if double is not None:
            double.step()


def _loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the cross entropy; 0 for a batch without any weight."""
    scores = class_scores(logits, recognise_task(logits, labels))  # one logit is read as two classes
    losses = F.cross_entropy(scores, labels, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


@torch.no_grad()
def _held_back_loss(net: nn.Module, data: TensorDataset) -> float:
    x, y, weights = data.tensors
    with evaluating(net):
        return float(_loss(net(x), y, weights))


@torch.no_grad()
def log_probs(model: Calibrated, inputs: Tensor) -> Tensor:
    """(N, K) calibrated log-probabilities in float64."""
    parts = []
    for rows in inputs.split(ROWS):
        padded = torch.cat([rows, rows[:1].expand(ROWS - len(rows), *rows.shape[1:])])
        parts.append(model.heads(padded).calib[: len(rows)].double().log_softmax(1).cpu())
    return torch.cat(parts)
