"""Read a classifier from outside: its logits, and the features that go into its last layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from doublehead.calibration_data import Batch, ToPair, fold_of, unpack
from doublehead.torch_tools import device_of, evaluating, uncompiled, unwrapped

Output = TypeVar("Output")
Outputs = Literal["logits", "log_probs", "probs"]
LogitsOf = Callable[[Any], Tensor]
View = Callable[[Any], Any]
TOLERANCE = 1e-3  # by which rows of probabilities may miss a sum of 1: bfloat16 rounds to 4e-3 of each entry


class Readings(NamedTuple):
    """What a network says of N samples: features (N, F), logits (N, K), numbers (N, S) of its views, labels, folds."""

    features: Tensor
    logits: Tensor
    numbers: Tensor
    labels: Tensor
    folds: Tensor


class Answer(NamedTuple):
    """What a network says of one batch: its own output, features (B, F), logits (B, K), numbers (B, S) of its views."""

    output: Any
    features: Tensor
    logits: Tensor
    numbers: Tensor


def flip(images: Tensor) -> Tensor:
    """Mirror images (..., W) left to right."""
    return images.flip(-1)


VIEWS: dict[str, View] = {"flip": flip}


class Reader:
    """Runs a classifier and gives its output, features (B, F) and logits (B, K).

    The network is not changed: a hook on its last layer notes the layer's input while `run` is under way. `first`,
    a batch of inputs, is run once to find out what the network returns, how many classes there are and which layer
    gives the logits: the last one run that has as many outputs, or the one called `layer`. `logits_of` takes the
    logits out of an output that is no tensor and has no `logits`. `outputs` says what they are, which is otherwise
    recognised: rows that sum to 1 are probabilities, rows whose logsumexp is 0 log-probabilities.

    `views` are other ways to show a sample to the network, functions of its first input or "flip" for mirrored images.
    The log-probabilities and features of all views are averaged, and two numbers say how far the views disagree.
    """

    def __init__(
        self,
        network: nn.Module,
        first: Batch,
        *,
        layer: str | None = None,
        logits_of: LogitsOf | None = None,
        outputs: Outputs | None = None,
        views: Sequence[View | str] = (),
    ) -> None:
        self.network, self.logits_of = network, logits_of
        unknown = [view for view in views if isinstance(view, str) and view not in VIEWS]
        if unknown:
            raise ValueError(f"views must be functions or among {sorted(VIEWS)}, got {unknown}")
        self.views = tuple(VIEWS[view] if isinstance(view, str) else view for view in views)
        inner = unwrapped(network)
        modules = dict(inner.named_modules())
        if layer is not None and layer not in modules:
            near = [name for name, module in modules.items() if outputs_of(module)][-5:]
            raise ValueError(
                f"layer must name a module of {_kind(inner)}, got {layer!r}; its last linear layers: {near}"
            )
        output, run = _watched(inner, modules, first)
        values = find_logits(output, logits_of)
        self.outputs = outputs or recognise(values)
        self.n_classes = _check_logits(values, len(first.labels))
        check_labels(first.labels, self.n_classes)
        self.layer = _last_layer(inner, modules, run, self.n_classes) if layer is None else layer
        self.tap = (
            FeatureTap.on(network, modules[self.layer], self.layer)
            if self.layer is not None
            else FeatureTap()
        )
        with torch.no_grad(), evaluating(inner):
            self.n_features = self.run(first.args, first.kwargs, network=inner).features.shape[1]

    @classmethod
    def restore(
        cls,
        network: nn.Module,
        *,
        layer: str | None,
        outputs: Outputs,
        n_classes: int,
        n_features: int,
        logits_of: LogitsOf | None = None,
        views: Sequence[View | str] = (),
    ) -> Reader:
        """A reader of a network whose shapes are known already; nothing is run."""
        reader = cls.__new__(cls)
        reader.network, reader.layer, reader.outputs = network, layer, outputs
        reader.n_classes, reader.n_features, reader.logits_of = n_classes, n_features, logits_of
        reader.views = tuple(VIEWS[view] if isinstance(view, str) else view for view in views)
        modules = dict(unwrapped(network).named_modules())
        if layer is not None and layer not in modules:
            raise ValueError(f"layer must name a module of {_kind(network)}, got {layer!r}")
        reader.tap = FeatureTap.on(network, modules[layer], layer) if layer is not None else FeatureTap()
        return reader

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], network: nn.Module | None = None) -> Answer:
        """Show some inputs to the network, in every view."""
        network = self.network if network is None else network
        own = self._run_once(network, args, kwargs)
        if not self.views:
            return own
        answers = [own]
        for view in self.views:
            seen = ((view(args[0]), *args[1:]), kwargs) if args else ((), view(kwargs))
            answers.append(self._run_once(network, *seen))
        return _merged(answers)

    def _run_once(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        output, caught = self.tap.run(network, args, kwargs)
        logits = to_logits(find_logits(output, self.logits_of), self.outputs)
        features = features_of(caught, logits, self.layer)
        none = logits.new_empty(
            logits.shape[0], 0
        )  # not len(logits), which would fix the batch size of an export
        return Answer(output, features, logits, none)

    @torch.no_grad()
    def read(
        self, batches: Iterable[Any], *, to_pair: ToPair | None = None, max_samples: float = math.inf
    ) -> Readings:
        """Features, logits, labels and folds of all samples, in evaluation mode; stops after `max_samples`.

        The network runs as it was before torch.compile: here batches differ in size.
        """
        rows: list[tuple[Tensor, ...]] = []
        inner, n = unwrapped(self.network), 0
        device = device_of(inner)
        with evaluating(inner):
            for raw in batches:
                batch = unpack(raw, device, to_pair)
                check_labels(batch.labels, self.n_classes)
                answer = self.run(batch.args, batch.kwargs, network=inner)
                rows.append((*(part.float() for part in answer[1:]), batch.labels, fold_of(batch)))
                n += len(batch.labels)
                if n >= max_samples:
                    break
        if not rows:
            raise ValueError(
                "calibration data must hold at least one batch each time it is iterated, got none"
            )
        return Readings(*(torch.cat(parts) for parts in zip(*rows)))

    def last_layer(self) -> Tensor | None:
        """The weight (K, F) that makes logits of features; None where no linear layer does."""
        layer = None if self.layer is None else unwrapped(self.network).get_submodule(self.layer)
        shape = (self.n_classes, self.n_features)
        return layer.weight if isinstance(layer, nn.Linear) and layer.weight.shape == shape else None

    def close(self) -> None:
        """Take the hook off the network."""
        self.tap.remove()


def _merged(answers: Sequence[Answer]) -> Answer:
    """Mean log-probabilities and features over views, and how far the views disagree."""
    log_probs = torch.stack([answer.logits.float().log_softmax(-1) for answer in answers])  # (V, B, K)
    mean = log_probs.mean(0)
    # Twice the Jensen-Shannon-like spread of the views round their mean, and the share that predict its class.
    spread = (log_probs.exp() * (log_probs - mean)).sum(-1).mean(0)
    agree = (log_probs.argmax(-1) == mean.argmax(-1)).float().mean(0)
    numbers = torch.stack([spread.clamp(min=1e-6).log(), agree], -1)
    features = torch.stack([answer.features.float() for answer in answers]).mean(0)
    return Answer(answers[0].output, features, mean, numbers)


class FeatureTap:
    """A forward hook that notes the input of one layer while `run` is under way; without a layer it notes nothing."""

    def __init__(self, layer: nn.Module | None = None, name: str = "") -> None:
        self.name, self.recording = name, False
        self.caught: tuple[Tensor, Tensor] | None = None
        self._handle = None if layer is None else layer.register_forward_hook(self._catch)
        self._users = 1

    @classmethod
    def on(cls, network: nn.Module, layer: nn.Module, name: str) -> FeatureTap:
        """The tap that is on the layer already, or a new one: heads on one network share it and compile once."""
        for hook in layer._forward_hooks.values():
            tap = getattr(hook, "__self__", None)
            if isinstance(tap, cls) and tap.name == name:
                tap._users += 1
                return tap
        made = cls(layer, name)
        if any(module is not uncompiled(module) for module in network.modules()):
            torch.compiler.reset()  # what was compiled before does not know the hook and would not call it
        return made

    def run(
        self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Tensor, Tensor] | None]:
        """The network's output, and the layer's input and output."""
        self.recording = True
        try:
            output = network(*args, **kwargs)
        finally:
            self.recording = False
        return output, self.take()

    def take(self) -> tuple[Tensor, Tensor] | None:
        """What was caught last; it is kept no longer."""
        caught, self.caught = self.caught, None
        return caught

    def remove(self) -> None:
        """Take the hook off once nobody uses it."""
        self._users -= 1
        if self._handle is not None and self._users <= 0:
            self._handle.remove()

    def _catch(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.recording:
            self.caught = args[0], output


def features_of(caught: tuple[Tensor, Tensor] | None, logits: Tensor, layer: str | None = None) -> Tensor:
    """(B, F) from what a layer saw: maps are averaged, tokens are taken where the logits came from."""
    if layer is None:
        return logits.new_empty(logits.shape[0], 0)
    if caught is None:
        raise RuntimeError(
            f"layer {layer!r} was not run in the network's forward, so it has no features: "
            "name another with layer='...'"
        )
    features, output = caught
    if features.ndim == 4:  # (B, C, H, W) into a 1x1 convolution
        return features.mean((2, 3))
    if features.ndim == 3 and output.ndim == 3 and logits.ndim == 2:
        # (B, T, F), one of T outputs became the logits
        place = (output == logits[:, None]).all(-1).int().argmax(1)  # (B,)
        return features[torch.arange(place.shape[0], device=place.device), place]
    return features.flatten(1)


@torch.no_grad()
def _watched(inner: nn.Module, modules: Mapping[str, nn.Module], first: Batch) -> tuple[Any, list[str]]:
    """The network's output for a batch in evaluation mode, and the names of its linear layers in the order run."""
    run: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: run.append(name))
        for name, module in modules.items()
        if outputs_of(module)
    ]
    try:
        with evaluating(inner):
            return inner(*first.args, **first.kwargs), run
    finally:
        for handle in handles:
            handle.remove()


