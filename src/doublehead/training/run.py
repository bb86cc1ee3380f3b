"""The parts of a run: data, network, optimizer and calibration heads on their devices, in one process or several."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from doublehead.calibrated import Calibrated
from doublehead.calibration_data import unpack
from doublehead.data import Splits, load, load_test
from doublehead.data.batches import Batches
from doublehead.double_head import DoubleHead
from doublehead.guard import Guard
from doublehead.losses import LOSSES, mixed, mixup
from doublehead.models import build
from doublehead.network import Reader
from doublehead.optional import require
from doublehead.shift_guard import StageTap, layers_to_read
from doublehead.torch_tools import from_every_process, get_random, n_processes, rank, set_random
from doublehead.training.config import ADAPTIVE, Config, corruptions_of
from doublehead.training.inputs import Inputs, load_inputs
from doublehead.training.run_folder import RunError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch asks for it in deterministic runs on CUDA


@dataclass
class Run:
    """A run in progress."""

    config: Config
    net: nn.Module
    forward: Callable[..., Any]  # the network as training calls it: compiled, or inside DDP
    loss: Callable[..., Tensor]  # per example; a module where it is updated from the calibration data
    inputs: Inputs
    optimizer: torch.optim.Optimizer
    reader: Reader  # of `net`
    companions: dict[str, DoubleHead]  # by group of heads; "auto" trains the second opinion
    fabric: Any
    auto: Calibrated | None = None  # fitted when training is over, as are the guards round it
    guards: dict[str, Guard] = field(default_factory=dict)  # by output
    stages: StageTap | None = None  # what the guards read
    others: dict[str, Batches] = field(default_factory=dict)  # data sets that `shift` names
    epoch: int = 0
    seconds: float = 0.0  # spent in training steps
    steady: tuple[int, float] = (0, 0.0)  # epochs, and seconds in them, without the first one of each process
    warm: bool = False  # whether this process has run an epoch: the first one compiles and allocates
    gradients: list[Tensor] = field(default_factory=list)  # one per epoch: (steps, H)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on; call it in every process."""
        companions = {name: companion.state_dict() for name, companion in self.companions.items()}
        randomness = {name: state["randomness"] for name, state in companions.items()}
        return {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "steady": self.steady,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": self.inputs.train.state_dict(),
            "loss": self.loss.state_dict() if isinstance(self.loss, nn.Module) else {},
            "companions": companions,
            "gradients": self.gradients,
            "randomness": from_every_process({"": get_random(self.fabric.device), **randomness}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.epoch, self.seconds, self.steady = state["epoch"], state["seconds"], tuple(state["steady"])
        self.gradients = state["gradients"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.inputs.train.load_state_dict(state["train"])
        if isinstance(self.loss, nn.Module):
            self.loss.load_state_dict(state["loss"])
        # There may have been another number of processes.
        own = state["randomness"][rank() % len(state["randomness"])]
        for name, companion in self.companions.items():
            # All processes are at the same place of the data; only random numbers are their own.
            companion.load_state_dict({**state["companions"][name], "randomness": own[name], "rank": rank()})
        set_random(own[""], self.fabric.device)


def set_up(config: Config, fabric: Any, splits: Splits | None, root: str | os.PathLike[str] | None) -> Run:
    """Data, network, optimizer and heads, all from the config's seed."""
    inputs = load_inputs(config, fabric.device, splits, root, fabric.global_rank, fabric.world_size)
    others = _others(config, inputs, root)
    torch.manual_seed(config.seed)
    net = build(config.model, inputs.n_classes, **{**inputs.model_options, **config.model_options})
    net = net.to(fabric.device).to(memory_format=inputs.memory_format)  # type: ignore[call-overload]
    if config.guards:
        layers_to_read(net)  # raises where a guard would have nothing to read
    optimizer = _optimizer(config, net)
    first = next(iter(inputs.whole(inputs.splits.calib)))
    reader = Reader.of(net, unpack(first, fabric.device))
    fast = _compiled(config, net)
    forward = fast
    if fabric.world_size > 1:
        forward = _compiled(config, fabric.strategy.setup_module(net))
    groups = config.head_groups() | ({"auto": ["auto"]} if config.auto else {})
    companions = {
        group: _companion(config, names, fast, inputs, optimizer) for group, names in groups.items()
    }
    # Dropout: the same whatever was built above, other masks in each process.
    torch.manual_seed(config.seed + 2 + 1000 * fabric.global_rank)
    loss = make_loss(config)
    if isinstance(loss, nn.Module):
        loss.to(fabric.device)
    return Run(config, net, forward, loss, inputs, optimizer, reader, companions, fabric, others=others)


def _companion(
    config: Config, names: list[str], network: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer
) -> DoubleHead:
    """The heads of one group; all of them have the same perturbation and period."""
    batches = inputs.make_calib()
    start = batches.state_dict()
    companion = DoubleHead(
        network,
        batches,
        follow=optimizer,
        heads=None if names == ["auto"] else [config.heads[name] for name in names],
        every=config.every_of.get(names[0], config.every),
        augment=inputs.perturbation(config.augment_of.get(names[0], config.calib_augment)),
        weight_decay=config.calib_weight_decay,
        clip=config.calib_clip,
        seed=config.seed + 1,
    )
    batches.load_state_dict(start)  # it has looked at the first batch
    return companion


def make_loss(config: Config) -> Callable[..., Tensor]:
    """The loss per example: a function, or a module whose `update(calib)` is called after each epoch."""
    if config.loss in ADAPTIVE:
        return ADAPTIVE[config.loss](**config.loss_options)  # type: ignore[arg-type]
    return partial(LOSSES[config.loss], **config.loss_options)


def objective(
    config: Config, loss: Callable[..., Tensor]
) -> tuple[Callable[..., tuple[Any, Any]], Callable[[Tensor, Any], Tensor]]:
    """What to do with a batch before the network sees it, and the loss per example of the logits."""
    if config.mixup:
        return partial(mixup, alpha=config.mixup), partial(mixed, loss)
    return lambda x, y: (x, y), loss


def _optimizer(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in net.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.lr, weight_decay=config.weight_decay, fused=True)
    if config.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters,
        config.lr,
        config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.momentum > 0,
        fused=True,
    )


def _compiled(config: Config, net: nn.Module) -> nn.Module:
    if not config.compile:
        return net
    on_cuda = next(net.parameters()).device.type == "cuda"
    mode = "reduce-overhead" if on_cuda and n_processes() == 1 else "default"  # CUDA graphs
    return torch.compile(net, mode=mode)  # type: ignore[return-value]


def _others(config: Config, inputs: Inputs, root: str | os.PathLike[str] | None) -> dict[str, Batches]:
    """The data sets among `shift`, read before training so that a missing one is noticed."""
    made: dict[str, Batches] = {}
    for asked in config.shift:
        if not corruptions_of(asked):
            made[asked] = inputs.make_eval(load(asked).test if ":" in asked else load_test(asked, root))
        elif inputs.normalise is None:
            raise ValueError(f"shift must name a data set for words, got {asked!r}, which is for images")
        elif asked.startswith("saturate") and not inputs.coloured:
            raise ValueError(f"shift must be one for grey images, got {asked!r}, which is for coloured ones")
    return made


# --- devices and processes


def make_fabric(config: Config, **options: Any) -> Any:
    """Lightning's Fabric: device, precision and distribution."""
    try:
        fabric = require("lightning_fabric", extra="train")  # Fabric packaged alone: quicker to import
    except ImportError:
        fabric = require("lightning.fabric", extra="train")
    try:
        return fabric.Fabric(precision=config.precision, **options)
    except Exception as error:  # Lightning has many; each says which option is not available
        asked = ", ".join(f"{name} {value}" for name, value in options.items())
        raise RunError(f"cannot train with {asked}: {error}") from error


@contextmanager
def algorithms(*, deterministic: bool) -> Iterator[None]:
    """Torch's deterministic algorithms, or its usual ones, inside the block; all settings are restored after it.

    A deterministic run raises where torch has no deterministic algorithm. cuBLAS reads its variable when a process
    first uses it: where CUDA was used before, CUBLAS_WORKSPACE_CONFIG must have been set from the start.
    """
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not (enabled or deterministic):  # nothing to change, and the change would import torch's compiler
        yield
        return
    cudnn = torch.backends.cudnn
    cudnn_before = cudnn.deterministic, cudnn.benchmark
    sets_workspace = deterministic and CUBLAS_WORKSPACE not in os.environ
    try:
        torch.use_deterministic_algorithms(deterministic)
        if deterministic:
            # a benchmark may choose another kernel each time
            cudnn.deterministic, cudnn.benchmark = True, False
        if sets_workspace:
            os.environ[CUBLAS_WORKSPACE] = ":4096:8"
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = cudnn_before
        if sets_workspace:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def on_first_process(fabric: Any, write: Callable[[], object]) -> None:
    """Let the first process write while the others wait; its `RunError` is raised in all of them."""
    problem = ""
    if fabric.is_global_zero:
        try:
            write()
        except RunError as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem:
        raise RunError(problem)


def leave_processes_at_exit() -> None:
    """End the process group in an orderly way; gloo's threads would print errors otherwise."""
    atexit.unregister(_leave_processes)
    atexit.register(_leave_processes)


def _leave_processes() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
