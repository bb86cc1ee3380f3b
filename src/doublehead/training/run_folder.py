"""The files of a run, written so that a process may be killed at any moment; the devices and processes that run it.

A run folder holds:

    config.json         the settings
    checkpoint.pt       the newest state, until the run is finished
    metrics.jsonl       a line per epoch
    predictions/        {split}-{output}.npz, float16 logits and labels
    model.safetensors   network and heads
    gradients.npz       norms of the heads' gradients, where asked for
    results.json        written last: the run is finished
"""

from __future__ import annotations

import atexit
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from doublehead.predictions import Predictions
from doublehead.system import replacing, require
from doublehead.training.config import Config

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch asks for it in deterministic runs on CUDA
MAX_LOGIT = 60_000.0  # of saved predictions: float16 ends at 65,504


class RunError(RuntimeError):
    """A run cannot continue; the message says what to do."""


class RunFolder:
    """The files of one run. A folder of a run with another config raises an error.

    >>> RunFolder("runs/none").finished
    False
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def finished(self) -> bool:
        """Whether the run has been trained and evaluated to the end."""
        return (self.path / "results.json").exists()

    @property
    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        loaded: dict[str, Any] = json.loads((self.path / "results.json").read_text())
        return loaded

    @property
    def config(self) -> Config:
        """The config the run was begun with."""
        return Config.from_json((self.path / "config.json").read_text())

    def check(self, config: Config) -> None:
        """Refuse a folder that was begun with another config."""
        file = self.path / "config.json"
        if not file.exists():
            return
        try:
            before = self.config
        except (ValueError, TypeError) as error:
            raise RunError(
                f"{file} cannot be read ({error}): remove the folder or choose another one"
            ) from error
        if differing := before.differing(config):
            raise RunError(
                f"{self.path} holds a run with other settings ({', '.join(differing)}): "
                "choose another folder or remove it"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out; the lock ends with the process.

        A folder into which nothing was written is removed again.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / ".lock", "w")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise RunError(f"{self.path} cannot be used as a run folder ({error.strerror})") from error
        with file:
            if not _lock(file):
                raise RunError(f"another process is working in {self.path}")
            for leftover in self.path.rglob(".*.*.????????"):  # of `replacing` in a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                yield
            finally:
                if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, completely or not at all."""
        self.write(name, lambda file: file.write(text.encode()))

    def write(self, name: str, writer: Callable[[IO[bytes]], Any]) -> None:
        """Let `writer` fill a file that appears under its name once it is on disk."""
        target = self.path / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary, open(temporary, "wb") as file:
                writer(file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"could not write {target} ({error.strerror or error}); what was there before is kept"
            ) from error

    def save_predictions(self, name: str, predictions: Predictions) -> None:
        """Write predictions/{name}.npz, logits as float16; predicted classes stay as they are."""
        logits = predictions.logits.clamp(-MAX_LOGIT, MAX_LOGIT).cpu().numpy().astype(np.float16)
        predicted = predictions.predicted.cpu().numpy()
        rows = np.flatnonzero(logits.argmax(1) != predicted)  # rounding made two classes equal
        logits[rows, predicted[rows]] = np.nextafter(logits[rows].max(1), np.float16(np.inf))
        arrays = {"logits": logits, "labels": predictions.labels.cpu().numpy()}
        self.write(f"predictions/{name}.npz", lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write the newest state; the one before it stays until the new one is whole."""
        packed = io.BytesIO()  # torch.save itself may end the process where the disk is full
        torch.save(state, packed)
        self.write("checkpoint.pt", lambda file: file.write(packed.getbuffer()))

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """The newest state, None for a run that has none yet. No pickle is executed."""
        file = self.path / "checkpoint.pt"
        if not file.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # a damaged file may raise anything
            raise RunError(f"{file} cannot be read ({error}): remove the folder to start again") from error
        return state

    def drop_checkpoint(self) -> None:
        """A finished run needs none."""
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of each epoch."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]


def environment(device: torch.device) -> dict[str, Any]:
    """Code, versions, device and time of a run."""
    import doublehead

    cuda = device.type == "cuda"
    return {
        "doublehead": doublehead.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "cuda": torch.version.cuda if cuda else None,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str:
    """The commit of the code that runs, marked where the tree has changes; DOUBLEHEAD_COMMIT states it elsewhere."""
    if "DOUBLEHEAD_COMMIT" in os.environ:
        return os.environ["DOUBLEHEAD_COMMIT"]
    file = Path(__file__).resolve()
    ask = partial(subprocess.run, cwd=file.parent, capture_output=True, text=True, check=True, timeout=10)
    try:
        # An installed package may lie within the repository of another project, which does not track it.
        ask(["git", "ls-files", "--error-unmatch", file.name])
        return str(ask(["git", "describe", "--always", "--dirty", "--exclude", "*"]).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _lock(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        return True
    try:  # lockf, not flock: that one would live on in worker processes after this one was killed
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# --- devices and processes


def make_fabric(config: Config, **options: Any) -> Any:
    """Lightning's Fabric: device, precision and distribution."""
    fabric = require("lightning_fabric", extra="train")
    try:
        return fabric.Fabric(precision=config.precision, **options)
    except Exception as error:  # Lightning has many; each says which option is not available
        asked = ", ".join(f"{name} {value}" for name, value in options.items())
        raise RunError(f"cannot train with {asked}: {error}") from error


@contextmanager
def algorithms(*, deterministic: bool) -> Iterator[None]:
    """Torch's deterministic algorithms, or its usual ones, inside the block; all settings are restored after it.

    A deterministic run raises where torch has no deterministic algorithm. cuBLAS reads its variable when a process
    first uses it: where CUDA was used before, CUBLAS_WORKSPACE_CONFIG must have been set from the start.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    if not (enabled or deterministic):  # nothing to change, and the change would import torch's compiler
        yield
        return
    warn_only, cudnn = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn
    cudnn_before, workspace = (cudnn.deterministic, cudnn.benchmark), os.environ.get(CUBLAS_WORKSPACE)
    try:
        torch.use_deterministic_algorithms(deterministic)
        if deterministic:
            # a benchmark may choose another kernel each time
            cudnn.deterministic, cudnn.benchmark = True, False
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = cudnn_before
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def on_first_process(fabric: Any, act: Callable[..., object], *args: Any) -> None:
    """Let the first process act while the others wait; its `RunError` is raised in all of them."""
    problem = ""
    if fabric.is_global_zero:
        try:
            act(*args)
        except RunError as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem:
        raise RunError(problem)


@cache  # once in a process, however many runs it trains
def leave_processes_at_exit() -> None:
    """End the process group in an orderly way; gloo's threads would print errors otherwise."""
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
