"""Read a classifier from outside: its logits, and the features that go into its last layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from doublehead.calibration_data import Batch, ToPair, fold_of, unpack
from doublehead.system import warn
from doublehead.tasks import (
    IGNORE_INDEX,
    SUPPORTED,
    LogitsOf,
    Outputs,
    Reservoir,
    Task,
    check_shifted,
    class_scores,
    find_logits,
    in_form,
    recognise,
    recognise_task,
    targets_of,
    with_logits,
)
from doublehead.torch_tools import Tap, device_of, evaluating, is_compiled, n_processes, unwrapped

View = Callable[[Any], Any]
Caught = tuple[Tensor, Tensor]  # the input and the output of a layer
Run = tuple[str, Tensor]  # the name of a layer and the start of its output
POSITIONS = 20_000  # of tokens or pixels that are drawn to calibrate on
PATIENCE = 20  # calibration batches in a row that may fail before no more are tried


class Readings(NamedTuple):
    """A network's outputs for N samples: features (N, F), logits (N, K), numbers (N, S) of its views, and the labels.

    Labels are classes (N,) or rows of probabilities (N, K). A position of a sequence or image counts as a sample, and
    so does a pair of a sample and one of L independent labels; only features are (N / L, F) then.
    """

    features: Tensor
    logits: Tensor
    numbers: Tensor
    labels: Tensor
    folds: Tensor
    weights: Tensor | None = None  # (N,)


class Answer(NamedTuple):
    """A network's output for N samples or positions, with features (N, F), logits (N, K) and numbers (N, S)."""

    output: Any
    features: Tensor
    logits: Tensor
    numbers: Tensor


def flip(images: Any) -> Any:
    """Mirror images (..., W) left to right; of named inputs those with more than two dimensions."""
    if isinstance(images, Mapping):
        return {
            name: flip(value) if getattr(value, "ndim", 0) > 2 else value for name, value in images.items()
        }
    return images.flip(-1)


VIEWS: dict[str, View] = {"flip": flip}


