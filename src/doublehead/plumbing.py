"""What the method stands on: batches on their device, randomness of its own, several processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


def unpack(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """A batch -> positional inputs, named inputs and labels, on `device`."""
    if isinstance(batch, Mapping):
        named = {key: _to(value, device) for key, value in batch.items()}
        labels = named.pop("labels", None)
        inputs: Any = named
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = _to(batch[0], device), _to(batch[1], device)
    else:
        raise TypeError(
            f"a batch must be (inputs, labels) or a dict with 'labels', got {type(batch).__name__}"
        )
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
        got = (
            f"{labels.dtype} of shape {tuple(labels.shape)}"
            if isinstance(labels, Tensor)
            else type(labels).__name__
        )
        raise TypeError(
            f"labels of a calibration batch must be a whole-number tensor of shape (B,), got {got}"
        )
    if isinstance(inputs, Mapping):
        return (), dict(inputs), labels.long()
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}, labels.long()


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to(part, device) for part in value]
    if isinstance(value, Mapping):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return value.to(device) if hasattr(value, "to") else value


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter lies; the CPU for a model without parameters."""
    example = next(model.parameters(), None)
    return torch.device("cpu") if example is None else example.device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; each module gets back the mode it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        object.__setattr__(module, "training", False)  # nn.Module's own way takes ten times as long
    try:
        yield
    finally:
        for module in training:
            object.__setattr__(module, "training", True)


class StaysFloat32(nn.Module):
    """A module that goes along to another device, but stays float32 where the model round it becomes half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StaysFloat32:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread for a while: in many short operations several wait for each other and do not help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Randomness:
    """A second set of random number generators (torch, CUDA, numpy, Python) to swap in for a while."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        with seeded(seed, device):
            self.state = get_random(device)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Draw from this set; the caller's generators are back, untouched, afterwards."""
        theirs = get_random(self.device)
        set_random(self.state, self.device)
        try:
            yield
        finally:
            self.state = get_random(self.device)
            set_random(theirs, self.device)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Every generator seeded with `seed` for a while; the caller's are back afterwards."""
    device = device or torch.device("cpu")
    theirs = get_random(device)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the caller's data code may draw from it)
    try:
        yield
    finally:
        set_random(theirs, device)


def get_random(device: torch.device) -> dict[str, Any]:
    """The generators' state in types that torch.load(weights_only=True) accepts."""
    name, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = (name, torch.from_numpy(np.asarray(words, np.int64)), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators into a state that `get_random` returned."""
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


class Verdicts:
    """Yes or no from the device, read when it has come over, so that nobody waits for it."""

    def __init__(self) -> None:
        self._coming: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def ask(self, verdict: Tensor) -> None:
        """Send for a bool tensor ()."""
        if verdict.device.type != "cuda":
            self._coming.append((verdict, None))
            return
        here = torch.empty((), dtype=torch.bool, pin_memory=True)
        here.copy_(verdict, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._coming.append((here, event))

    def come(self, wait: bool = False) -> Iterator[bool]:
        """Those that are here, in order; all of them if `wait`."""
        while self._coming:
            verdict, event = self._coming[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            del self._coming[0]
            yield bool(verdict)


class Endless:
    """Batch after batch, pass after pass, with a place that can be saved and found again."""

    def __init__(self, batches: Iterable[Any], randomness: Randomness) -> None:
        self.batches, self.randomness = batches, randomness
        self.iterator: Iterator[Any] | None = None
        self.taken, self.start = 0, randomness.state

    def next(self) -> Any:
        """The next batch; called with `randomness` swapped in."""
        for _ in range(2):  # a pass that has just ended, then a fresh one
            if self.iterator is None:
                self.taken, self.start = 0, get_random(self.randomness.device)
                self.iterator = iter(self.batches)
            batch = next(self.iterator, None)
            if batch is not None:
                self.taken += 1
                return batch
            self.iterator = None
        raise ValueError(
            "calib_batches must hold at least one batch and start again when iterated again, got none"
        )

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: that of the batches themselves where they have one, else how to get there again."""
        own = self.batches.state_dict() if hasattr(self.batches, "state_dict") else None
        return {"taken": self.taken, "start": self.start, "own": own, "fresh": self.iterator is None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Find the place again; batches without a state of their own are drawn anew and passed over."""
        self.taken, self.start, self.iterator = state["taken"], dict(state["start"]), None
        if state["own"] is not None:
            self.batches.load_state_dict(state["own"])  # type: ignore[attr-defined]
            self.iterator = None if state["fresh"] else iter(self.batches)
        elif not state["fresh"]:
            self.randomness.state = self.start
            with self.randomness.swapped_in():
                self.iterator = iter(self.batches)
                for _ in range(self.taken):
                    next(self.iterator)


def n_processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them."""
    return dist.get_rank() if n_processes() > 1 else 0


def from_every_process(value: Any) -> list[Any]:
    """The `value` of each process, in their order; every process must call it."""
    values = [value] * n_processes()
    if n_processes() > 1:
        dist.all_gather_object(values, value)
    return values


def average_over_processes(values: Tensor) -> Tensor:
    """The mean of `values` over all processes, written into `values`."""
    if n_processes() > 1:
        dist.all_reduce(values)
        values /= n_processes()
    return values


def same_on_all_processes(module: nn.Module) -> None:
    """Give every process the first one's weights and buffers."""
    if n_processes() > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)
