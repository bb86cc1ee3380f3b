"""The only training loop. It knows no method by name: a method supplies its loss, and heads ride along."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from doublehead import metrics
from doublehead.data.splits import Splits
from doublehead.double_head import Alternation, DoubleHead
from doublehead.head_bank import AUTO, HeadBank, Selection
from doublehead.last_layer import logits_of
from doublehead.models import build
from doublehead.optional import require
from doublehead.plumbing import average_over_processes, get_random, set_random
from doublehead.training.config import Config
from doublehead.training.evaluation import (
    epoch_numbers,
    final_numbers,
    held_back_readings,
    predict,
    shift_numbers,
)
from doublehead.training.inputs import Inputs, load_inputs
from doublehead.training.methods import objective
from doublehead.training.run_folder import RunError, RunFolder, environment
from doublehead.training.schedules import learning_rate

GRADIENT_STEPS = (
    0,
    4,
    9,
    -10,
    -5,
    -1,
)  # calibration steps of an epoch: the paper's first, 5th, 10th and last ones


@dataclass
class Run:
    """The living parts of a run."""

    config: Config
    net: nn.Module
    forward: Callable[..., Any]  # the network as training calls it: compiled, or inside DDP
    inputs: Inputs
    optimizer: torch.optim.Optimizer
    riders: dict[str, DoubleHead]  # one bank of heads each; "auto" is the one to choose from
    alternations: dict[str, Alternation]
    fabric: Any
    epoch: int = 0
    seconds: float = 0.0  # spent in training steps
    selection: Selection | None = None
    gradients: list[Tensor] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on."""
        return {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": self.inputs.train.state_dict(),
            "riders": {name: rider.head.state_dict() for name, rider in self.riders.items()},
            "alternations": {name: one.state_dict() for name, one in self.alternations.items()},
            "gradients": self.gradients,
            "randomness": get_random(self.fabric.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""
        self.epoch, self.seconds, self.gradients = state["epoch"], state["seconds"], state["gradients"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.inputs.train.load_state_dict(state["train"])
        for name, rider in self.riders.items():
            rider.head.load_state_dict(state["riders"][name])
            self.alternations[name].load_state_dict(state["alternations"][name])
        set_random(state["randomness"], self.fabric.device)


def train(
    config: Config,
    folder: RunFolder,
    splits: Splits | None = None,
    *,
    root: str | None = None,
    devices: int = 1,
    accelerator: str = "auto",
    strategy: str = "auto",
    checkpoint_seconds: float = 0.0,
    report: Callable[[dict[str, Any]], None] | None = None,
    tick: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]:
    """Train what `config` says into `folder`, or go on where it was left; return results.json.

    `report` gets each line of metrics, `tick` the epoch, step and steps per epoch. A finished run is not trained again.
    A checkpoint is written after each epoch, or where epochs are short only every `checkpoint_seconds`.
    """
    if folder.finished:
        folder.begin(config)
        return folder.results
    fabric = make_fabric(config, accelerator=accelerator, devices=devices, strategy=strategy)
    if fabric.world_size > 1 and not torch.distributed.is_initialized():
        fabric.launch()
    with folder.locked() if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            folder.begin(config)
        run = set_up(config, fabric, splits, root)
        _resume(run, folder)
        if fabric.is_global_zero:
            folder.write_text("environment.json", _as_json(environment(fabric.device)))
        saved = time.perf_counter()
        while run.epoch < config.epochs:
            row = run_epoch(run, tick)
            if fabric.is_global_zero:
                folder.append_line("metrics.jsonl", row)
                if run.epoch == config.epochs or time.perf_counter() - saved >= checkpoint_seconds:
                    folder.save_checkpoint(run.state_dict())
                    saved = time.perf_counter()
                if report:
                    report(row)
            fabric.barrier()
        return _finish(run, folder, root)


def make_fabric(config: Config, **options: Any) -> Any:
    """Lightning's Fabric: device, precision and distribution."""
    try:
        fabric = require("lightning.fabric", extra="train")
    except ImportError:
        fabric = require("lightning_fabric", extra="train")  # the same code, packaged alone
    return fabric.Fabric(precision=config.precision, **options)


def set_up(config: Config, fabric: Any, splits: Splits | None, root: str | None) -> Run:
    """Data, network, optimizer and riders, all from the config's seed."""
    inputs = load_inputs(config, fabric.device, splits, root, fabric.global_rank, fabric.world_size)
    torch.manual_seed(config.seed)
    net = build(config.model, inputs.n_classes, **inputs.model_options)
    net = net.to(fabric.device).to(memory_format=inputs.memory_format)  # type: ignore[call-overload]
    optimizer = _optimizer(config, net)
    fast: nn.Module = net
    if config.compile:
        mode = "reduce-overhead" if fabric.device.type == "cuda" else "default"
        fast = torch.compile(net, mode=mode)  # type: ignore[assignment]
    forward = fabric.setup_module(net) if fabric.world_size > 1 else fast
    riders, alternations = {}, {}
    for group, names in config.riders().items():
        auto = group == "auto"
        specs = AUTO if auto else tuple(config.heads[name] for name in names)
        rider = DoubleHead(fast, inputs.n_classes, head=partial(HeadBank, specs=specs))
        alternation = Alternation(
            rider,
            inputs.calib_for_auto if auto else inputs.calib(),
            every=config.every,
            augment=inputs.perturbation(config.augment_of.get(names[0], config.calib_augment)),
            lr=optimizer,
            lr_scale=config.calib_lr,
            weight_decay=config.calib_weight_decay,
            clip=config.calib_clip,
            seed=config.seed + 1,
        )
        riders[group], alternations[group] = rider, alternation
    torch.manual_seed(config.seed + 2)  # dropout: the same whatever was built above
    return Run(config, net, forward, inputs, optimizer, riders, alternations, fabric)


def run_epoch(run: Run, tick: Callable[[int, int, int], None] | None = None) -> dict[str, Any]:
    """One pass over the training data with its calibration steps; a line of metrics."""
    config, n_steps = run.config, len(run.inputs.train)
    prepare, loss_of = objective(config)
    run.net.train()
    started, total = time.perf_counter(), torch.zeros((), device=run.fabric.device)
    norms: list[Tensor] = []
    for step, batch in enumerate(run.inputs.train):
        at = step / n_steps
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(config, (run.epoch + at) / config.epochs)
        x, y = prepare(*batch)
        if config.compile:
            torch.compiler.cudagraph_mark_step_begin()  # the last step's outputs may be overwritten
        with run.fabric.autocast():
            loss = loss_of(logits_of(run.forward(x)), y).mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        total += loss.detach()  # stays on the device: nothing here waits for it
        with run.fabric.autocast():
            for name, alternation in run.alternations.items():
                stepped = alternation.step(at)
                if config.record_gradients and name == "heads" and stepped is not None:
                    assert alternation.grad_norm is not None
                    norms.append(alternation.grad_norm)
        if tick:
            tick(run.epoch, step + 1, n_steps)
    row: dict[str, Any] = {"epoch": run.epoch, "train_loss": float(average_over_processes(total)) / n_steps}
    run.seconds += time.perf_counter() - started  # reading the loss has waited for the device
    if not math.isfinite(row["train_loss"]):
        raise RunError(
            f"the training loss is {row['train_loss']} in epoch {run.epoch}: lower lr (now {config.lr:g})"
        )
    if norms:
        run.gradients.append(torch.stack([norms[i] for i in GRADIENT_STEPS if -len(norms) <= i < len(norms)]))
    run.epoch += 1
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row["beta"] = _betas(run)
    row["skipped"] = {name: one.skipped for name, one in run.alternations.items()}
    if run.epoch == config.epochs or run.epoch % config.evaluate_every == 0:
        row["test"] = epoch_numbers(predict(run, run.inputs.make_eval(run.inputs.splits.test)))
    row["seconds"] = round(run.seconds, 3)
    return row


def _betas(run: Run) -> dict[str, float]:
    """Each head's beta at the last calibration step of the epoch."""
    betas: dict[str, float] = {}
    for group, names in run.config.riders().items():
        beta = run.alternations[group].beta
        if group != "auto" and beta is not None:
            betas |= dict(zip(names, beta.flatten().tolist()))
    return betas


def _resume(run: Run, folder: RunFolder) -> None:
    state = folder.load_checkpoint(run.fabric.device)
    if state is not None:
        run.load_state_dict(state)
    if run.fabric.is_global_zero:
        folder.keep_lines("metrics.jsonl", lambda row: row["epoch"] < run.epoch)


def _finish(run: Run, folder: RunFolder, root: str | None) -> dict[str, Any]:
    """Choose, predict, measure and write; results.json comes last."""
    if "auto" in run.riders:
        bank = run.riders["auto"].head
        assert isinstance(bank, HeadBank)
        run.selection = bank.select(held_back_readings(run))
    splits = run.inputs.splits
    test = predict(run, run.inputs.make_eval(splits.test))
    calib = predict(run, run.inputs.make_eval(splits.calib))
    trained = {"main": predict(run, run.inputs.make_eval(splits.train))["main"]}
    numbers = final_numbers(test, calib)
    temperatures = {name: one["temperature"] for name, one in numbers.items()}
    results = {
        "config": asdict(run.config),
        "environment": environment(run.fabric.device),
        "sizes": splits.sizes,
        "train_seconds": round(run.seconds, 2),
        "images_per_second": round(
            run.epoch * len(run.inputs.train) * run.config.batch_size / run.seconds, 1
        ),
        "selection": asdict(run.selection) if run.selection else None,
        "outputs": numbers,
        "train_accuracy": float(metrics.accuracy(trained["main"])),
        "shift": shift_numbers(run, test, temperatures, root) if run.config.shift else {},
        "processes": run.fabric.world_size,
    }
    if run.fabric.is_global_zero:
        for split, predictions in (("train", trained), ("calib", calib), ("test", test)):
            for name, p in predictions.items():
                p.save(folder.path / "predictions" / f"{split}-{name}.npz")
        if run.gradients:
            _save_gradients(run, folder)
        _save_weights(run, folder)
        folder.write_text("results.json", _as_json(results))
        folder.drop_checkpoints()
    run.fabric.barrier()
    return json.loads(_as_json(results))  # type: ignore[no-any-return]


def _save_weights(run: Run, folder: RunFolder) -> None:
    tensors = {f"model.{key}": value for key, value in run.net.state_dict().items()}
    for name, rider in run.riders.items():
        tensors |= {f"{name}.{key}": value for key, value in rider.head.state_dict().items()}
    save = require("safetensors.torch", extra="train").save
    packed = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    folder.write("model.safetensors", lambda file: file.write(packed))


def _save_gradients(run: Run, folder: RunFolder) -> None:
    norms = torch.stack(run.gradients).cpu().numpy()  # (epochs, steps, H)
    names = np.array(run.config.riders()["heads"])
    folder.write("gradients.npz", lambda file: np.savez_compressed(file, norms=norms, heads=names))


def _optimizer(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in net.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters, config.lr, config.momentum, weight_decay=config.weight_decay, nesterov=True, fused=True
    )


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, default=list) + "\n"
