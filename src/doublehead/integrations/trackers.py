"""Figures to experiment trackers through the logger that a framework already has; no tracker is imported here.

Numbers need no help: Lightning and Transformers send them. A figure goes by another call in each tracker, and the
logger is known by what it can do: W&B (`log_image`), MLflow (`run_id` and `experiment.log_figure`), TensorBoard
(`experiment.add_figure`), and any logger with a folder of its own gets a file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
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
    """Send a matplotlib figure to one logger (or bare SummaryWriter); False where it has no way to take it."""
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


class ActiveRun:
    """The run that W&B or MLflow has open in this process, where the framework hands over no logger."""

    def __init__(self, package: str) -> None:
        self.package = package

    def log(self, name: str, figure: Any, step: int) -> bool:
        """Send a figure to the open run; False where there is none."""
        module = sys.modules.get(self.package)  # whoever opened a run has imported it
        if self.package == "wandb" and module is not None and module.run is not None:
            module.run.log({name: module.Image(_pixels(figure))}, commit=False)
            return True
        if self.package == "mlflow" and module is not None and module.active_run() is not None:
            module.log_figure(figure, f"{name}/{step:08d}.png")
            return True
        return False


def _pixels(figure: Any) -> Any:
    """A figure as an array (H, W, 4) of bytes."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()
