"""What several modules need: optional packages, files written completely or not at all, misspelt names, warnings."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

HEADER = "doublehead"  # the entry of a safetensors header that holds facts as JSON
# Packages that import torchvision if it is installed.
IMPORT_TORCHVISION = ("torchvision", "timm", "torchmetrics", "lightning", "transformers")


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


@cache  # which keeps the library: its declarations end when it is deleted
def _declare_torchvision_operators() -> torch.library.Library | None:
    """Make torchvision importable when its compiled operators do not match the installed torch.

    With a CPU build of torch, torchvision's CUDA build cannot load its compiled library. Its import then fails
    because it registers rules for operators that do not exist. Networks and transforms do not need these operators,
    so declaring their signatures is enough.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
        return library
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: known ones that are like it, if any.

    >>> did_you_mean("ResNet50", ["resnet50", "vgg"])
    '; did you mean resnet50?'
    """
    near = difflib.get_close_matches(name.lower(), list(known), 3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called this package: the first one outside it and torch, or in a command."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_inside(module: str) -> bool:
    return f"{module}.".startswith(("doublehead.", "torch.")) and not module.startswith("doublehead.cli")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write a file or a folder at, which takes the place of `path` at the end.

    If anything fails, `path` stays as it was and nothing is left behind. A folder only replaces an empty folder.

    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text(), [file.name for file in target.parent.iterdir()]
    ('whole', ['a.txt'])
    """
    path = Path(path)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    temporary = folder / path.name
    try:
        yield temporary
        if path.is_dir():
            path.rmdir()  # it was empty, or this fails
        if temporary.is_file():
            mask = os.umask(0o022)  # it can only be read by setting it
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)  # temporary files are private, results are not
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors, and in the header facts about them as JSON, in one safetensors file; folders are made.

    Tensors that FSDP has sharded are put together, for which all processes must call this.
    """
    whole = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in tensors.items()}
    # Copies in plain memory order: shared tensors and those of channels_last networks are refused otherwise.
    plain = torch.contiguous_format
    whole = {name: value.detach().cpu().clone(memory_format=plain) for name, value in whole.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        library = require("safetensors.torch", extra="export")
        library.save_file(whole, file, {HEADER: json.dumps(facts)})


def read_file(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The facts and tensors that `write_file` wrote."""
    library = require("safetensors", extra="export")
    try:
        with library.safe_open(path, "pt", str(device)) as file:
            facts = json.loads((file.metadata() or {})[HEADER])
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (library.SafetensorError, KeyError) as error:
        raise ValueError(f"{path} must be a file that doublehead saved, got another: {error}") from error
