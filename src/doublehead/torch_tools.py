"""Small tools on top of torch: modes, devices, separate random generators, flags from a GPU, several processes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from doublehead.system import warn

# --- modules


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU for a model without parameters."""
    example = next(model.parameters(), None)
    return torch.device("cpu") if example is None else example.device


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` wrapped the module, or `module.compile()` replaced its call."""
    return uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


# By name, so that nothing is imported: the wrappers of torch, Fabric, timm and torchvision keep the user's in `module`.
WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "_FabricModule",
    "AveragedModel",
    "ModelEmaV2",
    "ModelEmaV3",
}


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside wrappers for processes, averaged weights and torch.compile."""
    while True:
        inner = uncompiled(model)
        if inner is model and any(cls.__name__ in WRAPPERS for cls in type(model).__mro__):
            inner = model.module  # type: ignore[assignment]
        if inner is model:
            return model
        model = inner


class evaluating:
    """Evaluation mode inside the block; each module gets back the mode it had, and what FSDP gathered is sharded.

    Buffers get back their values: some change in evaluation mode too, as those of observers in quantisation-aware
    training. Beside a small network's forward the usual ways to do all this would take longer than the forward.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    def __enter__(self) -> None:
        """Switch off training mode where it is on."""
        modules = list(self.models)
        self._training: list[nn.Module] = []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._is_sharded = False
        for module in modules:  # which grows on the way
            if module._modules:
                modules += [child for child in module._modules.values() if child is not None]
            if module.training:
                self._training.append(module)
                object.__setattr__(module, "training", False)
            self._is_sharded = self._is_sharded or hasattr(type(module), "reshard")
            # The averages of normalisation layers rest in evaluation mode.
            if module._buffers and not isinstance(module, _NormBase):
                self._buffers += [
                    (module, name, value, value.detach().clone())
                    for name, value in module._buffers.items()
                    if value is not None and value.is_contiguous() and not value.is_inference()
                ]

    def __exit__(self, *_: object) -> None:
        """Switch it on again there."""
        for module in self._training:
            object.__setattr__(module, "training", True)
        for module, name, value, before in self._buffers:
            module._buffers[name] = value
            if value.shape != before.shape:
                value.resize_(before.shape)
            value.data.copy_(before)  # data: autograd need not know
        for model in self.models if self._is_sharded else ():
            # A forward without a backward leaves the weights of FSDP2's root gathered.
            if hasattr(model, "reshard"):
                model.reshard()  # type: ignore[operator]


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """No autocast inside the block; where there is none, nothing is done, which is quicker."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


class StaysFloat32(nn.Module):
    """A module that moves between devices but stays float32 when the model around it becomes half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StaysFloat32:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread inside the block: many short operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Notes:
    """What hooks note while a network runs."""

    def __init__(self) -> None:
        self.recording = False
        self.caught: Any = None
        self.inside: Tensor | None = None  # where texts are not padding
        self.opener: Any = None  # who began the recording


class NotesOfThread(threading.local, Notes):
    """Each thread has notes of its own. Copies start anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NotesOfThread, ()


class Tap:
    """Hooks on a network that several threads may run at once.

    Compiled code has notes of its own, for all threads: it would not see that those of a thread have changed.
    """

    def __init__(self) -> None:
        self._compiled, self._of_thread = Notes(), NotesOfThread()

    @property
    def now(self) -> Notes:
        """The notes of the code that asks."""
        return self._compiled if torch.compiler.is_compiling() else self._of_thread

    def record(self, on: bool) -> None:
        """Begin or end to note, also in compiled code that is called from here."""
        self._compiled.recording = self.now.recording = on

    def collect(self) -> Any:
        """What was caught last; it is kept no longer."""
        now, compiled = self.now, self._compiled
        caught = compiled.caught if now.caught is None else now.caught
        now.caught = compiled.caught = None
        return caught


# --- random numbers


class Randomness:
    """A second set of random number generators (torch, CUDA, numpy, Python), seeded, to swap in: `with randomness:`.

    Generators of `loader` belong to the set too. They are not seeded: from its making on the set draws what they would.
    """

    def __init__(self, seed: int, device: torch.device, loader: Any = None) -> None:
        self.device, self.own = device, generators_of(loader)
        theirs = get_random(device)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the caller's data code may draw from it)
        self.state = self.now()
        set_random(theirs, device)

    def now(self) -> dict[str, Any]:
        """The state of the generators that are in use at present."""
        state = get_random(self.device)
        return {**state, "loader": [own.get_state() for own in self.own]} if self.own else state

    def __enter__(self) -> None:
        """Draw from this set inside the block; afterwards the caller's generators are as they were."""
        self._theirs = self.now()
        self._set(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = self.now()
        self._set(self._theirs)

    def _set(self, state: Mapping[str, Any]) -> None:
        set_random(state, self.device)
        for own, value in zip(self.own, state.get("loader", ())):
            own.set_state(value.cpu())


class RandomnessOfRows:
    """`Randomness` for data that draw from one `generator`, which is quicker: all others are put back after the block.

    Beside a small network's step, swapping takes long. Torch's are the only others that a network draws from.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.generator, self.device = generator, device

    @property
    def state(self) -> dict[str, Any]:
        """That of the generator, at present."""
        return {"rows": self.generator.get_state()}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["rows"].cpu())

    def now(self) -> dict[str, Any]:
        """The same as `state`."""
        return self.state

    def __enter__(self) -> None:
        """Note the state of the caller's generators."""
        self._theirs = get_random(self.device, only_torch=True)

    def __exit__(self, *_: object) -> None:
        set_random(self._theirs, self.device)


def seeded(seed: int, device: torch.device | None = None, loader: Any = None) -> Randomness:
    """Every generator seeded with `seed` inside the block; afterwards the caller's, and the loader's, are as before."""
    return Randomness(seed, device or torch.device("cpu"), loader=loader)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers draw from, which other loaders may share."""
    batches = getattr(loader, "batch_sampler", None)
    parts = loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
    found = (getattr(part, "generator", None) for part in parts)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def get_random(device: torch.device, only_torch: bool = False) -> dict[str, Any]:
    """The state of all generators in types that torch.load(weights_only=True) accepts."""
    state: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if not only_torch:
        name, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
        state["numpy"] = (name, torch.from_numpy(np.asarray(words, np.int64)), *rest)
        state["python"] = random.getstate()
    return state


def set_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators into a state that `get_random` returned."""
    torch.default_generator.set_state(state["torch"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    if "python" in state:
        name, words, *rest = state["numpy"]
        np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
        random.setstate(state["python"])


# --- flags from the device


class AsyncFlags:
    """Bool tensors (T, H) sent from the device to the host without waiting, read in order once they have arrived."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def send(self, flags: Tensor) -> None:
        """Start copying a bool tensor (T, H)."""
        if flags.device.type != "cuda":
            self._pending.append((flags, None))
            return
        here = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        here.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(flags.device))  # which may not be the current device
        self._pending.append((here, event))

    def arrived(self, wait: bool = False) -> Iterator[bool]:
        """Of each row of the tensors that have arrived, whether any flag is set; of all of them if `wait`."""
        while self._pending:
            flags, event = self._pending[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            del self._pending[0]
            yield from map(any, flags.tolist())


# --- several processes

WARN_WAIT, MAX_WAIT = 10.0, 600.0  # seconds that a process waits for the others
_meetings: Counter[str] = Counter()


def n_processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if n_processes() > 1 else 0


def meet(what: str) -> None:
    """Wait for all processes; a warning after a while, and an error if one of them does not call it.

    The wait goes through the group's store, so a process that is at another collective meanwhile is not disturbed.
    """
    if n_processes() == 1:
        return
    _meetings[what] += 1
    store, name = dist.distributed_c10d._get_default_store(), f"doublehead/{what}/{_meetings[what]}"
    store.set(f"{name}/{rank()}", "here")
    missing = {number for number in range(n_processes()) if number != rank()}
    began = warned = time.monotonic()
    while missing := {number for number in missing if not store.check([f"{name}/{number}"])}:
        waited = time.monotonic() - began
        text = (
            f"{what} must be called by all {n_processes()} processes, got no call from {sorted(missing)} "
            f"in {waited:.0f} seconds"
        )
        if waited > MAX_WAIT:
            raise RuntimeError(text)
        if waited > WARN_WAIT and warned == began:
            warned = time.monotonic()
            warn(text)
        time.sleep(0.01)


def from_every_process(value: Any) -> list[Any]:
    """The `value` of each process, in order of rank; every process must call it."""
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
