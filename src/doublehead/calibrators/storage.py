"""Keep a fitted calibrator: its tensors as safetensors, its name and parameters as JSON beside them. No pickle."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from doublehead.atomic import replacing
from doublehead.calibrators.base import Calibrator, NotFitted
from doublehead.calibrators.table import CALIBRATORS, make
from doublehead.optional import require

FORMAT = "doublehead calibrator 1"


def save(calibrator: Calibrator, path: str | os.PathLike[str]) -> Path:
    """Write `path` (.safetensors) and the .json of the same name; each appears whole or not at all.

    The JSON carries the digest of the tensors, so files of two different calibrators are never taken for one.
    """
    path = _check_path(path)
    names = [name for name, kind in CALIBRATORS.items() if type(calibrator) is kind]
    if not names:
        raise TypeError(f"calibrator must be one of {sorted(CALIBRATORS)}, got a {type(calibrator).__name__}")
    if not calibrator.is_fitted:
        raise NotFitted(f"this {type(calibrator).__name__} is not fitted: there is nothing to save")
    state = {
        name: value.detach().cpu().contiguous().clone() for name, value in calibrator.state_dict().items()
    }
    tensors: bytes = require("safetensors.torch", extra="export").save(state)
    about = {
        "format": FORMAT,
        "method": names[0],
        "params": calibrator.get_params(),
        "sha256": hashlib.sha256(tensors).hexdigest(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, tensors)
    _write(path.with_suffix(".json"), (json.dumps(about, indent=2) + "\n").encode())
    return path


def load(path: str | os.PathLike[str]) -> Calibrator:
    """The calibrator that `save` wrote to `path`, fitted."""
    path = _check_path(path)
    about = _read_about(path.with_suffix(".json"))
    tensors = path.read_bytes()
    if hashlib.sha256(tensors).hexdigest() != about.get("sha256"):
        raise ValueError(f"{path} and {path.with_suffix('.json').name} do not belong together: save it again")
    calibrator = make(about["method"], **about["params"])
    calibrator.load_state_dict(require("safetensors.torch", extra="export").load(tensors))
    return calibrator


def _check_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {path.name!r}")
    return path


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path} must describe a saved calibrator (format {FORMAT!r})")
    return about


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
