"""`doublehead export`: a run as one model for production."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import torch
import typer
from torch import Tensor

from doublehead.calibrated import Calibrated
from doublehead.calibration_data import unpack
from doublehead.calibration_head import HeadBank
from doublehead.calibrators import Head
from doublehead.cli.options import importable_here
from doublehead.cli.output import note, show
from doublehead.integrations.export import ALONE, FILES, Form, export_model, model_card
from doublehead.models import build
from doublehead.network import Reader
from doublehead.predictions import Predictions
from doublehead.saving import rebuild, under
from doublehead.shift_guard import ShiftGuard
from doublehead.system import require
from doublehead.training.config import Config
from doublehead.training.run import Inputs
from doublehead.training.run_folder import RunError, RunFolder


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(FILES)}.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write [default: RUN/export].")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Head to export if the run has several [default: guarded, if the run has a guard]."
        ),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="The folder of data sets [default: $DOUBLEHEAD_DATA, or else data].")
    ] = None,
) -> None:
    """Write network, head and shift guard as one model: outputs probs, label and confidence, any batch size.

    The folder also gets a model card, README.md in Hugging Face's format. The exported model is checked against the
    original.

    Example:

        doublehead export runs/cifar10-resnet50 --to onnx
    """
    if to not in FILES:
        raise ValueError(f"--to must be one of {', '.join(FILES)}, got {to!r}")
    if RunFolder(run).finished:
        importable_here(RunFolder(run).config.model)
    found = open_run(run, head, root)
    inputs = found.inputs
    path = export_model(
        found.model,
        output or run / "export",
        found.example,
        to,  # type: ignore[arg-type]
        prepare=inputs.normalise,
        card=card(found, to),  # type: ignore[arg-type]
        facts={"run": inputs.config.name, "head": found.head, "classes": list(inputs.splits.class_names)},
    )
    if inputs.words:
        (path.parent / "vocabulary.txt").write_text("\n".join(inputs.words) + "\n", encoding="utf-8")
    show(str(path))
    note(f"head: {found.head}, model card: {path.parent / 'README.md'}")
    if isinstance(found.model, ShiftGuard) and to != "safetensors":
        note(f"the shift guard {ALONE}")


# --- a run folder as a model


class RunModel(NamedTuple):
    """A trained network with one calibration, perhaps a guard around both, and where it comes from."""

    model: Calibrated | ShiftGuard
    head: str  # the output of the run that it gives
    example: Tensor  # a batch as the exported model gets it: pixels 0..1, or rows of the vocabulary
    inputs: Inputs
    folder: RunFolder


def open_run(path: Path, head: str | None = None, root: Path | None = None) -> RunModel:
    """The model in a finished run folder; the data set is read again from `root`.

    `head` names one of several outputs. A run of the method guarded has two, `auto` and the guard around it: the
    guard is the default there.
    """
    folder = RunFolder(path)
    if not folder.finished:
        raise RunError(f"{path} must be the folder of a finished run: results.json is not there")
    config = folder.config
    name = _pick(config, head)
    inputs = Inputs(config, torch.device("cpu"), None, root)
    net = build(config.model, inputs.splits.n_classes, **{**inputs.model_options, **config.model_options})
    weights = require("safetensors.torch", extra="train").load_file(folder.path / "model.safetensors")
    net.load_state_dict(under(weights, "model."))
    first = unpack(next(iter(inputs.make_eval(inputs.splits.test))), torch.device("cpu"))
    x, *more = first.args
    if more or not isinstance(x, Tensor):
        raise RunError(
            f"{config.model} reads trees, which an exported model cannot: only images and texts can be exported"
        )
    model: Calibrated | ShiftGuard
    if name in config.heads:
        group, names = next((group, names) for group, names in config.head_groups().items() if name in names)
        reader = Reader.of(net, first)
        bank = HeadBank(reader.n_features, reader.n_classes, [config.heads[one] for one in names])
        bank.load_state_dict(under(weights, f"{group}."))
        model = Calibrated(net, bank.take(names.index(name)), reader)
    else:
        model = auto = rebuild(net, folder.results["auto"])
        auto.head.load_state_dict(under(weights, "auto.head."))
        if auto.opinion is not None:
            auto.opinion.load_state_dict(under(weights, "auto.opinion."))
    if name in config.guarded():
        model = ShiftGuard(model)  # reads the layers that it read in training: the head has none of its own
        model.guard.load_state_dict(under(weights, f"{name}."))
    if inputs.normalise is not None:
        x = inputs.normalise.undo(x)
    return RunModel(model.eval(), name, x[:2].contiguous(), inputs, folder)


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


# --- its card


def card(found: RunModel, to: Form = "onnx") -> str:
    """The model card of a run, exported to a form."""
    inputs, shape = found.inputs, (1, *found.example.shape[1:])
    config, images = inputs.config, found.example.is_floating_point()
    reads = "word pieces of the network's own tokenizer, padded with 0"
    if images:
        reads = "pixels in 0..1, which the model normalises itself"
    elif inputs.words:
        reads = "rows of vocabulary.txt: 0 is padding, 1 an unknown word, 2 the word in the first line"
    counts = "{:,} samples to train, {:,} to calibrate, {:,} to test".format(*inputs.splits.sizes)
    test, main = (
        Predictions.load(found.folder.path / f"predictions/test-{name}.npz") for name in (found.head, "main")
    )
    return model_card(
        config.name,
        dataset=config.data,
        data=f"{config.data}: {counts}; inputs are {reads}.",
        method=" ".join(_method(found)),
        test=test,
        before=main,
        classes=inputs.splits.class_names,
        task="image-classification" if images else "text-classification",
        inputs=f'{{"input": np.zeros({shape}, np.{"float32" if images else "int64"})}}',
        to=to,
        settings=asdict(config),
    )


def _method(found: RunModel) -> Iterator[str]:
    """How the network was trained, and what calibrates it."""
    config, head = found.inputs.config, found.head
    epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    yield f"{config.model}, trained for {epochs} with {config.loss.replace('_', ' ')}."
    if head in config.heads:
        spec, every = config.heads[head], config.every_of.get(head, config.every)
        yield (
            f"A calibration head ('{head}': {spec.kind}, beta0 = {spec.beta0:g}) was trained beside it on calibration "
            f"data that the network never saw, one step for every {every} of the network."
        )
    else:
        model = found.model.model if isinstance(found.model, ShiftGuard) else found.model
        stages = cast(Head, model.head).in_words()
        yield (
            "Its logits are calibrated by doublehead's staged head ('auto'), fitted to calibration data that the "
            f"network never saw. The stages in use: {stages}."
        )
        if model.opinion is not None and "pool" in stages:
            yield "The pool includes a second opinion from five heads that were trained beside the network."
    if head in config.guarded():
        yield (
            f"A shift guard ('{head}') lowers the confidence where the inputs of the network's layers lie far from the "
            "calibration data's. It changes no prediction. The exported guard judges each input by itself and raises "
            f"no alarm. It was fitted to calibration images that were perturbed by {config.guarded()[head]!r} (see "
            "`doublehead.data`); on other shifts it may help less."
        )
