"""What the callbacks for Lightning and Transformers share: hooks, running numbers of both heads, experiment trackers.

Frameworks save, load, distribute and serve the user's own module. So the calibration is attached to it from outside,
and the module keeps its class, the names of its weights and its place in the framework.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.calibrated import Calibrated, Heads
from doublehead.calibration_head import HeadSpec
from doublehead.calibrators.choose import Choice
from doublehead.curves import Reliability, reliability
from doublehead.double_head import DoubleHead
from doublehead.network import Reader
from doublehead.plots import draw_reliability, save
from doublehead.predictions import Predictions
from doublehead.stream import Tally
from doublehead.torch_tools import evaluating, from_every_process, n_processes

Answer = Callable[[Tensor, Tensor], Tensor]  # (main logits, features) -> calibrated logits
N_BINS = 15


class CompanionCallback:
    """The part of a callback that is the same for every framework: its arguments, the companion and the result.

    `options` are those of `DoubleHead`, checked before there is a network. Heads that are given are used as trained,
    so there must be one. With `augment` it is a temperature head unless `heads` is given: the second opinion would be
    judged on clean data.

    >>> CompanionCallback([], evry=5)
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'evry'
    """

    def __init__(self, calib_data: Any, *, figure: bool = True, **options: Any) -> None:
        super().__init__()
        # Network, data, optimizer and steps come from the trainer.
        inspect.signature(DoubleHead).bind(None, None, follow=None, steps=None, **options)
        heads = options.get("heads")
        if heads is None and options.get("augment") is not None:
            heads = HeadSpec(kind="temperature")
        if heads is not None and not isinstance(heads, HeadSpec) and len(heads) != 1:
            raise ValueError(f"heads must be None or one HeadSpec, got {len(heads)} of them")
        self.calib_data, self.figure, self.options = calib_data, figure, {**options, "heads": heads}
        self.double: DoubleHead | None = None
        self._model: Calibrated | None = None
        self._attachment: Attachment | None = None
        self._seen: tuple[Heads, dict[str, Any]] | None = None  # of the last forward: answers and keywords
        self._watch = RunningMetrics()  # of the evaluation under way

    def _attach(self, replace: bool) -> None:
        """Put hooks on the network that run the finished calibration, or in training the heads as they are now."""
        self._detach()
        double = self.double
        assert double is not None
        answer = double.answer if self._model is None else self._model.calibrated
        self._attachment = Attachment(double.network, double.reader, answer, replace=replace, seen=self._note)

    def _detach(self) -> None:
        self._seen = None
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    def _note(self, heads: Heads, kwargs: dict[str, Any]) -> None:
        self._seen = heads, kwargs

    def _numbers(self, prefix: str) -> tuple[dict[str, float], Reliability | None]:
        """What was counted by all processes, named for a log, and the diagram; then counting starts again."""
        watch, self._watch, self._seen = self._watch, RunningMetrics(), None
        numbers, curve = watch.result()
        return {f"{prefix}_{name}": value for name, value in numbers.items()}, curve

    @property
    def model(self) -> Calibrated:
        """The network and its calibration as one module, once training has ended."""
        if self._model is None:
            raise RuntimeError(f"this {type(self).__name__} has no model yet: train with it first")
        return self._model

    @property
    def choice(self) -> Choice | None:
        """What was chosen on held-back calibration data, and why; None where one head is used as trained."""
        return None if self._model is None else getattr(self._model.head, "choice", None)


# --- hooks


class Attachment:
    """Hooks on a network that run `answer` on every forward in evaluation mode.

    With `replace` the network's output carries the calibrated log-probabilities, otherwise it stays as it is.
    Either way `seen` is called with the log-probabilities of both heads and the keywords of the call. While the
    reader itself runs the network, in training or calibration, the hooks rest.
    """

    def __init__(
        self,
        network: nn.Module,
        reader: Reader,
        answer: Answer,
        *,
        replace: bool = True,
        seen: Callable[[Heads, dict[str, Any]], None] | None = None,
    ) -> None:
        self.network, self.reader, self.answer = network, reader, answer
        self.replace, self.seen, self.active = replace, seen, True
        reader.tap.wake()  # for every forward in evaluation mode, whoever calls it
        self._handles = [
            network.register_forward_pre_hook(self._before),
            network.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, network: nn.Module, args: Any) -> None:
        tap = self.reader.tap
        if self.active and not network.training and getattr(network, "_is_replica", False):
            raise RuntimeError(
                "a calibration head cannot follow the copies of a model that nn.DataParallel makes: start a process "
                "for each GPU (torchrun --nproc_per_node), or make one visible (CUDA_VISIBLE_DEVICES=0)"
            )
        if tap.now.opener is self:  # the last forward raised an error
            tap.now.opener = None
            tap.record(False)
        if self.active and not network.training and not tap.now.recording:
            tap.now.opener = self
            tap.record(True)

    def _after(self, network: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        tap = self.reader.tap
        if tap.now.opener is not self:
            return output
        tap.now.opener = None
        tap.record(False)
        answer = self.reader.answer(output, tap.collect())
        heads = self._heads(answer.logits, answer.features)
        if self.seen is not None:
            self.seen(heads, kwargs)
        return self.reader.replaced(output, heads.calib) if self.replace else output

    def _heads(self, main: Tensor, features: Tensor) -> Heads:
        return Heads(main.float().log_softmax(-1), self.answer(main, features).float().log_softmax(-1))

    @torch.no_grad()
    def ask(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Heads:
        """The log-probabilities of both heads for some inputs, in evaluation mode, without a call of `seen`."""
        with evaluating(self.network):
            found = self.reader.run(args, kwargs)
        return self._heads(found.logits, found.features)

    def __getstate__(self) -> dict[str, Any]:
        """A copied network has a calibration of its own; the copy drops its listener, which may not be copyable.

        One that only listens to heads in training rests in the copy: these do not follow it.
        """
        state = {**self.__dict__, "seen": None}
        return state if self.replace else {**state, "answer": None, "active": False}

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside the block the network's output is its own, as if nothing were attached."""
        self.active, before = False, self.active
        try:
            yield
        finally:
            self.active = before


