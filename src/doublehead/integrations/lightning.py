"""Calibrate while Lightning trains: one callback, no change to the LightningModule."""

from __future__ import annotations

import math
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

from doublehead.calibrate import fit
from doublehead.calibrated import Calibrated, read
from doublehead.calibration_data import ToPair, check_disjoint, n_shared, unpack
from doublehead.double_head import DoubleHead
from doublehead.integrations.callbacks import Attachment, CompanionCallback, RunningMetrics, log_reliability
from doublehead.saving import describe, rebuild
from doublehead.system import require, warn
from doublehead.torch_tools import device_of, evaluating, from_every_process, seeded

Callback: Any = require("lightning.pytorch", extra="lightning").Callback
rank_zero_info: Any = require("lightning.pytorch.utilities.rank_zero", extra="lightning").rank_zero_info
Wrapper: Any = require("lightning.fabric.utilities.distributed", extra="lightning").DistributedSamplerWrapper

FITTED = "calibration"  # the entry of the callback's state that holds what was fitted at the end


class DoubleHeadCallback(CompanionCallback, Callback):  # type: ignore[misc]
    """Calibrates the network of a LightningModule while it trains: `callbacks=[DoubleHeadCallback(calib_data)]`.

    The module, its optimizer and its weights after training are bit-identical with and without the callback. It makes a
    `DoubleHead` beside the network when training starts; `options` are those of `DoubleHead`, such as `every` and
    `heads`. `classifier` names the submodule that gives the logits, where it is not found by itself. `to_pair`
    turns a batch into (inputs, labels) where it is not one already.

    Validation logs `val_ece_calib`, `val_ece_main`, `val_ece_floor`, NLL and accuracy of both heads, and sends the
    reliability diagram to the trainer's loggers. In several processes these are the numbers of all samples, each
    counted once where Lightning distributes them.

    At the end of training the network is calibrated: `model` is the `Calibrated`, and `choice` says which stages were
    chosen and why. `trainer.test` and `trainer.predict` then see calibrated log-probabilities. If they, or
    `trainer.validate`, run on other weights, such as those of the best checkpoint, the calibration is fitted to these
    first. Callbacks that change weights at the end of training, such as those that average them, come before this one.

    With `heads=PAPER`, another HeadSpec or `augment`, one head is trained and used as it is at the end of training.
    Checkpoints hold the state of the heads and their training, and resume exactly.
    """

    def __init__(
        self,
        calib_data: Any,
        *,
        classifier: str | None = None,
        to_pair: ToPair | None = None,
        figure: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(calib_data, figure=figure, **options)
        self.classifier, self.to_pair = classifier, to_pair
        self._fitted_to: int | None = None  # key of the weights to which the calibration was fitted
        self._loaded: dict[str, Any] = {}  # state of the DoubleHead from a checkpoint, until there is one
        self._global_step = 0
        self._has_warned = False  # that a step did not call the network

    @property
    def settled(self) -> bool:
        """Whether the calibration was fitted to the network's weights as they are now."""
        return self._model is not None and self._fitted_to == key_of_weights(self._model.network)

    # Training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the DoubleHead, now that optimizers and devices are settled."""
        check_disjoint(self.calib_data, trainer.train_dataloader)
        if self.figure and trainer.loggers:
            require("matplotlib.figure", extra="plots")  # now, not after an epoch
        if trainer.val_dataloaders is not None and n_shared(trainer.val_dataloaders, self.calib_data):
            warnings.warn(
                "the validation data holds calibration data: val_ece_calib is measured on what the heads learned from",
                stacklevel=2,
            )
        self.double = self._make_double(trainer, pl_module, trainer.optimizers[0])
        self._model, self._global_step = None, trainer.global_step

    @torch.inference_mode(False)  # the heads may learn later
    def _make_double(self, trainer: Any, pl_module: Any, follow: Any = None) -> DoubleHead:
        """A DoubleHead in the state of the checkpoint that was loaded, or else of the one before it."""
        network, precision = find_classifier(pl_module, self.classifier), trainer.precision_plugin
        if not self._loaded and self.double is not None and self.double.network is network:
            self._loaded = self.double.state_dict()

        def to_pair(batch: Any) -> Any:
            return precision.convert_input(batch if self.to_pair is None else self.to_pair(batch))

        with precision.val_step_context():
            made = DoubleHead(network, self.calib_data, follow=follow, to_pair=to_pair, **self.options)
        if self._loaded:
            made.load_state_dict(self._loaded)
            self._loaded = {}
        return made

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count each optimizer step, which is not each batch when gradients accumulate."""
        if self.double is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        n = trainer.num_training_batches
        with trainer.precision_plugin.train_step_context():
            has_read = self.double.step(None if math.isinf(n) else min(1.0, batch_idx / n))
        if has_read:
            pl_module.log("calib_loss", self.double.training.losses.mean())  # type: ignore[union-attr]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Calibrate the trained network."""
        self._finish(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn if another callback has changed the network since."""
        if self._model is not None and not self.settled:
            warnings.warn(
                "the network's weights have changed since the calibration was fitted to them: put the callback that "
                "changes them before DoubleHeadCallback. trainer.test and trainer.predict will fit it again",
                stacklevel=2,
            )

    @torch.inference_mode(False)  # which testing and predicting are in
    def _finish(self, trainer: Any) -> None:
        """`DoubleHead.finish`, with the network run in the trainer's precision and left in its mode."""
        double = self.double
        assert double is not None
        network, is_trained = double.network, double.calls >= double.every
        with evaluating(network):
            if len(double.bank.specs) == 1:
                if not is_trained:
                    raise RuntimeError(
                        "the calibration head is used as trained, and it was not trained yet: call trainer.fit first, "
                        "or give the ckpt_path of a checkpoint that trainer.fit saved with this callback"
                    )
                self._model = double.finish()
            else:
                drawn = seeded(double.seed, device_of(network), double.calib_data)
                with drawn, trainer.precision_plugin.val_step_context():
                    readings = read(double.reader, double.calib_data, double.to_pair, skip=True)
                beside = double if is_trained else None
                self._model = fit(network, double.reader, readings, beside=beside, seed=double.seed)
                rank_zero_info(f"calibration: {self.choice}")
        self._fitted_to = key_of_weights(network)

    # Numbers and figures

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Fit the calibration to the weights that the network has now, where that is not done."""
        network = find_classifier(pl_module, self.classifier)
        is_known = self.double is not None and self.double.network is network and self.settled
        if all(from_every_process(is_known)):  # all processes fit together
            self._loaded = {}  # a checkpoint of these weights, or none: the heads are beyond it
            return
        self.double = self._make_double(trainer, pl_module)
        self._finish(trainer)

    on_predict_start = on_test_start

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The same for `trainer.validate`; within training the heads answer as they are."""
        if trainer.state.fn == "validate":
            self.on_test_start(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the network's outputs in validation, and leave them as they are."""
        self._watch = RunningMetrics()
        if not trainer.sanity_checking:
            self._attach(replace=False)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count the answers of both heads in the forward that was just made, or make one."""
        heads, self._seen = self._seen[0] if self._seen else None, None
        if self._attachment is None or dataloader_idx != 0:
            return
        args, kwargs, labels, *_ = unpack(batch, pl_module.device, self.to_pair)
        targets = self._attachment.reader.targets(labels)
        if heads is None or len(heads.main) != len(targets):
            with trainer.precision_plugin.val_step_context():
                heads = self._attachment.ask(args, kwargs)
        n = _n_own(_first_loader(trainer), batch_idx, len(labels)) * (len(targets) // len(labels))
        self._watch.add(heads, targets, n)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the numbers, and the figure on the first process."""
        self._detach()
        numbers, curve = self._numbers("val")
        # Every process has the numbers of all, so their mean is the same; without sync_dist Lightning would warn.
        pl_module.log_dict(numbers, sync_dist=True)
        if curve is not None and self.figure and trainer.is_global_zero:
            title = f"calibrated, epoch {trainer.current_epoch}"
            log_reliability(trainer.loggers, curve, "reliability", trainer.global_step, title)

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on the network returns calibrated log-probabilities."""
        self._attach(replace=True)

    on_predict_epoch_start = on_test_epoch_start

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on the network returns its own output again."""
        self._detach()

    on_predict_epoch_end = on_test_epoch_end

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Warn once if no hook of the network was called, which `self.forward(x)` does not do."""
        if self._seen is None and not self._has_warned:
            self._has_warned = True
            warn(
                "the step's outputs are not calibrated: it did not call the classifier itself. Write self(x), or "
                "self.model(x), instead of self.forward(x), which skips all hooks"
            )
        self._seen = None

    on_predict_batch_end = on_test_batch_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the module as it was."""
        self._detach()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The heads, the state of their training, the position in the calibration data; the calibration once fitted."""
        if self._loaded or self.double is None:
            return self._loaded
        model, fitted = self._model, {}
        if model is not None and self.settled and model.reader.logits_of is None:
            weights = {
                name: value for name, value in model.state_dict().items() if not name.startswith("network.")
            }
            fitted = {FITTED: {"facts": describe(model), "weights": weights}}
        return {**self.double.state_dict(), **fitted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until there is a DoubleHead to load it."""
        self._loaded = dict(state_dict)


def load_calibrated(
    path: str | Path, module_class: Any, *, classifier: str | None = None, **options: Any
) -> Any:
    """`module_class.load_from_checkpoint(path)` with its calibration, which it applies in evaluation mode.

    The checkpoint is one that `trainer.save_checkpoint` wrote after `fit`. Checkpoints of earlier epochs hold no
    calibration: `trainer.test(ckpt_path=...)` fits one, or `doublehead.calibrate` does. `options` go to
    `load_from_checkpoint`.
    """
    module = module_class.load_from_checkpoint(path, **options)
    saved = torch.load(path, map_location=module.device, weights_only=options.get("weights_only"))
    states = saved.get("callbacks", {}).values()
    fitted = next((state[FITTED] for state in states if isinstance(state, dict) and FITTED in state), None)
    if fitted is None:
        raise ValueError(
            f"{path} must be a checkpoint that was saved after fit with DoubleHeadCallback, got another"
        )
    model: Calibrated = rebuild(find_classifier(module, classifier), fitted["facts"])
    model.load_state_dict(fitted["weights"], strict=False)  # the network's are there already
    Attachment(model.network, model.reader, model.to(module.device).eval().calibrated)
    return module.eval()


def find_classifier(module: nn.Module, path: str | None = None) -> nn.Module:
    """The submodule of a training module that gives the logits.

    It is the one at `path` ("" is the module itself); without a path the only child that has parameters, or, where
    several have some, the module itself if it has a forward of its own.

    >>> module = nn.Module()
    >>> module.net, module.loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    >>> find_classifier(module)
    Linear(in_features=4, out_features=3, bias=True)
    """
    if path is not None:
        return module.get_submodule(path)
    children = {
        name: child for name, child in module.named_children() if any(True for _ in child.parameters())
    }
    if len(children) == 1:
        return next(iter(children.values()))
    frameworks = ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")
    if children and not type(module).forward.__module__.startswith(frameworks):
        return module
    raise ValueError(
        f"no classifier found in {type(module).__name__}: it has {len(children)} submodules with parameters "
        f"({sorted(children)}) and no forward of its own; name the one that gives the logits with classifier='...'"
    )


def key_of_weights(model: nn.Module) -> int:
    """A hash of a model's weights and buffers, the same on every device.

    >>> model = nn.Linear(2, 2)
    >>> before = key_of_weights(model)
    >>> _ = model.weight.data.mul_(1.001)
    >>> key_of_weights(model) == before
    False
    """
    tensors = [value.detach().reshape(-1).contiguous() for value in model.state_dict().values()]
    sums = [value.view(torch.uint8).sum(dtype=torch.int64) for value in tensors if value.numel()]
    return zlib.crc32(repr(torch.stack(sums).tolist()).encode()) if sums else 0


def _first_loader(trainer: Any) -> Any:
    """The first loader of validation data; None where a batch is made of several loaders' batches."""
    combined = trainer._evaluation_loop._combined_loader  # trainer.val_dataloaders would not tell the mode
    return combined.flattened[0] if combined._mode == "sequential" else None


def _n_own(loader: Any, batch_idx: int, n: int) -> int:
    """How many of the n samples in this process's batch count.

    A DistributedSampler distributes the samples in turn and repeats some at the end, so that all processes have
    equally many; repeated samples come last. With any other sampler all samples count.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    usual = type(batches) is BatchSampler and type(sampler) in (DistributedSampler, Wrapper)
    if not usual or not getattr(loader, "in_order", True):
        return n
    before = batch_idx * batches.batch_size
    if n != min(batches.batch_size, sampler.num_samples - before):
        return n  # not one row for each sample
    n_own = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # in all batches
    return int(max(0, min(n, n_own - before)))
