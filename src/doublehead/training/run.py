"""The living parts of a run: data, network, optimizer and heads on their devices, in one process or many."""

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
from torch.utils.data import BatchSampler, DataLoader

from doublehead.data import FAMILIES, Splits, load, load_test
from doublehead.data.epochs import Batches
from doublehead.double_head import Alternation, DoubleHead
from doublehead.head_bank import AUTO, HeadBank
from doublehead.models import build
from doublehead.optional import require
from doublehead.plumbing import from_every_process, get_random, n_processes, rank, set_random
from doublehead.shift_guard import Guard, StageTap, normalisation_layers
from doublehead.training.config import Config
from doublehead.training.inputs import Inputs, load_inputs
from doublehead.training.methods import make_loss
from doublehead.training.run_folder import RunError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch asks for it in deterministic runs on CUDA


@dataclass
class Run:
    """A run under way."""

    config: Config
    net: nn.Module
    forward: Callable[..., Any]  # the network as training calls it: compiled, or inside DDP
    loss: Callable[..., Tensor]  # per example; a module where it follows the calibration data
    inputs: Inputs
    optimizer: torch.optim.Optimizer
    riders: dict[str, DoubleHead]  # one bank of heads each; "auto" is the one to choose from
    alternations: dict[str, Alternation]
    fabric: Any
    stages: StageTap | None = None  # what the guards read
    guards: dict[str, Guard] = field(default_factory=dict)  # by output; made when training is over
    others: dict[str, Batches] = field(default_factory=dict)  # data sets that `shift` names
    epoch: int = 0
    seconds: float = 0.0  # spent in training steps
    steady: tuple[int, float] = (0, 0.0)  # epochs, and seconds in them, without the first one of each process
    warm: bool = False  # whether this process has run an epoch: the first one compiles and allocates
    gradients: list[Tensor] = field(default_factory=list)  # an epoch each: (steps, H)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on; to be called in every process."""
        randomness = {name: one.state_dict()["randomness"] for name, one in self.alternations.items()}
        return {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "steady": self.steady,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": self.inputs.train.state_dict(),
            "loss": self.loss.state_dict() if isinstance(self.loss, nn.Module) else {},
            "riders": {name: rider.head.state_dict() for name, rider in self.riders.items()},
            "alternations": {name: one.state_dict() for name, one in self.alternations.items()},
            "gradients": self.gradients,
            "randomness": from_every_process({"": get_random(self.fabric.device), **randomness}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""
        self.epoch, self.seconds, self.steady = state["epoch"], state["seconds"], tuple(state["steady"])
        self.gradients = state["gradients"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.inputs.train.load_state_dict(state["train"])
        if isinstance(self.loss, nn.Module):
            self.loss.load_state_dict(state["loss"])
        own = state["randomness"][
            rank() % len(state["randomness"])
        ]  # it may have been another number of them
        for name, rider in self.riders.items():
            rider.head.load_state_dict(state["riders"][name])
            alternation = {**state["alternations"][name], "randomness": own[name], "rank": rank()}
            self.alternations[name].load_state_dict(alternation)
        set_random(own[""], self.fabric.device)


def make_fabric(config: Config, **options: Any) -> Any:
    """Lightning's Fabric: device, precision and distribution."""
    try:
        fabric = require("lightning_fabric", extra="train")  # Fabric packaged alone: quicker to import
    except ImportError:
        fabric = require("lightning.fabric", extra="train")
    try:
        return fabric.Fabric(precision=config.precision, **options)
    except Exception as error:  # Lightning has many; each says which option cannot be had here
        asked = ", ".join(f"{name} {value}" for name, value in options.items())
        raise RunError(f"cannot train with {asked}: {error}") from error


@contextmanager
def loaders_left_alone() -> Iterator[None]:
    """Take back what Fabric does to torch's loaders while it runs a function: where that raises, it leaves them so.

    Lightning could then no longer make its own of a loader, in the same process.
    """
    try:
        yield
    except BaseException:
        for cls in (*_family(DataLoader), *_family(BatchSampler)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                if f"__old{name}" in vars(cls):  # where Fabric keeps the true one
                    setattr(cls, name, vars(cls)[f"__old{name}"])
                    delattr(cls, f"__old{name}")
        raise


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
            cudnn.deterministic, cudnn.benchmark = (
                True,
                False,
            )  # a benchmark may choose another kernel each time
        if sets_workspace:
            os.environ[CUBLAS_WORKSPACE] = ":4096:8"
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = cudnn_before
        if sets_workspace:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def _family(cls: type) -> Iterator[type]:
    yield cls
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield from _family(child)


def set_up(config: Config, fabric: Any, splits: Splits | None, root: str | None) -> Run:
    """Data, network, optimizer and riders, all from the config's seed."""
    inputs = load_inputs(config, fabric.device, splits, root, fabric.global_rank, fabric.world_size)
    others = _others(config, inputs, root)
    torch.manual_seed(config.seed)
    net = build(config.model, inputs.n_classes, **inputs.model_options)
    net = net.to(fabric.device).to(memory_format=inputs.memory_format)  # type: ignore[call-overload]
    if config.guards:
        normalisation_layers(net)  # says now if a guard will have nothing to read
    optimizer = _optimizer(config, net)
    fast = _compiled(config, net)
    forward = fast
    if fabric.world_size > 1:
        forward = _compiled(config, fabric.strategy.setup_module(net))
    riders, alternations = {}, {}
    for group in config.riders():
        rider = DoubleHead(fast, inputs.n_classes, head=partial(HeadBank, specs=_specs(config, group)))
        riders[group], alternations[group] = rider, _alternation(config, group, rider, inputs, optimizer)
    # Dropout: the same whatever was built above, other masks in each process.
    torch.manual_seed(config.seed + 2 + 1000 * fabric.global_rank)
    loss = make_loss(config)
    if isinstance(loss, nn.Module):
        loss.to(fabric.device)
    return Run(config, net, forward, loss, inputs, optimizer, riders, alternations, fabric, others=others)


def _alternation(
    config: Config, group: str, rider: DoubleHead, inputs: Inputs, optimizer: torch.optim.Optimizer
) -> Alternation:
    batches = inputs.calib_for_auto if group == "auto" else inputs.calib()
    assert batches is not None
    first = config.riders()[group][0]  # all heads of a group share their perturbation and period
    return Alternation(
        rider,
        batches,
        every=config.every_of.get(first, config.every),
        augment=inputs.perturbation(config.augment_of.get(first, config.calib_augment)),
        lr=optimizer,
        lr_scale=config.calib_lr,
        weight_decay=config.calib_weight_decay,
        clip=config.calib_clip,
        seed=config.seed + 1,
    )


def _specs(config: Config, group: str) -> tuple[Any, ...]:
    return AUTO if group == "auto" else tuple(config.heads[name] for name in config.riders()[group])


def _compiled(config: Config, net: nn.Module) -> nn.Module:
    if not config.compile:
        return net
    on_cuda = next(net.parameters()).device.type == "cuda"
    mode = "reduce-overhead" if on_cuda and n_processes() == 1 else "default"  # CUDA graphs
    return torch.compile(net, mode=mode)  # type: ignore[return-value]


def _others(config: Config, inputs: Inputs, root: str | None) -> dict[str, Batches]:
    """The data sets among `shift`, read now: that one is missing should not come out after training."""
    made: dict[str, Batches] = {}
    for asked in config.shift:
        if asked == "cifar10c" or asked.partition(":")[0] in FAMILIES:
            if inputs.normalise is None:
                raise ValueError(f"shift must name a data set for words, got {asked!r}, which is for images")
            if asked.startswith("saturate") and not inputs.coloured:
                raise ValueError(
                    f"shift must be one for grey images, got {asked!r}, which is for coloured ones"
                )
            continue
        made[asked] = inputs.make_eval(load(asked).test if ":" in asked else load_test(asked, root))
    return made


def _optimizer(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in net.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters,
        config.lr,
        config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.momentum > 0,
        fused=True,
    )


def on_first_process(fabric: Any, write: Callable[[], object]) -> None:
    """Let the first process write while the others wait; what goes wrong there stops them all."""
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
    """Take leave of the other processes in an orderly way: gloo's threads would else end with a complaint."""
    atexit.unregister(_leave_processes)
    atexit.register(_leave_processes)


def _leave_processes() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