# --- numbers


class RunningMetrics:
    """Numbers of the main and the calibration head over batches, in memory that does not grow.

    Rows whose logits are not finite are left out.

    >>> watch = RunningMetrics()
    >>> watch.add(Heads(torch.tensor([[4.0, 0.0]]), torch.tensor([[1.0, 0.0]])), torch.tensor([1]))
    >>> numbers, _ = watch.result()
    >>> round(numbers["ece_main"], 3), round(numbers["ece_calib"], 3)
    (0.982, 0.731)
    """

    def __init__(self) -> None:
        self._tallies: list[Tally] = []  # of main and calib; empty before the first batch

    @torch.no_grad()
    def add(self, heads: Heads, labels: Tensor, n: int | None = None) -> None:
        """Add the first `n` rows of a batch: logits (B, K) of both heads and labels, as `Reader.targets` gives them."""
        finite = torch.isfinite(heads.main[:n]).all(1) & torch.isfinite(heads.calib[:n]).all(1)
        if labels.ndim == 1:
            finite &= labels[:n] >= 0
        rows = finite.nonzero()[:, 0]
        if len(rows):
            both = (Predictions(logits[rows].float(), labels[rows]) for logits in heads)
            self._tallies = _sum([self._tallies, [Tally.of(p, N_BINS, per_class=False) for p in both]])

    def result(self) -> tuple[dict[str, float], Reliability | None]:
        """The numbers and the calibration head's reliability diagram, over all processes; each must call it.

        They are "ece_main", "ece_calib", "ece_floor", and "nll" and "accuracy" of both heads; none without a sample.
        """
        if n_processes() > 1:
            self._tallies = _sum(from_every_process(self._tallies))
        if not self._tallies:
            return {}, None
        numbers: dict[str, float] = {}
        for tally, name in zip(self._tallies, Heads._fields):
            values = tally.summary().values
            numbers |= {f"{key}_{name}": values[key] for key in ("ece", "nll", "accuracy")}
        return numbers | {"ece_floor": values["ece_floor"]}, reliability(self._tallies[1].top, N_BINS)


def _sum(parts: list[list[Tally]]) -> list[Tally]:
    """Head by head; parts of processes without samples are empty."""
    return [reduce(add, tallies) for tallies in zip(*(part for part in parts if part))]


# --- trackers: Lightning sends numbers itself, Transformers before they are known here. For figures each tracker has
# its own call. No tracker is imported here.


def log_reliability(
    loggers: Iterable[Any], curve: Reliability, name: str, step: int, title: str | None = None
) -> None:
    """Send a reliability diagram to Lightning's loggers, which are recognised by their methods."""
    loggers = list(loggers)
    figure = draw_reliability(curve, title=title).figure if loggers else None
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(logger, "log_image"):  # W&B; a step of its own, since its steps may only grow
            logger.log_image(key=name, images=[figure])
        elif hasattr(logger, "run_id") and hasattr(experiment, "log_figure"):  # MLflow
            experiment.log_figure(logger.run_id, figure, f"{name}/{step:08d}.png")
        elif hasattr(experiment, "add_figure"):  # TensorBoard
            experiment.add_figure(name, figure, step)
        elif getattr(logger, "log_dir", None):
            save(figure, Path(logger.log_dir) / f"{name.replace('/', '_')}-{step:08d}.png", dpi=100)


def log_to_trackers(
    args: Any, numbers: dict[str, float], curve: Reliability | None, name: str, step: int
) -> None:
    """Send numbers and a reliability diagram to the trackers named in `TrainingArguments.report_to`.

    W&B and MLflow are asked for the run that the Trainer has opened; TensorBoard gets a second event file in the
    Trainer's folder.
    """
    asked = args.report_to or []
    figure = draw_reliability(curve).figure if curve is not None and asked else None
    # Who opened a run has imported the package.
    wandb, mlflow = (sys.modules.get(package) for package in ("wandb", "mlflow"))
    if "wandb" in asked and wandb is not None and wandb.run is not None:
        images = {} if figure is None else {name: wandb.Image(figure)}
        wandb.run.log({**numbers, **images, "train/global_step": step})
    if "mlflow" in asked and mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics(numbers, step=step)
        if figure is not None:
            mlflow.log_figure(figure, f"{name}/{step:08d}.png")
    if "tensorboard" in asked:
        writer = _writer(getattr(args, "logging_dir", None) or str(Path(args.output_dir) / "runs"))
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        if figure is not None:
            writer.add_figure(name, figure, step)
        writer.flush()


@lru_cache
def _writer(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)
