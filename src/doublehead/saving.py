"""Keep a calibrated network: weights as safetensors, and what was put together as JSON. No pickle is ever executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from doublehead.calibration_head import CalibrationHead, HeadSpec
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.table import CALIBRATORS, make
from doublehead.double_head import Calibrated
from doublehead.network import VIEWS, Reader
from doublehead.optional import require

WEIGHTS, CONFIG = "model.safetensors", "doublehead.json"


def save(model: Calibrated, path: str | Path) -> Path:
    """Write the network's weights and its calibration into the folder `path`; returns the file of weights."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    facts = describe(model)
    # Copies in plain memory order: shared tensors and those of channels_last networks are refused otherwise.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    require("safetensors.torch", extra="export").save_file(tensors, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(facts, indent=1) + "\n")
    return path / WEIGHTS


def load(path: str | Path, network: nn.Module) -> Calibrated:
    """What `save` wrote to the folder `path`, put into `network`, a network of the same architecture."""
    path = Path(path)
    model = rebuild(network, json.loads((path / CONFIG).read_text()))
    model.load_state_dict(require("safetensors.torch", extra="export").load_file(path / WEIGHTS))
    return model.eval()


def describe(model: Calibrated) -> dict[str, Any]:
    """What is needed to put an equal calibration beside an equal network; the weights are kept apart."""
    reader = model.reader
    names = {view: name for name, view in VIEWS.items()}
    unknown = [view for view in reader.views if view not in names]
    if unknown or reader.logits_of is not None:
        raise TypeError(
            "a model with views or logits_of of your own cannot be described in a file; keep model.head.state_dict()"
        )
    return {
        "layer": reader.layer,
        "outputs": reader.outputs,
        "n_classes": reader.n_classes,
        "n_features": reader.n_features,
        "views": [names[view] for view in reader.views],
        "head": _describe_head(model.head),
        "opinion": None if model.opinion is None else _describe_head(model.opinion),
    }


def rebuild(network: nn.Module, facts: Mapping[str, Any]) -> Calibrated:
    """`network` with a calibration as `describe` wrote it down, its weights not loaded yet."""
    sizes = {name: facts[name] for name in ("n_classes", "n_features")}
    reader = Reader.restore(
        network, layer=facts["layer"], outputs=facts["outputs"], views=facts["views"], **sizes
    )
    head = _rebuild_head(facts["head"], **sizes)
    opinion = None if facts["opinion"] is None else _rebuild_head(facts["opinion"], **sizes)
    return Calibrated(network, head, reader, opinion)  # type: ignore[arg-type]


def _describe_head(head: nn.Module) -> dict[str, Any]:
    if isinstance(head, CalibrationHead):
        return {"heads": [asdict(spec) for spec in head.specs]}
    names = [name for name, kind in CALIBRATORS.items() if type(head) is kind]
    if not names or not isinstance(head, Calibrator):
        raise TypeError(f"head must be a CalibrationHead or a Calibrator, got {type(head).__name__}")
    return {"method": names[0], "params": head.get_params()}


def _rebuild_head(facts: Mapping[str, Any], n_features: int, n_classes: int) -> nn.Module:
    if "heads" in facts:
        specs = [HeadSpec(**{**spec, "reads": tuple(spec["reads"])}) for spec in facts["heads"]]
        return CalibrationHead(n_features, n_classes, *specs)
    return make(facts["method"], **facts["params"])


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
