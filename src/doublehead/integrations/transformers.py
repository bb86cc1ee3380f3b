"""Calibration for models that a Hugging Face Trainer trains; the saved model includes its calibration."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from doublehead.calibrated import Calibrated
from doublehead.calibration_data import check_disjoint
from doublehead.double_head import DoubleHead
from doublehead.integrations.callbacks import Attachment, CompanionCallback, log_to_trackers
from doublehead.saving import describe, rebuild
from doublehead.system import read_file, require, write_file
from doublehead.tasks import SUPPORTED
from doublehead.torch_tools import (
    StaysFloat32,
    device_of,
    from_every_process,
    n_processes,
    rank,
)

logger = require("transformers.utils.logging", extra="transformers").get_logger("transformers.doublehead")
TrainerCallback: Any = require("transformers.trainer_callback", extra="transformers").TrainerCallback
PART = "calibration_head"  # the name of the calibration inside the model, and so of its weights in the file
FACTS = "doublehead"  # the entry of config.json that describes it
BESIDE_ADAPTER = "calibration_head.safetensors"  # the file beside an adapter that holds both
PEFT_CLASSES = {  # by the task type of an adapter
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    None: "AutoPeftModel",  # such as that of a classifier of images
}
STATE = "doublehead.pt"  # the file of a checkpoint that holds the state of the companion
PLACE = ("rank", "randomness", "batches")  # what each process has of its own in the state of a DoubleHead


class DoubleHeadTrainerCallback(CompanionCallback, TrainerCallback):  # type: ignore[misc]
    """Calibrates the model of a Trainer: `callbacks=[DoubleHeadTrainerCallback(calib_dataset)]`.

    `calib_data` is data that the model never trains on: a data set like `train_dataset`, batched and collated as that
    one is, or a loader of batches. `options` are those of `DoubleHead`, such as `every=10` or `heads=PAPER`.

    While the model trains, a `DoubleHead` trains calibration heads beside it and leaves the model as it is. `evaluate`
    reports ECE, its floor, NLL and accuracy of both heads beside the model's own loss. At the end of training, after
    `load_best_model_at_end`, the callback's `model` is the finished `Calibrated`, and the calibration is put into the
    Trainer's model (`attach`): `evaluate`, `predict` and pipelines then give calibrated answers, `save_model` and
    `save_pretrained` save the calibration too, and `load_calibrated` brings both back. A calibration that the model
    had before is removed when training begins.
    """

    def __init__(self, calib_data: Any, *, figure: bool = True, **options: Any) -> None:
        if options.get("logits_of") is not None:
            raise TypeError(
                "logits_of must not be given: a model of transformers returns an object with `logits`"
            )
        super().__init__(calib_data, figure=figure, **options)

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Raise an error for a model that cannot hold a calibration; hook one that already holds one."""
        _check_classifier(model)
        attachment = attached_to(model)
        if attachment is not None:
            attachment.seen = self._note

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
        """Make the companion, or go on with that of the checkpoint."""
        _check_classifier(model)
        check_disjoint(self.calib_data, train_dataloader)
        if self.figure and args.report_to:
            require("matplotlib.figure", extra="plots")  # now, not after an epoch
        self._detach()  # of a training that was stopped
        detach(model)
        saved = _load(_checkpoint(args, state)) if state.global_step else None
        batches = self._batches(args, train_dataloader)
        self.double, self._model = DoubleHead(model, batches, follow=optimizer, **self.options), None
        if saved:
            self.double.load_state_dict(saved)
        self._attach(replace=False)

    def _batches(self, args: Any, train_dataloader: Any) -> Any:
        data: Any = self.calib_data
        if isinstance(data, (DataLoader, tuple)) or not hasattr(data, "__getitem__"):
            return data
        collate = train_dataloader.collate_fn
        # The columns that the Trainer has left in a `datasets` one. Without removal a transform may have made others.
        columns = getattr(train_dataloader.dataset, "column_names", None)
        if columns and args.remove_unused_columns:
            remove = require("transformers.trainer_utils", extra="transformers").RemoveColumnsCollator
            collate = remove(collate, columns)
        return DataLoader(data, args.train_batch_size, shuffle=True, collate_fn=collate)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count each step of the optimizer."""
        if self.double is not None:
            done = state.epoch % 1
            self.double.step(done if done > 0 else 1.0)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Calibrate the finished model and attach the calibration to it."""
        if self.double is None or self._attachment is None:
            return
        self._detach()
        self._model = self.double.finish()
        attach(model, self._model).seen = self._note
        if self.choice is not None and state.is_world_process_zero:
            logger.info(f"calibration: {self.choice}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Count the outputs of the last batch if the model was given its labels."""
        attachment, seen = self._attachment or attached_to(model), self._seen
        self._seen = None
        labels = None if seen is None else seen[1].get("labels")
        if attachment is None or seen is None or not isinstance(labels, Tensor):
            return
        rows, odd = divmod(len(seen[0].main), len(labels))
        if not odd:
            self._watch.add(seen[0], attachment.reader.targets(labels), _n_own(len(labels)) * rows)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, model: nn.Module, metrics: dict[str, float], **_: Any
    ) -> None:
        """Add the numbers of both heads to those of `evaluate`, and send them and the diagram to the trackers."""
        prefix = next((key[: -len("_loss")] for key in metrics if key.endswith("_loss")), "eval")
        numbers, curve = self._numbers(prefix)
        metrics |= numbers
        if state.log_history and f"{prefix}_loss" in state.log_history[-1]:
            state.log_history[-1].update(numbers)
        if curve is not None and state.is_world_process_zero:
            shown = curve if self.figure else None
            log_to_trackers(args, numbers, shown, f"{prefix}_reliability", state.global_step)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the companion's state, with each process's place in the data, beside the Trainer's own."""
        if self.double is None:
            return
        double = self.double.state_dict()
        places = from_every_process({key: double.pop(key) for key in PLACE})
        if args.should_save:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"double": double, "places": places}, file)