@dataclass(eq=False)
class Reader:
    """Runs a classifier and gives its output, features (N, F) and logits (N, K): the one place that knows its form.

    The network is not changed: a hook on its last layer notes the layer's input while `run` is under way.
    `Reader.of` finds the form by running the network once.

    `views` are other ways to show a sample to the network, functions of its first input or "flip" for mirrored images.
    The log-probabilities and features of all views are averaged, and two numbers say how far the views disagree.
    """

    network: nn.Module
    layer: str | None
    outputs: Outputs
    task: Task
    n_classes: int
    n_features: int
    n_labels: int | None = None  # where a sample may have several
    ignore_index: int = IGNORE_INDEX
    logits_of: LogitsOf | None = None
    views: Sequence[Any] = ()

    def __post_init__(self) -> None:
        unknown = [view for view in self.views if isinstance(view, str) and view not in VIEWS]
        if unknown:
            raise ValueError(f"views must be functions or among {sorted(VIEWS)}, got {unknown}")
        if self.views and self.task in ("tokens", "pixels"):
            raise ValueError(f"views must be empty for {self.task}: their positions would have to be matched")
        self.views = tuple(VIEWS[view] if isinstance(view, str) else view for view in self.views)
        modules = dict(unwrapped(self.network).named_modules())
        if self.layer is not None and self.layer not in modules:
            near = [name for name, module in modules.items() if outputs_of(module)][-5:]
            raise ValueError(
                f"layer must name a module of {type(unwrapped(self.network)).__name__}, got {self.layer!r}; "
                f"its last linear layers: {near}"
            )
        self.tap, self._is_closed = FeatureTap(), False
        if self.layer is not None:
            self.tap = FeatureTap.on(self.network, modules[self.layer], self.layer)

    @classmethod
    def of(
        cls,
        network: nn.Module,
        first: Batch,
        *,
        layer: str | None = None,
        outputs: Outputs | None = None,
        task: Task | None = None,
        logits_of: LogitsOf | None = None,
        ignore_index: int = IGNORE_INDEX,
        views: Sequence[View | str] = (),
    ) -> Reader:
        """The reader of a network that is run once on `first`, a batch of inputs.

        What is not stated is found: `layer`, which gives the logits, is the last one run that has as many outputs;
        `outputs` that are not this layer's are probabilities if rows sum to 1, log-probabilities if their logsumexp is
        0, and logits else; `task` follows from the shapes of output and labels: "classes"; "binary", one logit, read
        as two classes; "labels", several such logits; "tokens" and "pixels", where labels of `ignore_index` do not
        count. `logits_of` takes the logits out of an output that is no tensor and has no `logits`.
        """
        for name, given, known in (("task", task, get_args(Task)), ("outputs", outputs, get_args(Outputs))):
            if given not in (None, *known):
                raise ValueError(f"{name} must be one of {known}, got {given!r}")
        inner = unwrapped(network)
        modules = dict(inner.named_modules())
        if any(getattr(module, "goes_round_double_head", False) for module in modules.values()):
            raise ValueError(
                "network must be without a ShiftGuard, which would count the calibration data: calibrate first, then "
                "put the guard around the result"
            )
        if not len(first.labels):
            raise ValueError("calibration data must hold at least one sample in its first batch, got none")
        output, run = _watched(inner, modules, first)
        values = find_logits(output, logits_of)
        task = task or recognise_task(values, first.labels)
        scores = class_scores(values, task)
        check_shifted(first.kwargs.get("input_ids"), first.labels, task, ignore_index)
        targets = targets_of(first.labels, task, scores.shape[-1], ignore_index)
        if len(targets) != scores.shape[:-1].numel():
            raise ValueError(
                f"task {task!r} does not fit outputs of shape {tuple(values.shape)} and labels of shape "
                f"{tuple(first.labels.shape)}; {SUPPORTED}"
            )
        per_row(first, targets, None, folds=False)  # checks the weights
        axis = {"tokens": -1, "binary": None}.get(task, 1)
        layer = layer or _last_layer(inner, modules, run, values, 1 if axis is None else values.shape[axis])
        n_labels = values.shape[1] if task == "labels" else None
        form = (outputs or "logits", task, scores.shape[-1], 0, n_labels, ignore_index, logits_of, views)
        made = cls(network, layer, *form)
        with torch.no_grad(), evaluating(inner):
            output, caught = made.tap.run(inner, first.args, first.kwargs)
            at = made.pick(targets, 1)  # of large images not every position
            made.n_features = made.answer(output, caught, at).features.shape[1]
        values = find_logits(output, logits_of)
        is_linear = caught is not None and torch.equal(caught[1].flatten(), values.flatten())
        if outputs is None and not is_linear:  # what a linear layer gives are logits
            made.outputs = recognise(values, task)
        return made

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        network: nn.Module | None = None,
        at: Tensor | None = None,
    ) -> Answer:
        """Show some inputs to the network, in every view; `at` (M,) are the rows to give, all by default."""
        network = self.network if network is None else network
        own = self.answer(*self.tap.run(network, args, kwargs), at)
        if not self.views:
            return own
        answers = [own]
        for view in self.views:
            seen = ((view(args[0]), *args[1:]), kwargs) if args else ((), view(kwargs))
            answers.append(self.answer(*self.tap.run(network, *seen), at))
        return merge_views(answers)

    def answer(self, output: Any, caught: Caught | None, at: Tensor | None = None) -> Answer:
        """The network's output, and what the last layer saw, as rows of samples or positions."""
        logits, features = self.rows(output, caught, at)
        none = logits.new_empty(logits.shape[0], 0)  # not len(logits), which would fix an export's batch size
        return Answer(output, features, logits, none)

    def rows(self, output: Any, caught: Caught | None, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and features of an `answer`."""
        values = find_logits(output, self.logits_of)
        scores = class_scores(values, self.task, self.outputs)
        return _rows(scores, at), _rows(self._features(caught, values, scores), at)

    def _features(self, caught: Caught | None, values: Tensor, scores: Tensor) -> Tensor:
        """(B, F) from what the layer saw: maps are averaged, tokens are taken where the logits came from.

        For tokens (B, T, F) and for pixels (B, H, W, F); without any, F is 0.
        """
        by_place = self.task in ("tokens", "pixels")
        lead = scores.shape[:-1] if by_place else values.shape[:1]
        if self.layer is None:
            return values.new_empty(*lead, 0)
        if caught is None:
            raise RuntimeError(
                f"layer {self.layer!r} was not run in the network's forward, so it has no features: "
                "name another with layer='...'"
            )
        features, output = caught
        if features.ndim == 2 and not by_place:
            return features
        if by_place:
            features = features.movedim(1, -1) if self.task == "pixels" else features
            return features if features.shape[:-1] == lead else values.new_empty(*lead, 0)
        if features.ndim == 4:  # (B, C, H, W) into a 1x1 convolution
            return features.mean((2, 3))
        if features.ndim == 3 and output.ndim == 3 and values.ndim <= 2:
            # (B, T, F), one of T outputs became the logits
            if output.shape[2] != values.shape[1:].numel():
                raise ValueError(
                    f"layer must name one whose outputs become the {values.shape[1:].numel()} logits, got "
                    f"{self.layer!r} with outputs of shape {tuple(output.shape)}"
                )
            place = (output == values.reshape(values.shape[0], 1, -1)).all(-1).int().argmax(1)  # (B,)
            return features[torch.arange(place.shape[0], device=place.device), place]
        return features.flatten(1)

    def replaced(self, output: Any, log_probs: Tensor) -> Any:
        """The output with log-probabilities (N, K) in place of its logits, in their form.

        Where the network gives one logit, or one per label, the log-odds stand in its place.
        """
        shape = find_logits(output, self.logits_of).shape
        return with_logits(output, in_form(log_probs, shape, self.task))

    def targets(self, labels: Tensor, *, check: bool = True) -> Tensor:
        """`tasks.targets_of` for this network."""
        return targets_of(labels, self.task, self.n_classes, self.ignore_index, check=check)

    def pick(self, targets: Tensor, limit: int) -> Tensor | None:
        """(M,) rows that count, at most `limit` of them at random; None for all."""
        if self.task not in ("tokens", "pixels"):
            return None
        rows = (targets >= 0).nonzero()[:, 0]
        return rows if len(rows) <= limit else rows[torch.randperm(len(rows), device=rows.device)[:limit]]

    @torch.no_grad()
    def read(
        self,
        batches: Iterable[Any],
        *,
        to_pair: ToPair | None = None,
        max_samples: float = math.inf,
        positions: int = POSITIONS,
        skip: bool = False,
    ) -> Readings:
        """Features, logits, labels and folds of all samples, in evaluation mode; stops after `max_samples`.

        Of tokens and pixels `positions` are drawn, every one that counts as likely as any other, and no more are held.
        The network runs as it was before torch.compile: here batches differ in size. With `skip` batches that cannot
        be used are left out with a warning; after 20 in a row no more are read.
        """
        reservoir = Reservoir(positions if self.task in ("tokens", "pixels") else None)
        inner, iterator, n = unwrapped(self.network), iter(batches), 0
        failed: list[Exception] = []
        in_a_row, n_read = 0, -1
        with evaluating(inner):
            while n < max_samples and in_a_row < PATIENCE:
                try:
                    raw = next(iterator, None)
                    if raw is None:
                        break
                    n_read += 1
                    batch = unpack(raw, device_of(inner), to_pair)
                    targets = self.targets(batch.labels)
                    at = reservoir.draw(targets)
                    answer = self.run(batch.args, batch.kwargs, network=inner, at=at)
                    known = per_row(batch, targets, at)
                    bad = ~torch.isfinite(answer.logits)
                    if bool(bad.any()):
                        raise ValueError(
                            f"the network's logits must be finite, got {float(answer.logits[bad][0])} in "
                            f"{int(bad.any(-1).sum())} of {len(bad)} rows of calibration batch {n_read}, counted from 0"
                        )
                    reservoir.add(*(part.float() for part in answer[1:]), *known)
                    n, in_a_row = n + len(batch.labels), 0
                except Exception as error:
                    if not skip or n_processes() > 1:  # the other processes would wait for this one
                        raise
                    failed, in_a_row = [*failed, error], in_a_row + 1
        if not n:
            nothing = "calibration data must hold at least one batch each time it is iterated, got none"
            raise failed[0] if failed else ValueError(nothing)
        if failed:
            what = f"{type(failed[0]).__name__}: {failed[0]}"
            warn(f"{len(failed)} calibration batches were left out, the first for {what}")
        readings = Readings(*reservoir.rows())
        if not len(readings.labels):
            raise ValueError(
                f"labels must hold some other than ignore_index = {self.ignore_index}, got none in {n} samples"
            )
        return readings

    def last_layer(self) -> Tensor | None:
        """The weight (K, F) that makes logits of features; None where no linear layer does."""
        layer = None if self.layer is None else unwrapped(self.network).get_submodule(self.layer)
        shape = (self.n_classes, self.n_features)
        if not isinstance(layer, nn.Linear) or layer.weight.shape != shape:
            return None
        whole: Tensor = getattr(layer.weight, "full_tensor", lambda: layer.weight)()  # FSDP shards weights
        return whole

    def again(self, network: nn.Module) -> Reader:
        """The same reader for `network`, which is this one's, perhaps without its wrappers."""
        return replace(self, network=network)

    def close(self) -> None:
        """Remove the hook from the network unless another reader uses it; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.tap.remove()


def per_row(batch: Batch, targets: Tensor, at: Tensor | None, folds: bool = True) -> list[Tensor]:
    """Targets, folds (or 0) and, where there are any, weights (N,) of the rows of a batch, or of those `at`."""
    each = len(targets) // len(batch.labels)  # rows of a sample
    of_samples = [fold_of(batch) if folds else targets.new_zeros(len(batch.labels), dtype=torch.int64)]
    of_samples += [] if batch.weights is None else [batch.weights]
    found = [targets]
    for part in of_samples:
        found.append(part.flatten() if each == 1 or part.ndim > 1 else part.repeat_interleave(each))
    if len(found[-1]) != len(targets):
        shape = tuple(of_samples[-1].shape)
        raise ValueError(f"weights must be one for each of {len(batch.labels)} samples, got shape {shape}")
    return found if at is None else [part[at] for part in found]


def merge_views(answers: Sequence[Answer]) -> Answer:
    """Mean log-probabilities and features over views, and how far the views disagree."""
    log_probs = torch.stack([answer.logits.float().log_softmax(-1) for answer in answers])  # (V, B, K)
    mean = log_probs.mean(0)
    # Twice the Jensen-Shannon-like spread of the views around their mean, and the share that predict its class.
    spread = (log_probs.exp() * (log_probs - mean)).sum(-1).mean(0)
    agree = (log_probs.argmax(-1) == mean.argmax(-1)).float().mean(0)
    numbers = torch.stack([spread.clamp(min=1e-6).log(), agree], -1)
    features = torch.stack([answer.features.float() for answer in answers]).mean(0)
    return Answer(answers[0].output, features, mean, numbers)


class FeatureTap(Tap):
    """A forward hook that notes the input of one layer while `run` is under way; without a layer it notes nothing."""

    def __init__(self, layer: nn.Module | None = None, name: str = "") -> None:
        super().__init__()
        self.name, self._users, self._rests = name, 1, False
        self._handle = None if layer is None else layer.register_forward_hook(self._catch)
        self._hooks: dict[int, Any] = {} if layer is None else layer._forward_hooks

    @classmethod
    def on(cls, network: nn.Module, layer: nn.Module, name: str) -> FeatureTap:
        """The tap that is on the layer already, or a new one: heads on one network share it and compile once."""
        for hook in layer._forward_hooks.values():
            tap = getattr(hook, "__self__", None)
            if isinstance(tap, cls) and tap.name == name:
                tap._users += 1
                return tap
        made = cls(layer, name)
        if any(map(is_compiled, network.modules())):
            torch.compiler.reset()  # what was compiled before does not know the hook and would not call it
        return made

    def wake(self) -> None:
        """Put the hook on the layer for good."""
        if self._rests:
            self._rests = False
            self._put_on()

    def rest(self, network: nn.Module) -> None:
        """Keep the hook on the layer in `run` alone: the network is then as fast as without it.

        Not where others use it too, nor in a compiled network, which would not see it come back.
        """
        if self._handle and self._users == 1 and not any(map(is_compiled, network.modules())):
            self._rests = True
            self._take_off()

    def run(
        self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Caught | None]:
        """The network's output, and the layer's input and output."""
        if not self._rests:
            self.record(True)
            try:
                output = network(*args, **kwargs)
            finally:
                self.record(False)
            return output, self.collect()
        # The same, as short as can be: beside a small network every call counts.
        notes, compiled = self._of_thread, self._compiled  # parts of the network may have been compiled since
        notes.recording = compiled.recording = True
        self._put_on()
        try:
            output = network(*args, **kwargs)
        finally:
            notes.recording = compiled.recording = False
            self._take_off()
        if notes.caught is None:
            return output, self.collect()
        caught, notes.caught = notes.caught, None
        return output, caught

    def remove(self) -> None:
        """Remove the hook once nothing uses it."""
        self._users -= 1
        if self._users <= 0:
            self._take_off()

    def _put_on(self) -> None:  # `register_forward_hook` takes as long as a small layer
        if self._handle:
            self._hooks[self._handle.id] = self._catch

    def _take_off(self) -> None:
        if self._handle:
            self._hooks.pop(self._handle.id, None)

    def _catch(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        now = self.now
        if now.recording:
            now.caught = args[0], output


@torch.no_grad()
def _watched(inner: nn.Module, modules: Mapping[str, nn.Module], first: Batch) -> tuple[Any, list[Run]]:
    """The network's output for a batch in evaluation mode, and its linear layers in the order run."""
    run: list[Run] = []
    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: run.append((name, _start(out))))
        for name, module in modules.items()
        if outputs_of(module)
    ]
    try:
        with evaluating(inner):
            return inner(*first.args, **first.kwargs), run
    except Exception as error:
        parts = [*first.args, *(f"{name}=" + _form(part) for name, part in first.kwargs.items())]
        inputs = ", ".join(part if isinstance(part, str) else _form(part) for part in parts)
        raise RuntimeError(
            f"the network must run on the inputs of a calibration batch, got {type(error).__name__} for {inputs}: "
            f"{error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _start(values: Tensor) -> Tensor:
    """A few entries, which tell one layer's outputs from another's."""
    return values.flatten()[:256].float()


def _form(value: Any) -> str:
    """What a part of the inputs is, for a message."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _last_layer(
    inner: nn.Module, modules: Mapping[str, nn.Module], run: Sequence[Run], values: Tensor, n_outputs: int
) -> str | None:
    """The layer that gives the logits `values`.

    It is the one that timm states; or of those with as many outputs the last one run whose output they are, as in a
    network with several heads; or the last of all those.
    """
    get_classifier: Any = getattr(inner, "get_classifier", None)
    stated = get_classifier() if get_classifier else None
    fitting = [(name, start) for name, start in run if outputs_of(modules[name]) == n_outputs]
    names = [name for name, _ in run if modules[name] is stated]
    names = names or [name for name, start in fitting if torch.equal(start, _start(values))]
    names = names or [name for name, _ in fitting]
    return names[-1] if names else None


def outputs_of(layer: nn.Module) -> int | None:
    """How many outputs a linear layer or 1x1 convolution has; None for any other module."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1:
        return layer.out_channels
    return None


def _rows(values: Tensor, at: Tensor | None) -> Tensor:
    """(N, C) from values (..., C); of large ones only the rows `at` are copied."""
    if at is not None:
        return values[torch.unravel_index(at, values.shape[:-1])]
    return values if values.ndim == 2 else values.flatten(0, -2)
