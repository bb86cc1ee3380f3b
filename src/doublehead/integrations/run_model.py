"""From a finished run folder back to a model: network, calibration, perhaps a guard, and an example input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.calibrated import Calibrated
from doublehead.calibration_data import Batch, unpack
from doublehead.calibration_head import HeadBank, HeadSpec
from doublehead.data import Images, Normalise, Texts, Trees
from doublehead.models import build
from doublehead.network import Reader
from doublehead.optional import require
from doublehead.predictions import Predictions
from doublehead.saving import rebuild, under
from doublehead.shift_guard import ShiftGuard
from doublehead.training.config import Config
from doublehead.training.inputs import load_inputs, word_vectors
from doublehead.training.run_folder import RunError, RunFolder


@dataclass(frozen=True)
class RunModel:
    """A trained network with one calibration, perhaps with a guard round both, and what its card says."""

    model: Calibrated | ShiftGuard
    head: str  # the output of the run that it gives
    spec: HeadSpec | None  # None for `auto`
    guard: str | None  # the perturbation that the guard was fitted to
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

    `head` names one of several outputs. A run of the method guarded has two, `auto` and the guard round it: the
    guard is the default there.
    """
    folder = RunFolder(path)
    if not folder.finished:
        raise RunError(f"{path} must be the folder of a finished run: results.json is not there")
    config = folder.config
    name = _pick(config, head)
    inputs = load_inputs(config, torch.device("cpu"), None, root)
    net = build(config.model, inputs.n_classes, **inputs.model_options)
    weights = require("safetensors.torch", extra="train").load_file(folder.path / "model.safetensors")
    net.load_state_dict(under(weights, "model."))
    first = unpack(next(iter(inputs.make_eval(inputs.splits.test))), torch.device("cpu"))
    guard, spec = config.guarded().get(name), config.heads.get(name)
    model: Calibrated | ShiftGuard
    if spec is not None:
        model = _with_head(net, first, config, name, weights)
    else:
        auto: Calibrated = rebuild(net, folder.results["auto"])
        auto.head.load_state_dict(under(weights, "auto.head."))
        if auto.opinion is not None:
            auto.opinion.load_state_dict(under(weights, "auto.opinion."))
        model = auto
    if guard:
        model = ShiftGuard(model)  # reads the layers that it read in training: the head has none of its own
        model.guard.load_state_dict(under(weights, f"{name}."))
    x, *more = first.args
    if more or not isinstance(x, Tensor):
        raise RunError(
            f"{config.model} reads trees, which an exported model cannot: only images and texts can be exported"
        )
    if isinstance(inputs.splits.test, Images) and inputs.normalise is not None:
        x = inputs.normalise.undo(x)
    words: tuple[str, ...] = ()
    if isinstance(inputs.splits.train, (Texts, Trees)):
        words = word_vectors(config, inputs.splits)[0].words
    test, main = (Predictions.load(folder.path / f"predictions/test-{one}.npz") for one in (name, "main"))
    return RunModel(
        model.eval(), name, spec, guard, x[:2].contiguous(), inputs.normalise, words, inputs.splits.class_names,
        config, inputs.splits.sizes, test, main,
    )  # fmt: skip


def _with_head(
    net: nn.Module, first: Batch, config: Config, name: str, weights: dict[str, Any]
) -> Calibrated:
    """The network with the named head as it was trained."""
    group, names = next((group, names) for group, names in config.head_groups().items() if name in names)
    reader = Reader.of(net, first)
    bank = HeadBank(reader.n_features, reader.n_classes, [config.heads[one] for one in names])
    bank.load_state_dict(under(weights, f"{group}."))
    return Calibrated(net, bank.take(names.index(name)), reader)


def _pick(config: Config, head: str | None) -> str:
    """The output to export: the one named, or the only one; `guarded` comes before the `auto` inside it."""
    known = [*config.heads, *(["auto"] if config.auto else []), *config.guarded()]
    if not known:
        raise RunError(
            "this run has no calibration head: train it with a method such as annealing-double-head or auto"
        )
    if head is not None and head not in known:
        raise RunError(f"head must be one of {', '.join(known)}, got {head!r}")
    outputs = [name for name in known if name != "auto" or "guarded" not in known]
    if head is None and len(outputs) > 1:
        raise RunError(f"this run has several heads, name one with --head: {', '.join(known)}")
    return head or outputs[0]
