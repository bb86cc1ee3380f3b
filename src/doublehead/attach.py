"""Let a network that stays what it is answer with calibrated log-probabilities in evaluation mode: hooks, no wrapper.

Frameworks save, load, distribute and serve the user's own module. So the calibration is attached to it from outside,
and the module keeps its class, the names of its weights and its place in the framework.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.double_head import Heads
from doublehead.network import Reader
from doublehead.torch_tools import evaluating

Answer = Callable[[Tensor, Tensor], Tensor]  # (main logits, features) -> calibrated logits


class Attachment:
    """Hooks on a network that run `answer` on every forward in evaluation mode.

    With `replace` the network's output carries the calibrated log-probabilities, otherwise it stays as it is.
    Either way `seen` is called with the log-probabilities of both heads and the keywords of the call. While the
    reader itself runs the network, in training or calibration, the hooks rest.
    """

    def __init__(
        self,
        network: nn.Module,
        reader: Reader,
        answer: Answer,
        *,
        replace: bool = True,
        seen: Callable[[Heads, dict[str, Any]], None] | None = None,
    ) -> None:
        self.network, self.reader, self.answer = network, reader, answer
        self.replace, self.seen, self.active = replace, seen, True
        self._opened = False
        self._handles = [
            network.register_forward_pre_hook(self._before),
            network.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, network: nn.Module, args: Any) -> None:
        tap = self.reader.tap
        if self.active and not network.training and getattr(network, "_is_replica", False):
            raise RuntimeError(
                "a calibration head cannot follow the copies of a model that nn.DataParallel makes: start a process "
                "for each GPU (torchrun --nproc_per_node), or make one visible (CUDA_VISIBLE_DEVICES=0)"
            )
        if self._opened:  # the last forward raised an error
            self._opened = tap.recording = False
        if self.active and not network.training and not tap.recording:
            self._opened = tap.recording = True

    def _after(self, network: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._opened:
            return output
        self._opened = self.reader.tap.recording = False
        answer = self.reader.answer(output, self.reader.tap.take())
        heads = self._heads(answer.logits, answer.features)
        if self.seen is not None:
            self.seen(heads, kwargs)
        return self.reader.replaced(output, heads.calib) if self.replace else output

    def _heads(self, main: Tensor, features: Tensor) -> Heads:
        return Heads(main.float().log_softmax(-1), self.answer(main, features).float().log_softmax(-1))

    @torch.no_grad()
    def ask(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Heads:
        """The log-probabilities of both heads for some inputs, in evaluation mode, without a call of `seen`."""
        with evaluating(self.network):
            found = self.reader.run(args, kwargs)
        return self._heads(found.logits, found.features)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """A copied network has a calibration of its own; the copy drops its listener, which may not be copyable."""
        memo[id(self)] = made = copy.copy(self)
        made.seen = None
        parts = (self.network, self.reader, self.answer, self._handles)
        made.network, made.reader, made.answer, made._handles = copy.deepcopy(parts, memo)
        return made

    def detach(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside the block the network answers as if nothing were attached."""
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