def _last_layer(
    inner: nn.Module, modules: Mapping[str, nn.Module], run: Sequence[str], n_classes: int
) -> str | None:
    """The layer that gives the logits: timm's own statement, or the last one run that has K outputs."""
    get_classifier: Any = getattr(inner, "get_classifier", None)
    stated = get_classifier() if get_classifier else None
    for name in reversed(run):
        if modules[name] is stated:
            return name
    return next((name for name in reversed(run) if outputs_of(modules[name]) == n_classes), None)


def outputs_of(layer: nn.Module) -> int | None:
    """How many outputs a linear layer or 1x1 convolution has; None for any other module."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1:
        return layer.out_channels
    return None


def find_logits(output: Any, logits_of: LogitsOf | None = None) -> Tensor:
    """The logits in what a classifier returned: a tensor, or the `logits` of a Hugging Face output or dict."""
    if logits_of is not None:
        output = logits_of(output)
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the network must return a tensor or an object with a tensor `logits`, got {_kind(output)}; "
            "give logits_of=, a function from its output to the logits"
        )
    return logits


def with_logits(output: Output, logits: Tensor) -> Output | Tensor:
    """The same output with other logits; the original is not changed."""
    if not isinstance(output, Mapping) and not hasattr(output, "logits"):
        return logits
    changed = copy.copy(output)
    if isinstance(changed, Mapping):
        changed["logits"] = logits  # type: ignore[index]
    else:
        changed.logits = logits
    return changed


def recognise(values: Tensor) -> Outputs:
    """What rows (B, K) of outputs are.

    >>> recognise(torch.tensor([[0.9, 0.1], [0.5, 0.5]])), recognise(torch.tensor([[0.9, 0.1], [0.5, 0.6]]))
    ('probs', 'logits')
    """
    rows = values.detach().double()
    if bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < TOLERANCE).all()):
        return "probs"
    if bool((rows <= 0).all()) and bool((rows.logsumexp(-1).abs() < TOLERANCE).all()):
        return "log_probs"
    return "logits"


def to_logits(values: Tensor, outputs: Outputs) -> Tensor:
    """Logits whose softmax is what the outputs say: log-probabilities are such logits."""
    if outputs != "probs":
        return values
    return values.float().clamp(min=torch.finfo(torch.float32).tiny).log()


def _check_logits(values: Tensor, n: int) -> int:
    """The number of classes K of logits (n, K)."""
    if values.ndim != 2 or values.shape[0] != n or values.shape[1] < 2:
        raise ValueError(
            f"the network must give one row of logits per sample, (B, K) with K >= 2: for {n} samples that is "
            f"({n}, K), got {tuple(values.shape)}"
        )
    return values.shape[1]


def check_labels(labels: Tensor, n_classes: int) -> None:
    """An error for labels that are no class."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= n_classes:
        raise ValueError(
            f"labels must lie in 0..{n_classes - 1} for a network with {n_classes} classes, got {low}..{high}"
        )


def _kind(thing: object) -> str:
    return type(thing).__name__
