"""What the tests of training share: a little real data, small settings, and readers of run folders."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doublehead.data import Splits, fashion_subset
from doublehead.training.config import Config
from doublehead.training.loop import train
from doublehead.training.run_folder import RunFolder


@functools.cache
def fashion() -> Splits:
    """240 / 240 / 150 images of Fashion-MNIST."""
    return fashion_subset().first(240, 240, 150)


def small(**settings: Any) -> Config:
    """Two epochs of six steps on the CPU: a fraction of a second."""
    usual = {
        **{"data": "fashion", "model": "tiny_networks:mlp", "epochs": 2, "lr": 0.05, "augment": "none"},
        **{"batch_size": 40, "calib_batch_size": 40, "every": 2, "warmup": 0.0},
    }
    return Config(**{**usual, **settings})


def run(config: Config, folder: Path, **options: Any) -> dict[str, Any]:
    return train(config, RunFolder(folder), options.pop("splits", fashion()), accelerator="cpu", **options)


class Killed(BaseException):
    """Nothing catches it, as nothing catches a signal."""


def stop_after(config: Config, folder: Path, epochs: int, **options: Any) -> None:
    """Train until an epoch has passed and its checkpoint is written, then stop without a word."""

    def tick(epoch: int, step: int, n_steps: int) -> None:
        if epoch == epochs:
            raise Killed

    with pytest.raises(Killed):
        run(config, folder, tick=tick, **options)


def contents(folder: Path) -> dict[str, Any]:
    """All that a run, or several, left behind, but for times: arrays as bytes."""
    from safetensors.numpy import load_file

    held: dict[str, Any] = {"files": sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))}
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.suffix == ".npz":
            with np.load(file) as arrays:
                held |= {f"{name} {key}": arrays[key].tobytes() for key in arrays.files}
        elif file.suffix == ".safetensors":
            held |= {f"{name} {key}": value.tobytes() for key, value in load_file(file).items()}
        elif file.name == "metrics.jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            held[name] = [{**row, "seconds": 0} for row in rows]
        elif file.name == "results.json":
            timed = ("train_seconds", "environment")
            result = json.loads(file.read_text())
            held[name] = {key: value for key, value in result.items() if key not in timed}
    return held


def assert_same(one: Path, other: Path) -> None:
    """Two folders hold the same to the last bit."""
    left, right = contents(one), contents(other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name] == right[name], name
