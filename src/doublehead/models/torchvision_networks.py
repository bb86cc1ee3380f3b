"""torchvision's networks, with the stem that small images need, and their published weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from doublehead.optional import require

SMALL = 64  # images up to this many pixels a side get the small stem


def resnet(
    arch: str,
    n_classes: int,
    *,
    size: tuple[int, int] = (32, 32),
    in_channels: int = 3,
    weights: str | None = None,
) -> nn.Module:
    """A ResNet of torchvision; its last layer is `fc`.

    Small images meet a 3x3 convolution of stride 1 and no pooling in place of the 7x7 convolution and the pooling
    that would leave little of them. `weights` is the path of a .safetensors file or one of torchvision's names.
    Residual branches start at zero: at full scale a deep network's first epoch at lr 0.1 ends worse than guessing.
    """
    network = require("torchvision.models", extra="models").get_model(
        arch, weights=None, num_classes=n_classes, zero_init_residual=True
    )
    small = max(size) <= SMALL
    if small or in_channels != 3:
        network.conv1 = _first_convolution(in_channels, network.conv1.out_channels, small)
    if small:
        network.maxpool = nn.Identity()
    return _loaded(network, arch, weights, last="fc")


def densenet(
    arch: str,
    n_classes: int,
    *,
    size: tuple[int, int] = (32, 32),
    in_channels: int = 3,
    weights: str | None = None,
) -> nn.Module:
    """A DenseNet of torchvision, as `resnet`; its last layer is `classifier`."""
    network = require("torchvision.models", extra="models").get_model(
        arch, weights=None, num_classes=n_classes
    )
    small = max(size) <= SMALL
    if small or in_channels != 3:
        network.features.conv0 = _first_convolution(in_channels, network.features.conv0.out_channels, small)
    if small:
        network.features.pool0 = nn.Identity()
    return _loaded(network, arch, weights, last="classifier")


def _first_convolution(n_in: int, n_out: int, small: bool) -> nn.Conv2d:
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    layer = nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _loaded(network: nn.Module, arch: str, weights: str | None, last: str) -> nn.Module:
    """The network with `weights` in it; a last layer made for another number of classes starts afresh."""
    if weights is None:
        return network
    state = _read(arch, weights)
    own = network.state_dict()
    if f"{last}.weight" in state and state[f"{last}.weight"].shape != own[f"{last}.weight"].shape:
        state |= {name: own[name] for name in (f"{last}.weight", f"{last}.bias")}
    unlike = [name for name in sorted(own.keys() | state.keys()) if _shape(own, name) != _shape(state, name)]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"weights {weights!r} do not fit {arch}: {len(unlike)} of its tensors differ, the first one is {name!r} "
            f"(the network: {_shape(own, name)}, the weights: {_shape(state, name)}); "
            "weights for ImageNet need an input above 64x64 with 3 channels"
        )
    network.load_state_dict(state)
    return network


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _read(arch: str, weights: str) -> dict[str, Tensor]:
    if weights.endswith(".safetensors"):
        if not Path(weights).is_file():
            raise FileNotFoundError(f"weights must name an existing file, got {weights!r}")
        state: dict[str, Tensor] = require("safetensors.torch", extra="train").load_file(weights)
        return state
    known = require("torchvision.models", extra="models").get_model_weights(arch)
    if weights not in known.__members__:
        raise ValueError(
            f"weights must be the path of a .safetensors file or one of {list(known.__members__)} for {arch}, "
            f"got {weights!r}"
        )
    return _download(known[weights].url)


def _download(url: str) -> dict[str, Tensor]:
    """torchvision's file, its checksum compared with the one in its name, read without running any pickled code."""
    state = torch.hub.load_state_dict_from_url(url, map_location="cpu", check_hash=True, weights_only=True)
    # The oldest DenseNet files write norm.1 for norm1.
    return {re.sub(r"\.(norm|conv)\.([12])\.", r".\1\2.", name): tensor for name, tensor in state.items()}
