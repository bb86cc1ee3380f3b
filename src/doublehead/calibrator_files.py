"""A fitted calibrator on disk: its tensors in a .safetensors file, what it is and where it comes from in a .json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from doublehead import calibrators
from doublehead.calibrators import Calibrator
from doublehead.optional import require


def methods() -> dict[str, type[Calibrator]]:
    """Every calibrator by the name the command line gives it.

    >>> methods()["temperature"].__name__
    'Temperature'
    """
    found = [getattr(calibrators, name) for name in calibrators.__all__]
    classes = [c for c in found if isinstance(c, type) and issubclass(c, Calibrator) and c is not Calibrator]
    return {method_name(c): c for c in classes}


def method_name(calibrator: type[Calibrator]) -> str:
    """temperature_grid for TemperatureGrid."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", calibrator.__name__).lower()


def save_calibrator(calibrator: Calibrator, path: Path, facts: dict[str, Any]) -> tuple[Path, Path]:
    """Write `path`.safetensors and `path`.json (`facts` and how to build the calibrator); returns both paths."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in calibrator.state_dict().items()}
    weights, description = Path(f"{path}.safetensors"), Path(f"{path}.json")
    built = {"method": method_name(type(calibrator)), "params": calibrator.get_params()}
    text = json.dumps({**built, **facts}, indent=2, default=str) + "\n"
    weights.write_bytes(require("safetensors.torch", extra="cli").save(tensors))
    description.write_text(text, encoding="utf-8")
    return weights, description


def load_calibrator(path: str | Path) -> Calibrator:
    """The calibrator that `save_calibrator` wrote; `path` is its .json, its .safetensors or what both share."""
    stem = re.sub(r"\.(json|safetensors)$", "", str(path))
    facts = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    known = methods()
    if facts.get("method") not in known:
        raise ValueError(
            f"{stem}.json must name one of {', '.join(known)} as its method, got {facts.get('method')!r}"
        )
    calibrator = known[facts["method"]](**facts["params"])
    calibrator.load_state_dict(require("safetensors.torch", extra="cli").load_file(f"{stem}.safetensors"))
    return calibrator.eval()
