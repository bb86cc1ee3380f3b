"""The networks of the paper, built by name: input -> features -> one last linear layer -> logits."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from doublehead.models.images import SmallCNN, WideResNet, from_torchvision
from doublehead.models.text import GlobalPoolingCNN, MiniLM, TextCNN, TreeLSTM
from doublehead.system import did_you_mean, require

__all__ = [
    "MODELS",
    "GlobalPoolingCNN",
    "MiniLM",
    "Network",
    "SmallCNN",
    "TextCNN",
    "TreeLSTM",
    "WideResNet",
    "build",
]


@dataclass(frozen=True)
class Network:
    """One row of the table: how a network is made, what it reads and the name of its last linear layer."""

    make: Callable[..., nn.Module]
    reads: Literal["images", "words", "trees", "word pieces"]
    classifier: str  # the attribute with the last nn.Linear
    input: tuple[int, int, int] | None = None  # default (C, H, W) of an image; None for text

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options of `build` for this network, besides n_classes and input."""
        given = ("n_classes", "size", "in_channels")
        return tuple(name for name in inspect.signature(self.make).parameters if name not in given)


def _torchvision(arch: str, classifier: str) -> Network:
    return Network(partial(from_torchvision, arch), "images", classifier, (3, 32, 32))


MODELS: dict[str, Network] = {
    **{arch: _torchvision(arch, "fc") for arch in ("resnet18", "resnet50", "resnet101", "resnet152")},
    "densenet121": _torchvision("densenet121", "classifier"),
    "wide_resnet28_10": Network(WideResNet, "images", "classifier", (3, 32, 32)),
    "small_cnn": Network(SmallCNN, "images", "classifier", (1, 28, 28)),
    "textcnn": Network(TextCNN, "words", "classifier"),
    "gp_cnn": Network(GlobalPoolingCNN, "words", "classifier"),
    "tree_lstm": Network(TreeLSTM, "trees", "classifier"),
    "minilm": Network(MiniLM, "word pieces", "classifier"),
}


def build(
    name: str, n_classes: int, *, input: tuple[int, int, int] | None = None, **options: Any
) -> nn.Module:
    """Make the network `name` with fresh weights and `n_classes` outputs.

    `name` is one of `MODELS`, `timm/<name>` for any timm network, or `package.module:factory` for any importable
    function that returns a network. `input` is the shape (C, H, W) of an image; ResNets and DenseNets get a stem for
    small images up to 64 pixels a side. Text networks take no `input`. `MODELS[name]`
    lists the `options` of a network.

    >>> build("wide_resnet28_10", 100, depth=10, width=1).classifier
    Linear(in_features=64, out_features=100, bias=True)
    """
    if isinstance(n_classes, bool) or not isinstance(n_classes, int) or n_classes < 2:
        raise ValueError(f"n_classes must be an integer >= 2, got {n_classes!r}")
    if name.startswith("timm/"):
        return _from_timm(name.removeprefix("timm/"), n_classes, input, options)
    if ":" in name:
        return _imported(name, n_classes, input, options)
    if name not in MODELS:
        raise ValueError(
            f"network must be one of {', '.join(MODELS)}, timm/<name> or package.module:factory, "
            f"got {name!r}{did_you_mean(name, MODELS)}"
        )
    network = MODELS[name]
    if network.input is None:
        if input is not None:
            raise ValueError(
                f"input must be None for {name}, which reads {network.reads} and not images, got {input!r}"
            )
        return network.make(n_classes=n_classes, **options)
    options["in_channels"], height, width = input or network.input
    if "size" in inspect.signature(network.make).parameters:
        options["size"] = (height, width)
    return network.make(n_classes=n_classes, **options)


def _from_timm(name: str, n_classes: int, input: Any, options: dict[str, Any]) -> nn.Module:
    """A timm network; `input` sets its channels, its own options (such as img_size) set the size."""
    timm = require("timm", extra="models")
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"timm has no network {name!r}{did_you_mean(name, timm.list_models())}")
    channels = {} if input is None else {"in_chans": input[0]}
    network: nn.Module = timm.create_model(name, num_classes=n_classes, **{**channels, **options})
    return network


def _imported(name: str, n_classes: int, input: Any, options: dict[str, Any]) -> nn.Module:
    """Call an importable function with n_classes or num_classes, and `input` if it has such a parameter."""
    if name.startswith(("timm.", "torchvision.")):
        require(name.partition(".")[0], extra="models")
    try:
        factory = pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError) as error:
        module = name.partition(":")[0]
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module needs
        raise ValueError(f"cannot import network {name!r}: {error}") from error
    parameters = inspect.signature(factory).parameters
    # As torchvision's functions do.
    passes_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    classes = "n_classes" if "n_classes" in parameters else "num_classes"
    if classes not in parameters and not passes_on:
        raise TypeError(
            f"{name!r} must take the number of classes as n_classes or num_classes, got {tuple(parameters)}"
        )
    if input is not None and "input" in parameters:
        options["input"] = input
    network = factory(**{classes: n_classes}, **options)
    if not isinstance(network, nn.Module):
        raise TypeError(f"{name!r} must return an nn.Module, got {type(network).__name__}")
    return network
