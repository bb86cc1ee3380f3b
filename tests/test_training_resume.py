"""kill -9 at any moment, then the same command: the run ends as if nothing had happened, to the last bit."""

import json
import multiprocessing
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import HeadSpec
from doublehead.data import Splits, catalog, fashion_subset
from doublehead.training.config import Config
from doublehead.training.run_folder import RunError, RunFolder, make_fabric
from training_helpers import Killed, assert_same, fashion, run, small, stop_after

pytest.importorskip("typer")
from doublehead import cli

if not sys.platform.startswith("linux"):
    pytest.skip("processes are forked and looked up in /proc", allow_module_level=True)

TESTS = Path(__file__).parent
# Dropout, mixup, random perturbations, heads, the second opinion and its guard all draw random numbers.
COMMAND = shlex.split("""
compare --methods cross-entropy,double-head,sample-temperature,guarded,mixup --accelerator cpu --json
--data fashion --model tiny_networks:dropout_mlp --set epochs=3 --set n_train=320 --set n_calib=210 --set n_test=120
--set batch_size=40 --set calib_batch_size=40 --set every=3 --set augment=crop-flip --set calib_augment=noise
--set record_gradients=true
""")


def in_child(arguments: list[str], kill_when: Callable[[], bool] | None = None) -> int | None:
    """Run a command in a forked process, killed without warning once `kill_when` says so; the code it ended with."""
    child = multiprocessing.get_context("fork").Process(target=quietly, args=(arguments,))
    child.start()
    while kill_when is not None and child.is_alive() and not kill_when():
        time.sleep(0.001)
    if kill_when is not None:
        child.kill()
    child.join()
    return child.exitcode


def quietly(arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cli.app(arguments, standalone_mode=False)


def lines(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*/metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS)
    splits = fashion_subset()  # which takes half a second, as the first Fabric does: the children have both
    monkeypatch.setattr(catalog, "fashion_subset", lambda: splits)
    make_fabric(Config(), accelerator="cpu", devices=1)
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    assert in_child([*COMMAND, "-o", str(calm)]) == 0
    draw = random.Random(0)
    moments: list[Callable[[], bool]] = [
        lambda: any(killed.glob("*/config.json")),
        *(lambda n=n: lines(killed) >= n for n in (1, 2, 2, 3)),
        lambda: any(killed.glob("*/.checkpoint.pt.*")),
        lambda: any(killed.glob("*/predictions/*")),
        lambda: any(killed.glob("*/model.safetensors")),
        *(lambda n=n: lines(killed) >= n for n in (4, 5, 6)),
        lambda: len([*killed.glob("*/predictions")]) == 2,
    ]
    statuses = []
    for moment in moments:

        def now(moment: Callable[[], bool] = moment) -> bool:
            if not moment():
                return False
            time.sleep(draw.uniform(0, 0.05))
            return True

        statuses.append(in_child([*COMMAND, "-o", str(killed)], now))
    assert statuses.count(-signal.SIGKILL) >= 5
    script = Path(sys.executable).with_name("doublehead")  # the command as a user has it
    command = [script, *COMMAND, "-o", killed]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 2 + 1 + 1 + 1 + 2  # cross entropy and mixup also after temperature
    assert_same(calm, killed)


@pytest.mark.slow
def test_stopped_at_each_change_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files appear by os.replace: stop before or after the first one, then the second one, ... of each attempt."""
    config = small(
        **{"model": "tiny_networks:dropout_mlp", "heads": {"one": HeadSpec(beta0=1.2, dropout=0.5)}},
        **{"auto": True, "guards": ("shifts",), "n_calib": 210, "n_test": 60, "predict_train": False},
    )
    run(config, tmp_path / "calm")
    replace, left = os.replace, 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal left
        left -= 1
        if left == -1 and attempt % 2:
            raise Killed
        replace(source, target)
        if left == -1:
            raise Killed

    monkeypatch.setattr(os, "replace", replace_or_die)
    for attempt in range(100):
        left = attempt // 2
        try:
            run(config, tmp_path / "killed")
            break
        except Killed:
            pass
    assert attempt >= 12  # the end of a run alone changes six files
    assert_same(tmp_path / "calm", tmp_path / "killed")


def test_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    config = small(epochs=3)
    stop_after(config, tmp_path / "run", epochs=1)
    parts = (images.take(np.flatnonzero(images.labels < 4)) for images in fashion().parts.values())
    four = Splits("four", *parts, tuple("abcd"))
    with pytest.raises(RunError, match="does not fit this version or this data"):
        run(config, tmp_path / "run", splits=four)


def test_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    config = small(epochs=3, heads={"one": HeadSpec(dropout=0.5)})
    run(config, tmp_path / "calm")
    stop_after(config, tmp_path / "full", epochs=1)
    whole = (tmp_path / "full" / "checkpoint.pt").read_bytes()
    refused = pytest.raises(RunError, match=r"could not write .*checkpoint.pt \(File too large\); .* is kept")
    with refused, files_of_at_most(len(whole) // 2):
        run(config, tmp_path / "full")
    assert (tmp_path / "full" / "checkpoint.pt").read_bytes() == whole
    assert not any(file.name.endswith(".partial") for file in (tmp_path / "full").iterdir())
    run(config, tmp_path / "full")
    assert_same(tmp_path / "calm", tmp_path / "full")


def test_goes_on_before_and_between_rare_calibration_steps(tmp_path: Path) -> None:
    config = small(epochs=4, every=8, heads={"one": HeadSpec(dropout=0.5)})  # six network steps an epoch
    run(config, tmp_path / "calm")
    for epochs in (1, 2, 3):
        stop_after(config, tmp_path / "stopped", epochs=epochs)
    run(config, tmp_path / "stopped")
    assert_same(tmp_path / "calm", tmp_path / "stopped")


def test_checkpoints_may_be_rarer_than_epochs(tmp_path: Path) -> None:
    """Nor does it matter which random numbers the caller has drawn."""
    heads = {"one": HeadSpec(dropout=0.5)}
    config = small(epochs=4, model="tiny_networks:dropout_mlp", heads=heads, calib_augment="broad")
    run(config, tmp_path / "calm")
    stop_after(config, tmp_path / "rare", epochs=3, checkpoint_seconds=1e9)
    assert not (tmp_path / "rare" / "checkpoint.pt").exists()
    assert len(RunFolder(tmp_path / "rare").lines()) == 3  # written, and to be written again
    random.random(), np.random.rand(3), torch.rand(3)  # noqa: NPY002
    run(config, tmp_path / "rare", checkpoint_seconds=1e9)
    assert_same(tmp_path / "calm", tmp_path / "rare")


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """The system refuses to write beyond: what a full disk does, but for the name of the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
