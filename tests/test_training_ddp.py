"""Two real processes give what one gives."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import call
from doublehead.training.config import METHODS
from doublehead.training.run_folder import RunFolder
from training_helpers import contents

TESTS = Path(__file__).parent
# Odd sizes of calib and test: the processes' parts differ in length.
COMMAND = shlex.split("""
compare --methods double-head,guarded,brier --data fashion --model tiny_networks:norm_mlp --accelerator cpu --json
--set epochs=2 --set n_train=300 --set n_calib=221 --set n_test=131 --set batch_size=30 --set calib_batch_size=30
--set every=3 --set lr=0.05 --set augment=crop-flip --set record_gradients=true
""")


# The heads of the second opinion have dropout, whose masks are each process's own.
BY_CHANCE = ("auto", "opinion", "guarded")


def close(one: Any, other: Any, where: str = "") -> None:
    """Two values from JSON, numbers to float tolerance; what is drawn may jump at the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            if "floor" not in key and key not in BY_CHANCE:
                close(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other)):
            close(a, b, f"{where}/{i}")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=2e-3, abs=2e-4), where
    else:
        assert one == other, where


@pytest.mark.slow
def test_two_processes_are_as_good_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two losses, so two runs in one command; one of them with heads, `auto` and its guard."""
    script = Path(sys.executable).with_name("doublehead")
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = {key: value for key, value in os.environ.items() if key not in ranks}
    how = {"cwd": TESTS, "env": {**alone, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    command = [script, *COMMAND, "--devices", "2", "-o", tmp_path / "two"]
    done = subprocess.run(command, check=False, timeout=1200, **how)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)  # one table: the second process is silent
    monkeypatch.chdir(TESTS)
    single = call(*COMMAND, "-o", tmp_path / "one")
    for row, wanted in zip(rows, json.loads(single.stdout), strict=True):
        row["predictions"] = row["predictions"].replace("/two/", "/one/")
        if row["method"] != METHODS["guarded"].title:
            close(row, wanted)
        else:
            assert row["accuracy"] == wanted["accuracy"]  # it keeps the network's predictions
            assert row["nll"] == pytest.approx(wanted["nll"], rel=0.05)

    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one["files"] == two["files"]
    for name, value in one.items():
        if name.endswith(("results.json", "metrics.jsonl")):
            for held in (value, two[name]) if isinstance(value, dict) else ():
                held.pop("processes")
                held.pop("choice")  # which of several equal sequences is best may hang on the last bit
            close(value, two[name], name)
    for folder in (tmp_path / "two").iterdir():
        assert RunFolder(folder).results["processes"] == 2
        for file in (folder / "predictions").iterdir():
            with np.load(file) as got, np.load(str(file).replace("/two/", "/one/")) as wanted:
                np.testing.assert_array_equal(got["labels"], wanted["labels"])  # all of them, in their order
                if not file.stem.endswith(BY_CHANCE):
                    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=2e-3, atol=1e-3)
