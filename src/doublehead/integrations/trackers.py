"""Send figures to experiment trackers through the logger of a framework; no tracker is imported here.

Lightning and Transformers send numbers themselves. For figures each tracker has its own call, and a logger is
recognised by its methods: W&B (`log_image`), MLflow (`run_id` and `experiment.log_figure`), TensorBoard
(`experiment.add_figure`); any other logger with a folder gets a file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from doublehead.curves import Reliability
from doublehead.plots import draw_reliability, save


def log_reliability(
    loggers: Iterable[Any], curve: Reliability, name: str, step: int, title: str | None = None
) -> int:
    """Draw a reliability diagram once and send it to each logger; returns how many took it."""
    loggers = list(loggers)
    if not loggers:
        return 0
    figure = draw_reliability(curve, title=title).figure
    return sum(log_figure(logger, name, figure, step) for logger in loggers)


def log_figure(logger: Any, name: str, figure: Any, step: int) -> bool:
    """Send a matplotlib figure to one logger (or bare SummaryWriter); False where it cannot take one."""
    experiment = getattr(logger, "experiment", logger)
    if hasattr(logger, "log_image"):  # W&B; a step of its own, since its steps may only grow
        logger.log_image(key=name, images=[_pixels(figure)])
    elif hasattr(logger, "run_id") and hasattr(experiment, "log_figure"):  # MLflow
        experiment.log_figure(logger.run_id, figure, f"{name}/{step:08d}.png")
    elif hasattr(experiment, "add_figure"):  # TensorBoard
        experiment.add_figure(name, figure, step)
    elif getattr(logger, "log_dir", None):
        save(figure, Path(logger.log_dir) / f"{name.replace('/', '_')}-{step:08d}.png", dpi=100)
    else:
        return False
    return True


def log_numbers(tracker: Any, numbers: Mapping[str, float], step: int) -> None:
    """Send numbers to what `for_transformers` returned."""
    tracker.log_metrics(dict(numbers), step)


def for_transformers(args: Any) -> list[Any]:
    """The trackers named in `TrainingArguments.report_to`, as loggers: its own callbacks hand over none.

    W&B and MLflow are asked for the run that the Trainer has opened; TensorBoard gets a second event file in the
    Trainer's folder.
    """
    asked = args.report_to or []
    made: list[Any] = []
    if "wandb" in asked and _open_run("wandb", "run"):
        made.append(_Wandb(sys.modules["wandb"]))
    if "mlflow" in asked and _open_run("mlflow", "active_run"):
        made.append(_MLflow(sys.modules["mlflow"]))
    if "tensorboard" in asked:
        made.append(_tensorboard(getattr(args, "logging_dir", None) or str(Path(args.output_dir) / "runs")))
    return made


def _open_run(package: str, name: str) -> bool:
    run = getattr(sys.modules.get(package), name, None)  # whoever opened a run has imported it
    return (run() if callable(run) else run) is not None


class _Wandb:
    def __init__(self, wandb: Any) -> None:
        self.wandb = wandb

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.wandb.run.log({**numbers, "train/global_step": step})

    def log_image(self, key: str, images: list[Any]) -> None:
        self.wandb.run.log({key: [self.wandb.Image(image) for image in images]})


class _MLflow:
    def __init__(self, mlflow: Any) -> None:
        self.mlflow, self.experiment, self.run_id = mlflow, self, mlflow.active_run().info.run_id

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(numbers, step=step)

    def log_figure(self, run_id: str, figure: Any, file: str) -> None:
        self.mlflow.log_figure(figure, file)


@lru_cache
def _tensorboard(folder: str) -> _TensorBoard:
    return _TensorBoard(folder)


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.experiment = SummaryWriter(folder)

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.experiment.add_scalar(name, value, step)
        self.experiment.flush()


def _pixels(figure: Any) -> Any:
    """A figure as an array (H, W, 4) of bytes."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()
