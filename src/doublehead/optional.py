"""Import optional packages, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

# Packages that import torchvision if it is installed.
IMPORT_TORCHVISION = ("torchvision", "timm", "torchmetrics", "lightning", "transformers")

_torchvision_library: torch.library.Library | None = None  # its declarations end when it is deleted


def require(name: str, extra: str) -> Any:
    """Import the module `name`, or raise an ImportError that names the extra of doublehead to install.

    >>> require("math", extra="data").floor(2.5)
    2
    """
    package = name.partition(".")[0]
    if package in IMPORT_TORCHVISION:
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
    """Make torchvision importable when its compiled operators do not match the installed torch.

    With a CPU build of torch, torchvision's CUDA build cannot load its compiled library. Its import then fails
    because it registers rules for operators that do not exist. Networks and transforms do not need these operators,
    so declaring their signatures is enough.
    """
    global _torchvision_library  # noqa: PLW0603 (declared once per process)
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
