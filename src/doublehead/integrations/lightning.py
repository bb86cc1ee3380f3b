"""Calibrate while Lightning trains: one callback, no change to the LightningModule."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

from doublehead.double_head import Alternation, Annealing, DoubleHead, Heads, Readings
from doublehead.head_bank import HeadBank
from doublehead.integrations.attach import Attachment, find_classifier
from doublehead.integrations.fit_head import Choice, can_refit, read_once, refit_on
from doublehead.integrations.overlap import check_disjoint, n_shared
from doublehead.integrations.trackers import log_reliability
from doublehead.integrations.watch import Watch
from doublehead.optional import require
from doublehead.plumbing import device_of, evaluating, from_every_process, n_processes, seeded, unpack

Callback: Any = require("lightning.pytorch", extra="lightning").Callback
rank_zero_info: Any = require("lightning.pytorch.utilities.rank_zero", extra="lightning").rank_zero_info
Wrapper: Any = require("lightning.fabric.utilities.distributed", extra="lightning").DistributedSamplerWrapper


class DoubleHeadCallback(Callback):  # type: ignore[misc]
    """Trains a calibration head beside the network of a LightningModule: `callbacks=[DoubleHeadCallback(...)]`.

    The module, its optimizer and its weights after training stay bit for bit what they are without the callback.
    The head takes one step for every `every` optimizer steps; it and its optimizer are saved in the trainer's
    checkpoints and resumed from them. Validation logs `val_ece_calib`, `val_ece_main`, `val_ece_floor`,
    NLL and accuracy of both heads, and the reliability diagram goes to the trainer's loggers; in several processes
    they are those of all samples, each counted once where Lightning deals them out, or where all processes see the same
    in the same order (`use_distributed_sampler=False`). `trainer.test` and `trainer.predict` see calibrated logits;
    `model` is the whole as a DoubleHead.

    At the end of training the head is fitted anew on the finished network (`refit`), and before `trainer.test` and
    `trainer.predict` on the weights that these see, where it was not yet: those of the best checkpoint, say. `choice`
    says what came of it, `settled` whether the head was fitted to the weights that the network has now. Callbacks that
    change weights at the end of training, such as those that average them, come before this one.

    `classifier` names the submodule that gives the logits, where it is not found by itself. `wrap` makes another
    DoubleHead from it; the paper's is `partial(DoubleHead, kind="mlp")`. `augment` perturbs calibration batches. With
    either of them the head stays exactly as training left it.
    `lr` is the head's learning rate at the peak of the main schedule, whose shape it follows; the head's own unless
    given. `to_pair` turns a batch into (inputs, labels) where it is not one already. `held_out` chooses among the heads
    of a HeadBank.
    """

    def __init__(
        self,
        calib_dataloader: Iterable[Any],
        *,
        classifier: str | None = None,
        wrap: Callable[[nn.Module], DoubleHead] | None = None,
        every: int = 10,
        annealing: Annealing | None = None,
        augment: Callable[[Any], Any] | None = None,
        lr: float | None = None,
        weight_decay: float = 5e-5,
        held_out: Iterable[Any] | None = None,
        to_pair: Callable[[Any], Any] | None = None,
        figure: bool = True,
        n_bins: int = 15,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.calib_dataloader, self.held_out = calib_dataloader, held_out
        self.classifier, self.wrap, self.to_pair = classifier, wrap, to_pair
        self.every, self.annealing, self.augment = every, annealing, augment
        self.lr, self.weight_decay, self.seed = lr, weight_decay, seed
        self.figure, self.n_bins = figure, n_bins
        self.alternation: Alternation | None = None
        self.choice: Choice | None = None
        self._fitted_to: int | None = None  # the weights to which the head was fitted
        self._model: DoubleHead | None = None
        self._attachment: Attachment | None = None
        self._loaded: dict[str, Any] = {}
        self._watch: Watch | None = None
        self._seen: Heads | None = None
        self._global_step = 0

    @property
    def model(self) -> DoubleHead:
        """The trained network with its calibration head."""
        if self._model is None:
            raise RuntimeError(
                "this DoubleHeadCallback has no model yet: call trainer.fit, test or predict first"
            )
        return self._model

    @property
    def settled(self) -> bool:
        """Whether the head was fitted to the network's weights as they are now."""
        return self._fitted_to is not None and self._fitted_to == key_of_weights(self.model.model)

    # Putting it together

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the classifier and put the head beside it."""
        self._build(pl_module)

    on_validation_start = on_fit_start

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """The head beside the classifier, and right for the weights that it has now."""
        self._build(pl_module)
        if not all(from_every_process(self.settled)):  # all fit together
            self._settle(trainer)

    on_predict_start = on_test_start

    @torch.inference_mode(False)  # the head may learn later
    def _build(self, pl_module: Any) -> None:
        if self._model is None or not any(part is self._model.model for part in pl_module.modules()):
            self._model = (self.wrap or DoubleHead)(find_classifier(pl_module, self.classifier))
            self._attachment = Attachment(self._model, seen=self._note)
            self._attachment.active, self._fitted_to = False, None
        self._model.head.to(pl_module.device)
        if "head" in self._loaded:
            self._model.head.load_state_dict(self._loaded.pop("head"))
            self._fitted_to = self._loaded.pop("fitted_to", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the alternation, now that optimizers and devices are settled."""
        check_disjoint(self.calib_dataloader, trainer.train_dataloader)
        self._warn_of_validation(trainer.val_dataloaders)
        optimizer = trainer.optimizers[0]
        self._fitted_to = None
        precision = trainer.precision_plugin
        self.alternation = Alternation(
            self.model,
            _pairs(self.calib_dataloader, self.to_pair),
            every=self.every,
            annealing=self.annealing,
            augment=lambda inputs: precision.convert_input(self.augment(inputs) if self.augment else inputs),
            lr=optimizer,
            peak_lr=self.lr,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )
        if math.isinf(trainer.num_training_batches) and _anneals(self.alternation):
            raise ValueError(
                "annealing needs the number of batches in an epoch, and this train dataloader does not know it: pass "
                "annealing=Annealing(1.0), or limit_train_batches to the Trainer"
            )
        if "alternation" in self._loaded:
            scale = self._loaded.pop("lr_scale", self.alternation.rate.scale)  # where it was kept before
            self.alternation.load_state_dict({"lr_scale": scale, **self._loaded.pop("alternation")})
        self._global_step = trainer.global_step

    def _warn_of_validation(self, val_dataloaders: Any) -> None:
        if val_dataloaders is not None and n_shared(val_dataloaders, self.calib_dataloader):
            warnings.warn(
                "the validation data holds calibration data: val_ece_calib is measured on what the head learned from",
                stacklevel=2,
            )

    # Training

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each optimizer step (not after each batch, when gradients accumulate) it is the head's turn."""
        if self.alternation is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        n = trainer.num_training_batches
        with trainer.precision_plugin.train_step_context():
            loss = self.alternation.step(1.0 if math.isinf(n) else min(1.0, batch_idx / n))
        if loss is not None:
            pl_module.log("calib_loss", loss.mean())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the head to the finished network, or let a bank of heads choose."""
        self._settle(trainer)
        if isinstance(self.model.head, HeadBank) and self.held_out is not None:
            held, seen = (self._read(trainer, name) for name in ("held_out", "calib_dataloader"))
            everything = Readings(*(torch.cat(parts) for parts in zip(held, seen)))
            self.model.head.select(held, everything)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say it where another callback has changed the network since."""
        if self._fitted_to is not None and not self.settled:
            warnings.warn(
                "the network's weights have changed since the calibration head was fitted to them: put the callback "
                "that changes them before DoubleHeadCallback. trainer.test and trainer.predict will fit the head again",
                stacklevel=2,
            )

    @torch.inference_mode(False)  # which testing and predicting are in
    def _settle(self, trainer: Any) -> None:
        """Fit the default head anew on the network as it is now; one of another `wrap` or `augment` stays as it is."""
        if self.wrap is None and self.augment is None and can_refit(self.model):
            self.choice = refit_on(self.model, self._read(trainer, "calib_dataloader"), seed=self.seed)
            self._fitted_to = key_of_weights(self.model.model)
            rank_zero_info(f"calibration head: {self.choice.in_words()}")

    def _read(self, trainer: Any, name: str) -> Readings:
        precision = trainer.precision_plugin

        def to_pairs(batches: Any) -> Iterator[Any]:
            return map(precision.convert_input, _pairs(batches, self.to_pair))

        with seeded(self.seed, device_of(self.model)), precision.val_step_context():
            return read_once(self.model, getattr(self, name), name, to_pairs)

    # Numbers and pictures

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch what the network says in validation; its own answers stay."""
        self._watch = Watch(self.n_bins)
        self._listen(active=True, answer=False)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take both heads' logits from the forward that was just made, or make one."""
        seen, self._seen = self._seen, None
        if self._watch is None or dataloader_idx != 0:
            return
        args, kwargs, labels = unpack(self.to_pair(batch) if self.to_pair else batch, pl_module.device)
        if seen is None or len(seen.main) != len(labels):
            with trainer.precision_plugin.val_step_context(), torch.no_grad(), evaluating(self.model):
                seen = self.model.heads(*args, **kwargs)
        if n_processes() > 1:
            self._watch.note((*args, *kwargs.values(), labels))
        n = _n_own(_first_loader(trainer), batch_idx, len(labels))
        self._watch.add(Heads(seen.main[:n], seen.calib[:n]), labels[:n])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the numbers, and the picture on the first process."""
        watch, self._watch = self._watch, None
        self._listen(active=False)
        if watch is None or trainer.sanity_checking:
            return
        watch.gather(pl_module.device)
        if watch.n == 0:
            return
        numbers = {f"val_{name}": value for name, value in watch.numbers().items()}
        # Every process has the numbers of all, so their mean is the same; without it Lightning would warn.
        pl_module.log_dict(numbers, sync_dist=True)
        if self.figure and trainer.is_global_zero:
            title = f"calibrated, epoch {trainer.current_epoch}"
            log_reliability(trainer.loggers, watch.reliability(), "reliability", trainer.global_step, title)

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """From here the network answers with calibrated logits."""
        self._listen(active=True, answer=True)

    on_predict_epoch_start = on_test_epoch_start

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Its own answers again."""
        self._listen(active=False)

    on_predict_epoch_end = on_test_epoch_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the module as it was."""
        self._listen(active=False)

    def _listen(self, active: bool, answer: bool = False) -> None:
        self._seen = None
        if self._attachment is not None:
            self._attachment.active, self._attachment.answer = active, answer

    def _note(self, heads: Heads, kwargs: dict[str, Any]) -> None:
        self._seen = heads

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The head, its optimizer and its place in the calibration data, for the trainer's checkpoint."""
        state = dict(self._loaded)
        if self._model is not None:
            state["head"], state["fitted_to"] = self._model.head.state_dict(), self._fitted_to
        if self.alternation is not None:
            state["alternation"] = self.alternation.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the head and its optimizer exist."""
        self._loaded = dict(state_dict)


def key_of_weights(model: nn.Module) -> int:
    """A number that stands for a model's weights and buffers, on whatever device: another one for others.

    >>> model = nn.Linear(2, 2)
    >>> before = key_of_weights(model)
    >>> _ = model.weight.data.mul_(1.001)
    >>> key_of_weights(model) == before
    False
    """
    tensors = [value.detach().reshape(-1).contiguous() for value in model.state_dict().values()]
    sums = [value.view(torch.uint8).sum(dtype=torch.int64) for value in tensors if value.numel()]
    return zlib.crc32(repr(torch.stack(sums).tolist()).encode()) if sums else 0


def _anneals(alternation: Alternation) -> bool:
    """Whether beta changes for any head of a bank, or for the only one."""
    return bool(torch.as_tensor(alternation.annealing.beta0).ne(1).any())


def _first_loader(trainer: Any) -> Any:
    """The first loader of validation data; None where a batch is made of several loaders' batches."""
    combined = trainer._evaluation_loop._combined_loader  # trainer.val_dataloaders would not tell the mode
    return combined.flattened[0] if combined._mode == "sequential" else None


def _n_own(loader: Any, batch_idx: int, n: int) -> int:
    """How many of the n samples in this process's batch count.

    A DistributedSampler deals the samples out in turn, and at the end some of them again, so that all processes have
    equally many: what a process gets again comes last. Where anything else has a say in the order, all count.
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


def _pairs(batches: Any, to_pair: Callable[[Any], Any] | None) -> Any:
    return batches if to_pair is None else _Pairs(batches, to_pair)


class _Pairs:
    """Batches turned into (inputs, labels); the place in the data stays that of the batches."""

    def __init__(self, batches: Any, to_pair: Callable[[Any], Any]) -> None:
        self.batches, self.to_pair = batches, to_pair
        if hasattr(batches, "state_dict"):
            self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return map(self.to_pair, self.batches)