def _check_classifier(model: nn.Module) -> None:
    if not hasattr(getattr(model, "config", None), "num_labels"):
        raise TypeError(
            f"model must be a classifier of transformers with config.num_labels, got {type(model).__name__}"
        )
    if getattr(model.config, "problem_type", None) == "regression":
        raise TypeError(f"model must be a classifier, got one with problem_type 'regression'; {SUPPORTED}")


# --- the calibration inside a model


class CalibrationPart(StaysFloat32):
    """What a model carries of its calibration: the head, and the heads that were trained beside the model if any."""

    def __init__(self, calibrated: Calibrated) -> None:
        super().__init__()
        self.head, self.opinion = calibrated.head, calibrated.opinion


def attach(model: nn.Module, calibrated: Calibrated) -> Attachment:
    """Put the calibration of a `Calibrated` into its network, which then gives calibrated answers in evaluation mode.

    The `logits` of its outputs are then normalised log-probabilities. The model keeps its class, its weights' names and
    its config. It gains the submodule `calibration_head` and the config entry `doublehead`, which
    `save_pretrained` saves. The callback does this at the end of training; for a trained model it is
    `attach(model, calibrate(model, calib_loader))`. A PEFT model saves the calibration beside its adapter, and
    what its `merge_and_unload` returns carries it too.
    """
    _check_classifier(model)
    if calibrated.reader.views:
        raise ValueError("calibrated must have no views to be attached: the model runs once on its inputs")
    if calibrated.network is not model:
        calibrated = _moved(calibrated, model)
    facts, inner = describe(calibrated), _base(model)
    detach(model)
    if inner is not model:  # the names that the layers have once the adapter is merged
        facts["layer"] = re.sub(r"^base_model\.model\.|\.modules_to_save\.\w+$", "", facts["layer"])
        model.save_pretrained = MethodType(_save_beside_adapter, model)  # type: ignore[assignment]
    setattr(inner.config, FACTS, facts)
    part = CalibrationPart(calibrated).to(device_of(model)).requires_grad_(False).train(model.training)
    inner.add_module(PART, part)
    calibrated.register_state_dict_post_hook(_without_part)  # type: ignore[no-untyped-call]
    # PEFT calls the inner model's forward past its hooks, so these wait for the merge.
    for one in [model] if inner is model else [inner, model]:
        attachment = Attachment(one, calibrated.reader, calibrated.calibrated)
        object.__setattr__(one, "_doublehead", attachment)
    return attachment


def _base(model: nn.Module) -> nn.Module:
    """The model that `merge_and_unload` of a PEFT model returns; any other model itself."""
    get: Any = getattr(model, "get_base_model", None)
    return model if get is None else get()


def _save_beside_adapter(model: Any, save_directory: str | Path, *args: Any, **options: Any) -> None:
    """PEFT's `save_pretrained`, and the calibration in a file of its own."""
    type(model).save_pretrained(model, save_directory, *args, **options)
    if options.get("is_main_process", True):
        inner = _base(model)
        weights = {name: value.contiguous() for name, value in getattr(inner, PART).state_dict().items()}
        write_file(Path(save_directory) / BESIDE_ADAPTER, weights, getattr(inner.config, FACTS))


def _moved(calibrated: Calibrated, model: nn.Module) -> Calibrated:
    """The calibration of a model whose last layer is now in another one."""
    old = calibrated.reader
    for name, module in model.named_modules():
        if any(getattr(hook, "__self__", None) is old.tap for hook in module._forward_hooks.values()):
            reader = copy.copy(old)  # whose hook is on that layer
            reader.network, reader.layer = model, name
            return Calibrated(model, calibrated.head, reader, calibrated.opinion).eval()
    raise ValueError(
        f"calibrated must be a Calibrated of this very {type(model).__name__}, got one of another "
        f"{type(calibrated.network).__name__}"
    )


