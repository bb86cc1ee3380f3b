"""Calibrate while the Hugging Face Trainer trains; the saved model brings its head along."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from doublehead.double_head import Alternation, Annealing, DoubleHead, Heads
from doublehead.integrations.attach import Attachment
from doublehead.integrations.fit_head import Choice, can_refit, refit
from doublehead.integrations.head_config import describe, rebuild
from doublehead.integrations.overlap import check_disjoint
from doublehead.integrations.trackers import for_transformers, log_numbers, log_reliability
from doublehead.integrations.watch import Watch
from doublehead.optional import require
from doublehead.plumbing import (
    average_over_processes,
    device_of,
    from_every_process,
    n_processes,
    rank,
)

logger = require("transformers.utils.logging", extra="transformers").get_logger("transformers.doublehead")
TrainerCallback: Any = require("transformers.trainer_callback", extra="transformers").TrainerCallback
HEAD = "calibration_head"  # the name of the head inside the model, and so of its weights in the file
FACTS = "doublehead"  # the entry of config.json that describes it
STATE = "doublehead.pt"  # the file of a checkpoint that holds the state of the head's training
PLACE = ("rank", "randomness", "batches")  # what each process has of its own in the state of an Alternation


class DoubleHeadTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Trains a calibration head beside the model of a Trainer: `callbacks=[DoubleHeadTrainerCallback(calib_dataset)]`.

    `calib_data` is a data set like `train_dataset`, batched and collated as that one is, or a loader of batches. The
    head becomes a part of the model: `save_model` and `save_pretrained` save it, `load_calibrated` brings both back,
    and in evaluation mode the model answers with calibrated logits, so `evaluate`, `predict` and a pipeline see
    them. The loss that `evaluate` reports stays that of the model itself; beside it stand ECE, its floor, NLL and
    accuracy of both heads. The rest of the model learns exactly as it would without the head.

    At the end of training, after the best model was loaded if that was asked for, the head is fitted anew on the
    finished model (`refit`); `choice` says what came of it. `wrap` makes another DoubleHead; the paper's is
    `partial(DoubleHead, kind="mlp")`. `augment` perturbs calibration batches. With either of them the head stays
    exactly as training left it. A model that has brought a head along keeps that one. `lr` is the head's learning
    rate at the peak of the main schedule, whose shape it follows; the head's own unless given.
    """

    def __init__(
        self,
        calib_data: Dataset[Any] | Iterable[Any],
        *,
        wrap: Callable[[nn.Module], DoubleHead] | None = None,
        every: int = 10,
        annealing: Annealing | None = None,
        augment: Callable[[Any], Any] | None = None,
        lr: float | None = None,
        weight_decay: float = 5e-5,
        figure: bool = True,
        n_bins: int = 15,
        seed: int = 0,
    ) -> None:
        self.calib_data, self.wrap = calib_data, wrap
        self.every, self.annealing, self.augment = every, annealing, augment
        self.lr, self.weight_decay, self.seed = lr, weight_decay, seed
        self.figure, self.n_bins = figure, n_bins
        self.alternation: Alternation | None = None
        self.choice: Choice | None = None
        self._attachment: Attachment | None = None
        self._watch = Watch(n_bins)
        self._seen: tuple[Heads, Tensor] | None = None

    @property
    def model(self) -> DoubleHead:
        """The network with its calibration head."""
        if self._attachment is None:
            raise RuntimeError("this DoubleHeadTrainerCallback has no model yet: give it to a Trainer first")
        return self._attachment.double

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Make the head a part of the model, before any optimizer is made."""
        if self._attachment is None or self._attachment.double.model is not model:
            brought = attached_to(model)
            if brought is not None and self.wrap is not None:
                _check_same_head(brought.double, self.wrap)
            self._attachment = brought or attach(model, (self.wrap or _wrap)(model))
            self._attachment.seen = self._note
        self.model.head.requires_grad_(False)  # no business of the Trainer's optimizer, nor of DDP

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module,
        optimizer: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Make the alternation, or go on with that of the checkpoint."""
        self.on_init_end(args, state, control, model)
        check_disjoint(self.calib_data, train_dataloader)
        self.model.head.to(device_of(model)).requires_grad_(True)
        saved = _load(_checkpoint(args, state), device_of(model)) if state.global_step else None
        self.alternation = Alternation(
            self.model,
            self._batches(args, train_dataloader),
            every=self.every,
            annealing=self.annealing,
            augment=self.augment,
            lr=optimizer,
            peak_lr=self.lr,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )
        if saved:
            self.model.head.load_state_dict(saved["head"])
            scale = saved.get("lr_scale", self.alternation.rate.scale)  # where it was kept before
            self.alternation.load_state_dict({"lr_scale": scale, **saved["alternation"]})

    def _batches(self, args: Any, train_dataloader: Any) -> Iterable[Any]:
        data: Any = self.calib_data
        if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
            return data  # type: ignore[no-any-return]
        return DataLoader(data, args.train_batch_size, shuffle=True, collate_fn=train_dataloader.collate_fn)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each optimizer step it is the head's turn."""
        if self.alternation is not None:
            done = state.epoch % 1
            self.alternation.step(done if done > 0 else 1.0)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The head rests, and is fitted to the finished model unless `wrap` or `augment` makes it another one."""
        self.model.head.requires_grad_(False)
        usual = self.wrap is None and self.augment is None and can_refit(self.model)
        if usual and self.alternation is not None:
            self.choice = refit(self.model, self.alternation.calib_batches, seed=self.seed)
            if state.is_world_process_zero:
                logger.info(f"calibration head: {self.choice.in_words()}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take in what the model just said, where it was told the labels."""
        if self._seen is not None:
            heads, labels = self._seen
            n = _n_own(len(labels))
            self._watch.add(Heads(heads.main[:n], heads.calib[:n]), labels[:n])
            self._seen = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Add the calibrated numbers to those of `evaluate`, and send them and the picture to the trackers."""
        watch, self._watch, self._seen = self._watch, Watch(self.n_bins), None
        watch.gather(device_of(self.model))
        if watch.n == 0:
            return
        prefix = next((key[: -len("_loss")] for key in metrics if key.endswith("_loss")), "eval")
        numbers = {f"{prefix}_{name}": value for name, value in watch.numbers().items()}
        metrics |= numbers
        if state.log_history and f"{prefix}_loss" in state.log_history[-1]:
            state.log_history[-1].update(numbers)
        if state.is_world_process_zero:
            trackers = for_transformers(args)
            for tracker in trackers:
                log_numbers(tracker, numbers, state.global_step)
            if self.figure and trackers:
                log_reliability(trackers, watch.reliability(), f"{prefix}_reliability", state.global_step)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the head's optimizer and each process's place in the data beside the Trainer's own."""
        if self.alternation is None:
            return
        alternation = self.alternation.state_dict()
        places = from_every_process({key: alternation.pop(key) for key in PLACE})
        if args.should_save:
            whole = {"head": self.model.head.state_dict(), "alternation": alternation, "places": places}
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(whole, file)

    def _note(self, heads: Heads, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if isinstance(labels, Tensor) and labels.shape == heads.main.shape[:1]:
            self._seen = heads, labels


def _wrap(model: nn.Module) -> DoubleHead:
    return DoubleHead(model, getattr(getattr(model, "config", None), "num_labels", None))


def attach(model: nn.Module, double: DoubleHead) -> Attachment:
    """Make the head of a DoubleHead a part of its model: named, saved with it, and asked in evaluation mode."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "num_labels"):
        raise TypeError(
            f"model must be a classifier of transformers with config.num_labels, got {type(model).__name__}"
        )
    facts = describe(double, config.num_labels)  # refuses a head that could not be saved
    model.add_module(HEAD, double.head)
    setattr(config, FACTS, facts)
    attachment = Attachment(double)
    object.__setattr__(model, "_doublehead", attachment)
    return attachment


def _check_same_head(double: DoubleHead, wrap: Callable[[nn.Module], DoubleHead]) -> None:
    """An error where a model has brought another head along than `wrap` makes."""
    model: Any = double.model
    head = model._modules.pop(HEAD)  # a layer of which could be taken for the model's last
    try:
        has, makes = (describe(one, model.config.num_labels) for one in (double, wrap(model)))
    finally:
        model.add_module(HEAD, head)
    if has != makes:
        raise ValueError(
            "wrap must make the head that the model has brought along, or be None, or the model come without one "
            f"(from_pretrained, not load_calibrated); the model has {has['heads']}, got {makes['heads']}"
        )


def attached_to(model: nn.Module) -> Attachment | None:
    """What `attach` attached to this model, if anything."""
    found = getattr(model, "_doublehead", None)
    return found if isinstance(found, Attachment) else None


def load_calibrated(path: str | Path, **options: Any) -> Any:
    """A model that was saved with its calibration head, answering with calibrated logits; in evaluation mode.

    `options` go to the model's own `from_pretrained`. Works for whatever class wrote the folder, and in a pipeline.
    """
    transformers = require("transformers", extra="transformers")
    path = Path(path)
    config = transformers.AutoConfig.from_pretrained(path)
    facts = getattr(config, FACTS, None)
    if facts is None:
        raise ValueError(
            f"{path / 'config.json'} must have an entry {FACTS!r}: this model was saved without a head"
        )
    cls = getattr(transformers, config.architectures[0])
    weights = _head_weights(path)
    logger = transformers.utils.logging
    before = logger.get_verbosity()
    logger.set_verbosity_error()  # the head's weights are not unexpected here
    try:
        model = cls.from_pretrained(path, **options)
    finally:
        logger.set_verbosity(before)
    double = rebuild(model, facts)
    double.head.load_state_dict(weights)
    double.head.to(device_of(model)).requires_grad_(False)
    attach(model, double)
    return model.eval()


def _head_weights(path: Path) -> dict[str, Tensor]:
    """The head's weights in a saved folder, whole or in shards."""
    index = path / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted({file for name, file in places.items() if name.startswith(f"{HEAD}.")})
    weights = {}
    for file in files:
        with require("safetensors", extra="transformers").safe_open(path / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name.startswith(f"{HEAD}."):
                    weights[name.removeprefix(f"{HEAD}.")] = tensors.get_tensor(name)
    return weights


def _checkpoint(args: Any, state: Any) -> Path:
    asked = args.resume_from_checkpoint
    folder = (
        Path(asked) if isinstance(asked, str) else Path(args.output_dir) / f"checkpoint-{state.global_step}"
    )
    return folder / STATE


def _load(file: Path, device: torch.device) -> dict[str, Any] | None:
    """The state in a checkpoint, for all processes or for none: they must go on at the same step."""
    there = average_over_processes(torch.tensor(float(file.exists()), device=device))
    if there < 1:
        warnings.warn(
            f"{file} is not there: the calibration head goes on with its saved weights and a fresh optimizer. "
            "To resume from a folder outside output_dir name it in TrainingArguments(resume_from_checkpoint=...) too",
            stacklevel=2,
        )
        return None
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    # A process that the saved run did not have gets another one's place, which an Alternation does not take.
    place = state["places"][min(rank(), len(state["places"]) - 1)]
    return {**state, "alternation": {**state["alternation"], **place}}


def _n_own(n: int) -> int:
    """How many of the n samples in this process's batch count.

    Accelerate fills up the last batch of all processes with samples that had their turn. It tells how many are left
    then, of which the first processes hold the first.
    """
    batches = require("accelerate.state", extra="transformers").GradientState()
    if n_processes() == 1 or not batches.end_of_dataloader or batches.remainder <= 0:
        return n
    return min(n, max(0, int(batches.remainder) - n * rank()))
