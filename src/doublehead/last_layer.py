"""Find a classifier's last linear layer, tap the features that go into it, and tell its logits from its output."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Output = TypeVar("Output")


def find_last_layer(
    model: nn.Module, name: str | None = None, n_classes: int | None = None
) -> tuple[str, nn.Module]:
    """The layer whose input are the features and whose output are the logits, with its name in `model`.

    In this order: the layer called `name`; timm's `get_classifier()`; the last registered nn.Linear (or 1x1
    convolution) with `n_classes` outputs, or simply the last nn.Linear where `n_classes` is not known.

    >>> find_last_layer(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)))
    ('2', Linear(in_features=4, out_features=3, bias=True))
    """
    model = uncompiled(model)
    modules = dict(model.named_modules())
    if n_classes is None:  # Hugging Face models state it
        n_classes = getattr(getattr(model, "config", None), "num_labels", None)
    if name is not None:
        if name not in modules:
            near = [known for known, module in modules.items() if outputs_of(module)][-5:]
            raise ValueError(
                f"layer must name a module of {_kind(model)}, got {name!r}; its last linear layers: {near}"
            )
        return name, modules[name]
    get_classifier: Any = getattr(model, "get_classifier", None)
    known_to_timm = get_classifier() if get_classifier else None
    if isinstance(known_to_timm, nn.Module) and outputs_of(known_to_timm):
        return next(key for key, module in modules.items() if module is known_to_timm), known_to_timm
    linear = [(key, module) for key, module in modules.items() if outputs_of(module)]
    if n_classes is None:
        linear = [pair for pair in linear if isinstance(pair[1], nn.Linear)] or linear
    else:
        linear = [pair for pair in linear if outputs_of(pair[1]) == n_classes]
    if not linear:
        wanted = (
            "nn.Linear layer"
            if n_classes is None
            else f"nn.Linear or 1x1 convolution with {n_classes} outputs"
        )
        raise ValueError(
            f"no last layer found in {_kind(model)}: looked for get_classifier() and for an {wanted}; name the layer "
            "whose input are the features with layer='...', or let the head read the logits alone: "
            "reads='statistics', n_classes=..."
        )
    return linear[-1]


class FeatureTap:
    """Runs a model and catches what goes into its last layer, without changing the model.

    A hook on the layer notes its input only while `run` is under way, so that a training step keeps nothing alive.
    Without a layer there is nothing to catch: the features are then empty, (B, 0).
    """

    def __init__(self, layer: nn.Module | None = None, name: str = "", n_features: int | None = None) -> None:
        self.name = name
        wanted = 0 if layer is None else n_features or inputs_of(layer)
        if wanted is None:
            raise ValueError(
                f"n_features must be given: layer {name!r} ({type(layer).__name__}) does not state it"
            )
        self.n_features = wanted
        self.recording = False
        self.caught: tuple[Tensor, Tensor] | None = None
        if layer is not None:
            layer.register_forward_hook(self._catch)

    @classmethod
    def on(cls, model: nn.Module, layer: nn.Module, name: str, n_features: int | None = None) -> FeatureTap:
        """The tap that is on the layer already, or a new one: heads on one network share it and compile once."""
        for hook in layer._forward_hooks.values():
            tap = getattr(hook, "__self__", None)
            if isinstance(tap, cls) and tap.name == name and n_features in (None, tap.n_features):
                return tap
        made = cls(layer, name, n_features)
        if any(module is not uncompiled(module) for module in model.modules()):
            torch.compiler.reset()  # what was compiled so far does not know the hook and would pass it by
        return made

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """What the model returns, and the features (B, F) that its logits came from."""
        self.recording = True
        try:
            output = model(*args, **kwargs)
        finally:
            self.recording = False
        return output, self.take(output)

    def take(self, output: Any) -> Tensor:
        """The features (B, F) caught while the model made `output`; they are let go."""
        caught, self.caught = self.caught, None
        logits = logits_of(output)
        if self.n_features == 0:
            return logits.new_empty(logits.shape[0], 0)
        if caught is None:
            raise RuntimeError(
                f"layer {self.name!r} was not run in the model's forward, so it has no features: "
                "name another with layer='...'"
            )
        return _one_per_sample(*caught, logits)

    def _catch(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.recording:
            self.caught = args[0], output


def _one_per_sample(features: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """Caught features -> (B, F): maps are averaged, tokens are taken where the logits came from."""
    if features.ndim == 4:  # (B, C, H, W) into a 1x1 convolution
        return features.mean((2, 3))
    if (
        features.ndim == 3 and output.ndim == 3 and logits.ndim == 2
    ):  # (B, T, F), one of T outputs became the logits
        place = (output == logits[:, None]).all(-1).int().argmax(1)  # (B,)
        return features[torch.arange(len(place), device=place.device), place]
    return features.flatten(1)


def outputs_of(layer: nn.Module) -> int | None:
    """How many classes a linear layer or 1x1 convolution gives out; None for any other module."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1:
        return layer.out_channels
    return None


def inputs_of(layer: nn.Module) -> int | None:
    """How many features go into a linear layer or convolution; None where the module does not say."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.in_channels if isinstance(layer, nn.Conv2d) else None


def uncompiled(model: nn.Module) -> nn.Module:
    """What `torch.compile` wrapped, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def logits_of(output: Any) -> Tensor:
    """The logits in what a classifier returned: a tensor, or the `logits` of a Hugging Face output or dict."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model must return a tensor or an object with a tensor `logits`, got {_kind(output)}"
        )
    return logits


def with_logits(output: Output, logits: Tensor) -> Output | Tensor:
    """The same output with other logits; the original stays as it is."""
    if isinstance(output, Tensor):
        return logits
    changed = copy.copy(output)
    if isinstance(changed, Mapping):
        changed["logits"] = logits  # type: ignore[index]
    else:
        changed.logits = logits  # type: ignore[attr-defined]
    return changed


def _kind(thing: object) -> str:
    return type(thing).__name__