def _without_part(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The state of a Calibrated names its calibration once, not a second time inside its network."""
    for name in [name for name in state if name.startswith(f"{prefix}network.") and f".{PART}." in name]:
        del state[name]


def detach(model: nn.Module) -> None:
    """Remove what `attach` added; a model without a calibration is left unchanged."""
    inner = _base(model)
    config = getattr(model, "config", None)
    if hasattr(config, FACTS):
        delattr(config, FACTS)
    if hasattr(inner, PART):
        delattr(inner, PART)
    model.__dict__.pop("save_pretrained", None)
    for one in {inner, model}:
        attachment = attached_to(one)
        if attachment is not None:
            attachment.detach()
            delattr(one, "_doublehead")


def attached_to(model: nn.Module) -> Attachment | None:
    """What `attach` attached to this model, if anything."""
    found = getattr(model, "_doublehead", None)
    return found if isinstance(found, Attachment) else None


def load_calibrated(path: str | Path, model_class: Any = None, **options: Any) -> Any:
    """A model that was saved with its calibration, in evaluation mode; give it to a pipeline as it is.

    `path` is a folder that `save_model` or `save_pretrained` wrote; an adapter of PEFT is merged into its base model.
    `model_class` is needed where the model's class is not part of transformers. `options` go to `from_pretrained`.
    """
    transformers = require("transformers", extra="transformers")
    path = Path(path)
    facts: Any
    if (path / BESIDE_ADAPTER).exists():
        facts, weights = read_file(path / BESIDE_ADAPTER, torch.device("cpu"))
        peft: Any = require("peft", extra="transformers")
        cls = getattr(peft, PEFT_CLASSES[peft.PeftConfig.from_pretrained(path).task_type])
        n_outputs = facts["n_labels"] or (1 if facts["task"] == "binary" else facts["n_classes"])
        model = cls.from_pretrained(path, num_labels=n_outputs, **options).merge_and_unload()
    else:
        config = transformers.AutoConfig.from_pretrained(path)
        facts, weights = getattr(config, FACTS, None), _part_weights(path)
        if facts is None or not weights:
            raise ValueError(
                f"{path} must hold a model that was saved with its calibration, got one without: "
                f"no entry {FACTS!r} in its config.json or no {PART!r} among its weights"
            )
        cls = model_class or getattr(transformers, config.architectures[0])
        before = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.set_verbosity_error()  # the weights of the calibration are not unexpected here
        try:
            model = cls.from_pretrained(path, **options)
        finally:
            transformers.utils.logging.set_verbosity(before)
    calibrated = rebuild(model, facts)
    CalibrationPart(calibrated).load_state_dict(weights)
    attach(model, calibrated)
    return model.eval()


def _part_weights(path: Path) -> dict[str, Tensor]:
    """The weights of the calibration in a saved folder, whole or in shards."""
    index = path / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted({file for name, file in places.items() if name.startswith(f"{PART}.")})
    weights: dict[str, Tensor] = {}
    for file in files:
        with require("safetensors", extra="transformers").safe_open(path / file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(f"{PART}.")]  # noqa: SIM118 (not a dict)
            weights |= {name.removeprefix(f"{PART}."): tensors.get_tensor(name) for name in names}
    return weights


# --- checkpoints and processes


def _checkpoint(args: Any, state: Any) -> Path:
    asked = args.resume_from_checkpoint
    folder = (
        Path(asked) if isinstance(asked, str) else Path(args.output_dir) / f"checkpoint-{state.global_step}"
    )
    return folder / STATE


def _load(file: Path) -> dict[str, Any] | None:
    """The state in a checkpoint, for all processes or for none: they must go on at the same step."""
    if not all(from_every_process(file.exists())):
        warnings.warn(
            f"{file} is not there: the calibration heads start from scratch. To resume from a folder outside "
            "output_dir name it in TrainingArguments(resume_from_checkpoint=...) too",
            stacklevel=2,
        )
        return None
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    # A process that the saved run did not have gets another one's place, which a DoubleHead does not take.
    return {**state["double"], **state["places"][min(rank(), len(state["places"]) - 1)]}


def _n_own(n: int) -> int:
    """How many of the n samples in this process's batch count.

    Accelerate fills the last batch of all processes with samples that were used before. It states how many new ones
    there are, which come first in the order of the processes.
    """
    batches = require("accelerate.state", extra="transformers").GradientState()
    if n_processes() == 1 or not batches.end_of_dataloader or batches.remainder <= 0:
        return n
    return min(n, max(0, int(batches.remainder) - n * rank()))
