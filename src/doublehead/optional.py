"""Import a package that only some users need, or say which extra brings it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

# Packages that import torchvision when they find it.
BRING_TORCHVISION = ("torchvision", "timm", "torchmetrics", "lightning", "transformers")

_torchvision_library: torch.library.Library | None = None  # kept alive: its declarations die with it


def require(name: str, extra: str) -> Any:
    """The module called `name`, or an ImportError that names the extra of doublehead to install.

    >>> require("math", extra="data").floor(2.5)
    2
    """
    package = name.partition(".")[0]
    if package in BRING_TORCHVISION:
        _declare_torchvision_operators()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(
            f"this needs the package {package!r}, which is not installed: pip install 'doublehead[{extra}]'"
        ) from error


def _declare_torchvision_operators() -> ModuleType | None:
    """Let torchvision import when its compiled operators do not fit the installed torch.

    A CPU build of torch beside a CUDA build of torchvision (what a plain package index serves) cannot load
    torchvision's compiled library, and torchvision then fails on import because it attaches rules to operators
    that were never declared. Networks and transforms need none of those operators: declaring their
    signatures is enough.
    """
    global _torchvision_library  # noqa: PLW0603 (one declaration per process)
    if _torchvision_library is not None:
        return None
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    _torchvision_library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            _torchvision_library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    return importlib.import_module("torchvision")
