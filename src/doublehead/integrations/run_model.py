"""From a finished run folder back to a model: network, a head, perhaps a guard, and an example of what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.data import Images, Normalise, Texts, Trees
from doublehead.double_head import DoubleHead
from doublehead.head_bank import AUTO, HeadBank, HeadSpec
from doublehead.integrations.head_config import put_head
from doublehead.models import build
from doublehead.optional import require
from doublehead.plumbing import unpack
from doublehead.predictions import Predictions
from doublehead.shift_guard import ShiftGuard
from doublehead.training.config import Config
from doublehead.training.inputs import _vectors, load_inputs
from doublehead.training.run_folder import RunError, RunFolder


@dataclass(frozen=True)
class RunModel:
    """A trained network with one head, perhaps with a guard round both, and what its card says."""

    model: DoubleHead | ShiftGuard
    head: str  # the output that it gives
    spec: HeadSpec | None  # None where `auto` chose the scalar temperature
    bends: bool  # whether a smooth curve follows
    guard: str | None  # the perturbation that taught the guard
    example: Tensor  # a batch as the exported model gets it: pixels 0..1, or rows of the vocabulary
    prepare: Normalise | None
    words: tuple[str, ...]  # of a network that reads texts: word i has row i + 2
    classes: tuple[str, ...]
    config: Config
    sizes: tuple[int, int, int]
    test: Predictions
    main: Predictions


def open_run(path: str | Path, head: str | None = None, root: str | None = None) -> RunModel:
    """The model in a finished run folder; the data set is read again from `root`.

    `head` names one of several heads, or a guard. A run of the method guarded has two, `auto` and the guard round it:
    there it is the guard unless named otherwise.
    """
    folder = RunFolder(path)
    if not folder.finished:
        raise RunError(f"{path} must be the folder of a finished run: results.json is not there")
    config = folder.config
    name = _pick(config, head)
    inputs = load_inputs(config, torch.device("cpu"), None, root)
    net = build(config.model, inputs.n_classes, **inputs.model_options)
    weights = require("safetensors.torch", extra="train").load_file(folder.path / "model.safetensors")
    net.load_state_dict(_under(weights, "model."))
    guard = config.guarded().get(name)
    model: DoubleHead | ShiftGuard
    model, spec, bends = _with_head(net, inputs.n_classes, config, "auto" if guard else name, weights)
    if guard:
        model = ShiftGuard(model)  # reads the layers that it read in training: the head brings no others
        model.guard.load_state_dict(_under(weights, f"{name}."))
    (x, *more), _, _ = unpack(next(iter(inputs.make_eval(inputs.splits.test))), torch.device("cpu"))
    if more or not isinstance(x, Tensor):
        raise RunError(
            f"{config.model} reads trees, which an exported model cannot: only images and texts can be exported"
        )
    if isinstance(inputs.splits.test, Images) and inputs.normalise is not None:
        x = inputs.normalise.undo(x)
    words: tuple[str, ...] = ()
    if isinstance(inputs.splits.train, (Texts, Trees)):
        words = _vectors(config, inputs.splits)[0].words
    test, main = (Predictions.load(folder.path / f"predictions/test-{one}.npz") for one in (name, "main"))
    return RunModel(
        model.eval(), name, spec, bends, guard, x[:2].contiguous(), inputs.normalise, words, inputs.splits.class_names,
        config, inputs.splits.sizes, test, main,
    )  # fmt: skip


def _with_head(
    net: nn.Module, n_classes: int, config: Config, name: str, weights: dict[str, Tensor]
) -> tuple[DoubleHead, HeadSpec | None, bool]:
    """The network with the head called `name`, or with `auto`'s bank; the settings of what answers, and if it bends."""
    group = next(group for group, names in config.riders().items() if name in names)
    names = config.riders()[group]
    specs = AUTO if group == "auto" else tuple(config.heads[one] for one in names)
    double = DoubleHead(net, n_classes, head=partial(HeadBank, specs=specs))
    bank = double.head
    assert isinstance(bank, HeadBank)
    bank.load_state_dict(_under(weights, f"{group}."))
    if group == "auto":
        chosen = int(bank.chosen)
        spec = None if chosen == HeadBank.CHOSEN_TEMPERATURE else specs[chosen]
        return double, spec, bank.after.bends
    place = names.index(name)
    return put_head(double, bank.head(place)), specs[place], False


def _pick(config: Config, head: str | None) -> str:
    """The output to export: the one named, or the only one; `guarded` is put round `auto` and stands for it."""
    known = [*(name for names in config.riders().values() for name in names), *config.guarded()]
    if not known:
        raise RunError(
            "this run has no calibration head: train it with a method such as annealing-double-head or auto"
        )
    if head is not None and head not in known:
        raise RunError(f"head must be one of {', '.join(known)}, got {head!r}")
    answering = [name for name in known if name != "auto" or "guarded" not in known]
    if head is None and len(answering) > 1:
        raise RunError(f"this run has several heads, name one with --head: {', '.join(known)}")
    return head or answering[0]


def _under(weights: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
