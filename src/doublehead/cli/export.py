"""`doublehead export`: a run as one model for production."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from doublehead.calibrated import Calibrated
from doublehead.calibration_data import Batch, unpack
from doublehead.calibration_head import HeadBank, HeadSpec
from doublehead.cli.options import importable_here
from doublehead.cli.output import note, show
from doublehead.data import Images, Normalise
from doublehead.integrations.export import ALONE, FILES, export_model, model_card
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
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
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
        Path | None, typer.Option(help="The folder that holds the data sets [default: data].")
    ] = None,
) -> None:
    """Write network, head and shift guard as one model: outputs probs, label and confidence, any batch size.

    The folder also gets a model card, README.md in Hugging Face's format. The exported model is checked against the
    original.
    """
    if to not in FILES:
        raise ValueError(f"--to must be one of {', '.join(FILES)}, got {to!r}")
    if RunFolder(run).finished:
        importable_here(RunFolder(run).config.model)
    found = open_run(run, head, None if root is None else str(root))
    path = export_model(
        found.model,
        output or run / "export",
        found.example,
        to,  # type: ignore[arg-type]
        prepare=found.prepare,
        card=card(found),
        facts={"run": found.config.name, "head": found.head, "classes": list(found.classes)},
    )
    if found.words:
        (path.parent / "vocabulary.txt").write_text("\n".join(found.words) + "\n", encoding="utf-8")
    show(str(path))
    note(f"head: {found.head}, model card: {path.parent / 'README.md'}")
    if found.guard and to != "safetensors":
        note(f"the shift guard {ALONE}")


# --- a run folder as a model


@dataclass(frozen=True)
class RunModel:
    """A trained network with one calibration, an optional guard around both, and what its card says."""

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
    inputs = Inputs(config, torch.device("cpu"), None, root)
    net = build(config.model, inputs.splits.n_classes, **{**inputs.model_options, **config.model_options})
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
    test, main = (Predictions.load(folder.path / f"predictions/test-{one}.npz") for one in (name, "main"))
    return RunModel(
        model.eval(), name, spec, guard, x[:2].contiguous(), inputs.normalise, inputs.words, inputs.splits.class_names,
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


# --- its card


def card(found: RunModel) -> str:
    """The model card of a run."""
    config, shape = found.config, [1, *found.example.shape[1:]]
    train, calib, test = found.sizes
    images = found.example.is_floating_point()
    epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    trained = f"{config.model}, trained for {epochs} with {config.loss.replace('_', ' ')}."
    pixels = "pixels in 0..1, which the model normalises itself"
    words = "rows of vocabulary.txt: 0 is padding, 1 an unknown word, 2 the word in the first line"
    if not found.words:
        words = "word pieces of the network's own tokenizer, padded with 0"
    counts = f"{train:,} samples to train, {calib:,} to calibrate, {test:,} to test"
    return model_card(
        config.name,
        dataset=config.data,
        data=f"{config.data}: {counts}; inputs are {pixels if images else words}.",
        method=" ".join([trained, *_calibration(found)]),
        test=found.test,
        before=found.main,
        classes=found.classes,
        task="image-classification" if images else "text-classification",
        inputs=f'{{"input": np.zeros({tuple(shape)}, np.{"float32" if images else "int64"})}}',
        settings=asdict(config),
    )


def _calibration(found: RunModel) -> Iterator[str]:
    """What calibrates the network, a sentence or two each."""
    if found.spec is None:
        yield (
            "Its logits are calibrated by doublehead's staged head ('auto'), fitted to calibration data that the "
            "network never saw, with a second opinion from five heads that were trained beside it."
        )
    else:
        every = found.config.every_of.get(found.head, found.config.every)
        yield (
            f"A calibration head ('{found.head}': {found.spec.kind}, beta0 = {found.spec.beta0:g}) was trained beside "
            f"it on calibration data that the network never saw, one step for every {every} of the network."
        )
    if found.guard:
        yield (
            f"A shift guard ('{found.head}') lowers the confidence where the inputs of the network's layers "
            "lie far from the calibration data's. It changes no prediction. The exported guard judges each input by "
            "itself and raises no alarm. It was fitted to calibration images that "
            f"were perturbed by {found.guard!r} (see `doublehead.data`); on other shifts it may help less."
        )
