"""Keep a calibrated network in one safetensors file: weights, and as JSON in its header what was put together.

No pickle is written or read, and nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doublehead import calibrators
from doublehead.calibrated import Calibrated
from doublehead.calibration_head import CalibrationHead, HeadSpec
from doublehead.network import VIEWS, Reader
from doublehead.shift_guard import ShiftGuard
from doublehead.system import read_file, write_file
from doublehead.tasks import LogitsOf
from doublehead.torch_tools import device_of

WEIGHTS = "model.safetensors"
FORM = ("layer", "outputs", "task", "n_classes", "n_features", "n_labels", "ignore_index")  # of a Reader


def save(model: Calibrated | ShiftGuard, path: str | Path) -> Path:
    """Write network, calibration and guard into the folder `path`; returns the file.

    The weights of a network that FSDP has sharded are put together, for which all processes must call this.
    """
    file = Path(path) / WEIGHTS
    write_file(file, model.state_dict(), describe(model))
    return file


@torch.inference_mode(False)  # a guard's window moves on outside of it, too
def load(path: str | Path, network: nn.Module, *, logits_of: LogitsOf | None = None) -> Any:
    """What `save` wrote to the folder `path`, put into `network`, a network of the same architecture.

    It is a `Calibrated`, or the `ShiftGuard` that was saved. The weights go to the network's device. A model that
    was made with `logits_of` needs it again, since a file holds no functions.

    >>> import tempfile, torch, doublehead
    >>> def make_network():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.randn(300, 4), torch.randint(3, (300,))
    >>> model = doublehead.calibrate(make_network(), (x, y))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = model.save(folder)
    ...     again = load(folder, make_network())
    >>> torch.equal(again(x), model(x))
    True
    """
    file = Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a folder with {WEIGHTS}, as model.save writes it, got {path}")
    facts, tensors = read_file(file, device_of(network))
    if not facts.keys() & {"head", "guard"}:
        raise ValueError(f"{file} must be a file that model.save wrote, got that of a calibrator")
    model = rebuild(network, facts, logits_of)
    model.load_state_dict(tensors)
    return model.eval()


def describe(model: Calibrated | ShiftGuard) -> dict[str, Any]:
    """What is needed to put an equal calibration beside an equal network; the weights are kept apart."""
    if isinstance(model, ShiftGuard):
        inner = describe(model.model) if isinstance(model.model, Calibrated) else {}
        guard = {"layers": model.tap.layers, "window": model.guard.window, "rate": model.guard.rate}
        return {**inner, "guard": guard}
    reader = model.reader
    names = {view: name for name, view in VIEWS.items()}
    unknown = [view for view in reader.views if view not in names]
    if unknown:
        raise TypeError(
            "a model with views of your own cannot be described in a file; keep model.head.state_dict()"
        )
    return {
        **{name: getattr(reader, name) for name in FORM},
        "views": [names[view] for view in reader.views],
        "logits_of": reader.logits_of is not None,
        "head": _describe_head(model.head),
        "opinion": None if model.opinion is None else _describe_head(model.opinion),
    }


def _describe_head(head: nn.Module) -> dict[str, Any]:
    if isinstance(head, CalibrationHead):
        return {"heads": [asdict(spec) for spec in head.specs]}
    return calibrators.describe(head)  # type: ignore[arg-type]


def rebuild(network: nn.Module, facts: Mapping[str, Any], logits_of: LogitsOf | None = None) -> Any:
    """`network` with a calibration as `describe` wrote it down, its weights not loaded yet."""
    model = network
    if "head" in facts:
        if facts["logits_of"] and logits_of is None:
            raise TypeError("logits_of must be the function with which the saved model was made, got None")
        reader = Reader(
            network, **{name: facts[name] for name in FORM}, views=facts["views"], logits_of=logits_of
        )
        head, opinion = (
            None if facts[name] is None else _rebuild_head(facts[name], reader).to(device_of(network))
            for name in ("head", "opinion")
        )
        model = Calibrated(network, head, reader, opinion)  # type: ignore[arg-type]
    return ShiftGuard(model, **facts["guard"]) if "guard" in facts else model


def _rebuild_head(facts: Mapping[str, Any], reader: Reader) -> nn.Module:
    if "heads" not in facts:
        return calibrators.make(facts["method"], **facts["params"])
    specs = [HeadSpec(**{**spec, "reads": tuple(spec["reads"])}) for spec in facts["heads"]]
    return CalibrationHead(reader.n_features, reader.n_classes, *specs, n_labels=reader.n_labels)


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
