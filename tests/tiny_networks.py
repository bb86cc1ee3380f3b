"""Networks small enough for tests, named as `tiny_networks:mlp` by commands that run in this folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from doublehead.system import require


def mlp(n_classes: int) -> nn.Module:
    """Without BatchNorm and dropout: the same in one process and in two."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, n_classes))


def dropout_mlp(n_classes: int) -> nn.Module:
    """With everything that has a state: BatchNorm's averages and dropout's random numbers."""
    body = nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)
    return nn.Sequential(*body, nn.Linear(32, n_classes))


def norm_mlp(n_classes: int) -> nn.Module:
    """With a layer for guards to read, and the same in one process and in two."""
    body = nn.Flatten(), nn.Linear(784, 32), nn.LayerNorm(32), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(32, n_classes))


def small_net(*last: nn.Module) -> nn.Module:
    """Of images of 8 x 8, with BatchNorm and dropout, so that both would show if they were touched; four classes."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4), *last,
    )  # fmt: skip


class Formed(nn.Module):
    """A network in whose output `form` puts the logits."""

    def __init__(self, network: nn.Module, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.network, self.form = network, form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.network(x))


def some_data(n: int, seed: int) -> TensorDataset:
    """Images and labels for `small_net`."""
    images = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(images, images.mean((1, 2, 3)).mul(8).add(2).long().clamp(0, 3))


def tiny_bert(folder: Path) -> nn.Module:
    """A BERT of 120 rows, 64 features, two layers and texts of 32 pieces, saved in the folder."""
    import pytest  # not at the top: commands without it read this file

    pytest.importorskip("transformers")
    transformers = require("transformers", "")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
        max_position_embeddings=32, layer_norm_eps=1e-12,
    )  # fmt: skip
    network: nn.Module = transformers.BertModel(config).eval()
    for name, parameter in network.named_parameters():
        if "LayerNorm" not in name:
            nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    return network


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """That two state dicts are bit-identical."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
