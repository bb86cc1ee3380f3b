"""The run folder: locks, files that appear whole or not at all, and a disk that is full."""

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from doublehead import Predictions
from doublehead.training import run_folder
from doublehead.training.config import Config
from doublehead.training.run_folder import RunError, RunFolder, commit, environment
from samples import Bomb, refused


def test_the_message_of_a_locked_folder(tmp_path: Path) -> None:
    ready, go = os.pipe()
    child = os.fork()
    if not child:
        with RunFolder(tmp_path).locked():
            if not os.fork():  # a worker process that lives on: it must not keep the lock
                time.sleep(20)
                os._exit(0)
            os.write(go, b"!")
            signal.pause()
    os.read(ready, 1)
    refused = pytest.raises(RunError, match=f"another process is working in {tmp_path}")
    with refused, RunFolder(tmp_path).locked():
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with RunFolder(tmp_path).locked():
        pass


def test_leftovers_of_a_killed_process_are_swept_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "predictions").mkdir()
    leftovers = [tmp_path / ".checkpoint.pt.ab12_x9z", tmp_path / "predictions/.test-main.npz.ab12cd34"]
    kept = [tmp_path / "predictions/test-main.npz", tmp_path / ".notes/a.txt", tmp_path / ".idea.d/x"]
    for file in (*(place / "half" for place in leftovers), *kept):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"...")
    with folder.locked():
        assert not any(place.exists() for place in leftovers)
    assert all(file.exists() for file in kept)


def test_predictions_are_float16_and_finite(tmp_path: Path) -> None:
    logits = torch.tensor([[1e6, -3.14159, 0.0], [0.5, -1e6, 0.4], [7.0, 7.0001, 2.0]])
    RunFolder(tmp_path).save_predictions("test-main", Predictions(logits, torch.tensor([0, 1, 1])))
    with np.load(tmp_path / "predictions/test-main.npz") as arrays:
        assert arrays["logits"].dtype == np.float16
    p = Predictions.load(tmp_path / "predictions/test-main.npz")
    torch.testing.assert_close(p.logits, logits.clamp(-60_000, 60_000), rtol=1e-3, atol=0)
    assert p.labels.tolist() == [0, 1, 1]
    assert p.predicted.tolist() == [0, 0, 1]  # 7 and 7.0001 are one number in float16


def test_another_config_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("config.json", Config(epochs=3).to_json())
    folder.check(Config(epochs=3, workers=4))
    with pytest.raises(RunError, match=r"a run with other settings \(epochs, lr\): choose another folder"):
        folder.check(Config(epochs=4, lr=0.1, workers=4))
    assert folder.config == Config(epochs=3)
    (tmp_path / "config.json").write_text('{"epochs": 3')
    with pytest.raises(RunError, match=r"config.json cannot be read .*: remove the folder"):
        folder.check(Config(epochs=3))


def test_a_folder_in_which_nothing_happened_and_a_place_that_is_none(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").locked():
        pass
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    refused = pytest.raises(RunError, match=r"file/run cannot be used as a run folder \(Not a directory\)")
    with refused, RunFolder(tmp_path / "file" / "run").locked():
        pass


def test_a_full_disk_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_text("metrics.jsonl", "old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for raised, error, message in (
        (full, RunError, r"could not write .*metrics.jsonl \(No space left on device\)"),
        (ValueError("no"), ValueError, "^no$"),  # a writer that fails
    ):
        refused(message, RunFolder(tmp_path).write, "metrics.jsonl", Mock(side_effect=raised), error=error)
        assert (tmp_path / "metrics.jsonl").read_text() == "old"
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "predictions").touch()
    with pytest.raises(RunError, match=r"could not write .*test-main.npz \("):
        RunFolder(tmp_path).save_predictions("test-main", Predictions(torch.eye(2), torch.arange(2)))


def test_checkpoints(tmp_path: Path) -> None:
    folder, device = RunFolder(tmp_path), torch.device("cpu")
    assert folder.load_checkpoint(device) is None
    for epoch in (1, 2):
        folder.save_checkpoint({"epoch": epoch})
    assert folder.load_checkpoint(device) == {"epoch": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    folder.drop_checkpoint()
    assert not any(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_named_and_no_pickle_is_executed(tmp_path: Path) -> None:
    RunFolder(tmp_path).save_checkpoint({"epoch": 1})
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    torch.save({"epoch": Bomb(tmp_path / "harm")}, tmp_path / "bomb.pt")
    for content in (whole[:100], (tmp_path / "bomb.pt").read_bytes()):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        with pytest.raises(RunError, match=r"checkpoint.pt cannot be read (?s:.*): remove the folder"):
            RunFolder(tmp_path).load_checkpoint(torch.device("cpu"))
    assert not (tmp_path / "harm").exists()


def test_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    about = environment(torch.device("cpu"))
    assert about["torch"] == torch.__version__
    assert about["device"].endswith("CPU")
    json.dumps(about)
    monkeypatch.setenv("DOUBLEHEAD_COMMIT", "abc123")
    assert commit() == "abc123"


def test_the_commit_of_another_project_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOUBLEHEAD_COMMIT", raising=False)
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "installed.py"))
    (tmp_path / "installed.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init"], ["commit", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    assert commit() == "unknown"
    subprocess.run([*git, "add", "installed.py"], check=True)
    assert commit().endswith("-dirty")
