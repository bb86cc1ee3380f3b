"""Let a model that stays what it is answer with calibrated logits in evaluation mode: hooks, no wrapper.

Frameworks save, load, distribute and serve the user's own module. So the head is attached to it from outside, and the
module keeps its class, its name for every weight, and its place in the framework.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from doublehead.double_head import DoubleHead, Heads
from doublehead.last_layer import logits_of, with_logits
from doublehead.plumbing import evaluating


class Attachment:
    """Hooks on the model of a DoubleHead that run its calibration head on every forward in evaluation mode.

    With `answer` the model's output carries the calibrated logits, otherwise it stays as it is. Either way `seen` is
    called with both heads' logits and the keywords of the call. While the DoubleHead itself, or its Alternation, runs
    the model, the hooks rest.
    """

    def __init__(
        self,
        double: DoubleHead,
        *,
        answer: bool = True,
        seen: Callable[[Heads, dict[str, Any]], None] | None = None,
    ) -> None:
        self.double, self.answer, self.seen = double, answer, seen
        self.active = True
        self._opened = False
        self._handles = [
            double.model.register_forward_pre_hook(self._before),
            double.model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, model: nn.Module, args: Any) -> None:
        tap = self.double._tap
        if self.active and not model.training and getattr(model, "_is_replica", False):
            raise RuntimeError(
                "a calibration head cannot follow the copies of a model that nn.DataParallel makes: start a process "
                "for each GPU (torchrun --nproc_per_node), or let one be seen (CUDA_VISIBLE_DEVICES=0)"
            )
        if self._opened:  # the last forward raised before it came to its end
            self._opened = tap.recording = False
        if self.active and not model.training and not tap.recording:
            self._opened = tap.recording = True

    def _after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._opened:
            return output
        tap = self.double._tap
        self._opened = tap.recording = False
        features, main = tap.take(output), logits_of(output)
        with evaluating(self.double.head):  # it is no part of the model, and may be in training mode
            calib = self.double.head(features, main)
        if self.seen is not None:
            self.seen(Heads(main, calib), kwargs)
        return with_logits(output, calib) if self.answer else output

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """A copied model has a head of its own, and nobody listens: who does may hold what cannot be copied."""
        memo[id(self)] = made = copy.copy(self)
        made.seen = None
        made.double, made._handles = copy.deepcopy((self.double, self._handles), memo)
        return made

    def detach(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, the model answers as if nothing were attached."""
        self.active, before = False, self.active
        try:
            yield
        finally:
            self.active = before


def find_classifier(module: nn.Module, path: str | None = None) -> nn.Module:
    """The submodule of a training module that gives the logits.

    It is the one at `path` ("" is the module itself); without a path the only child that has parameters, or, where
    several have some, the module itself if it has a forward of its own.

    >>> module = nn.Module()
    >>> module.net, module.loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    >>> find_classifier(module)
    Linear(in_features=4, out_features=3, bias=True)
    """
    children = {
        name: child for name, child in module.named_children() if any(True for _ in child.parameters())
    }
    if path is not None:
        known = dict(module.named_modules())
        if path not in known:
            raise ValueError(
                f"classifier must name a submodule of {type(module).__name__}, got {path!r}; it has {sorted(children)}"
            )
        found: nn.Module = known[path]
        return found
    if len(children) == 1:
        return next(iter(children.values()))
    if children and _has_own_forward(module):
        return module
    raise ValueError(
        f"no classifier found in {type(module).__name__}: it has {len(children)} submodules with parameters "
        f"({sorted(children)}) and no forward of its own; name the one that gives the logits with classifier='...'"
    )


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a subclass outside the frameworks' own modules defines forward."""
    for cls in type(module).__mro__:
        if "forward" in vars(cls):
            return not cls.__module__.startswith(
                ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")
            )
    return False
