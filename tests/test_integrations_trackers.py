"""Trackers get the reliability diagram, each in its own way."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doublehead.curves import Reliability, reliability
from doublehead.integrations.callbacks import log_reliability, log_to_trackers
from samples import overconfident


@pytest.fixture(scope="module")
def curve() -> Reliability:
    return reliability(overconfident(300, 4))


def test_each_logger_gets_the_figure_its_own_way(curve: Reliability, tmp_path: Path) -> None:
    """Loggers of the shapes of Lightning's."""
    got: dict[str, Any] = {}
    tensorboard = SimpleNamespace(add_figure=lambda *what: got.update(tensorboard=what))
    mlflow = SimpleNamespace(log_figure=lambda *what: got.update(mlflow=what))
    loggers = [
        SimpleNamespace(experiment=tensorboard),
        SimpleNamespace(run_id="run-1", experiment=mlflow),
        SimpleNamespace(experiment=object(), log_image=lambda key, images: got.update(wandb=(key, images))),
        SimpleNamespace(log_dir=str(tmp_path)),
        object(),
    ]
    log_reliability(loggers, curve, "val/reliability", 7)
    name, figure, step = got["tensorboard"]
    assert (name, step) == ("val/reliability", 7)
    assert len(figure.axes) == 1
    assert got["mlflow"] == ("run-1", figure, "val/reliability/00000007.png")
    assert got["wandb"] == ("val/reliability", [figure])
    assert (tmp_path / "val_reliability-00000007.png").read_bytes().startswith(b"\x89PNG")


def test_trackers_of_transformers(curve: Reliability, tmp_path: Path, monkeypatch: Any) -> None:
    got: dict[str, Any] = {}
    args = SimpleNamespace(report_to=["wandb", "mlflow"], output_dir=str(tmp_path))
    log_to_trackers(args, {"eval_ece_calib": 0.01}, curve, "reliability", 5)  # neither has been imported
    run = SimpleNamespace(log=lambda row: got.update(wandb=row))
    wandb = SimpleNamespace(run=run, Image=lambda figure: ("image", figure))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    mlflow = SimpleNamespace(
        active_run=lambda: "open",
        log_metrics=lambda numbers, step: got.update(mlflow=(numbers, step)),
        log_figure=lambda figure, file: got.update(file=file),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    log_to_trackers(args, {"eval_ece_calib": 0.01}, curve, "reliability", 5)
    assert got["wandb"]["train/global_step"] == 5
    assert got["wandb"]["reliability"][0] == "image"
    assert got["mlflow"] == ({"eval_ece_calib": 0.01}, 5)
    assert got["file"] == "reliability/00000005.png"


def test_real_tensorboard(curve: Reliability, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    args = SimpleNamespace(report_to=["tensorboard"], output_dir=str(tmp_path))
    log_to_trackers(args, {"eval_ece_calib": 0.01}, curve, "reliability", 5)
    assert any((tmp_path / "runs").iterdir())
