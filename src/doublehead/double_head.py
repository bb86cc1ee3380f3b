"""Annealing Double-Head: a calibration head trained beside a normal network. This file is the method.

`DoubleHead` is a companion, not a wrapper. It reads the network through a hook, and once every k steps of your
training loop it trains calibration heads on data that the network never trains on, their logits scaled by beta, which
runs from beta0 to 1 within each epoch. The network is not touched: its weights are bit-identical with and without
the companion. `finish` gives a `Calibrated`: network and calibration as one module.

The paper's method is `DoubleHead(network, calib_data, heads=PAPER)`: one head, whose own logits are the answer. By
default five such heads are trained, each trained without a fifth of the calibration data. Their answers to samples they
have not seen are a second opinion, which `finish` pools with the calibrated network unless that does worse on
held-back data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from doublehead.calibrated import Calibrated, in_parts
from doublehead.calibration_data import BATCH_SIZE, Endless, Ready, Rows, ToPair, as_batches, first_of, unpack
from doublehead.calibration_head import HeadBank, HeadSpec, second_opinion
from doublehead.head_training import HeadTraining, anneal
from doublehead.network import PATIENCE, Reader, Readings, per_row
from doublehead.system import warn
from doublehead.tasks import IGNORE_INDEX, LogitsOf, Outputs, Task
from doublehead.torch_tools import (
    Randomness,
    RandomnessOfRows,
    device_of,
    evaluating,
    meet,
    rank,
    uncompiled,
    unwrapped,
)

POSITIONS_PER_STEP = 4096  # of tokens or pixels that the heads learn from in one step


class DoubleHead:
    """Trains calibration heads beside a network, one step in every `every` calls of `step`.

    `calib_data` is data that the network never trains on: a loader, a Dataset or a pair of arrays. `follow` is
    your optimizer: the heads' learning rate follows the shape of its schedule, with a peak of its own. `heads` are
    HeadSpecs to train instead of the second opinion; `PAPER` is the paper's. `augment` perturbs calibration
    inputs, for calibration under distribution shift. `steps` is the number of network steps in an epoch, in which
    beta runs from beta0 to 1; without it, and without `step(progress=...)`, beta runs once in each pass over the
    calibration data. `to_pair` turns a batch of another form into (inputs, labels), `logits_of` takes the logits
    out of an unusual output, `layer` names the network's last layer, `task` says what it does (see
    `doublehead.tasks`); all are found automatically in the usual cases, and all are checked at once with the first
    calibration batch. Networks with one logit, several labels, tokens and pixels are taken too; positions
    whose label is `ignore_index` do not count. Sample weights come third in a batch: (inputs, labels, weights).

    A calibration batch that cannot be used is skipped and counted in `skipped`, and never stops your training; if
    that happens 20 times in a row, the heads' training ends with a warning. `finish` leaves such batches out too.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> double = DoubleHead(network, (torch.randn(100, 8), torch.randint(3, (100,))))
    >>> for _ in range(20):
    ...     has_read = double.step()
    >>> model = double.finish()
    >>> model(torch.randn(5, 8)).exp().sum(1).detach().round(decimals=5)
    tensor([1., 1., 1., 1., 1.])
    """

    def __init__(
        self,
        network: nn.Module,
        calib_data: Any,
        *,
        follow: torch.optim.Optimizer | None = None,
        heads: HeadSpec | Sequence[HeadSpec] | None = None,
        every: int = 10,
        steps: int | None = None,
        augment: Callable[[Any], Any] | None = None,
        to_pair: ToPair | None = None,
        logits_of: LogitsOf | None = None,
        outputs: Outputs | None = None,
        task: Task | None = None,
        ignore_index: int = IGNORE_INDEX,
        layer: str | None = None,
        batch_size: int = BATCH_SIZE,
        weight_decay: float = 5e-5,
        clip: float = 1.0,
        seed: int = 0,
    ) -> None:
        counts = {"every": every, "batch_size": batch_size, "steps": 1 if steps is None else steps}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if isinstance(network, Calibrated) or not isinstance(network, nn.Module):
            hint = ": give its .network" if isinstance(network, Calibrated) else ""
            raise TypeError(f"network must be a plain classifier, got {type(network).__name__}{hint}")
        meet("DoubleHead")
        self.network, self.calib_data, self.augment = network, calib_data, augment
        self.to_pair, self.every, self.steps, self.seed = to_pair, every, steps, seed
        self.batch_size = batch_size
        self._device = device = device_of(network)
        self._is_compiled = network is not uncompiled(network)
        # What calibration batches are shown to. The forward of DistributedDataParallel changes buffers of all processes
        # but the first, that of DataParallel runs copies of the network, which have one tap for all.
        is_spread = isinstance(network, (DistributedDataParallel, nn.DataParallel))
        self._inner: nn.Module = network.module if is_spread else network  # type: ignore[assignment]
        batches = as_batches(calib_data, batch_size, shuffle=True)
        own_seed = seed + rank()
        self._randomness: Randomness | RandomnessOfRows = Randomness(own_seed, device, batches)
        with self._randomness:
            first = unpack(first_of(batches), device, to_pair)
            form = {"layer": layer, "logits_of": logits_of, "outputs": outputs, "task": task}
            self.reader = Reader.of(network, first, ignore_index=ignore_index, **form)  # type: ignore[arg-type]
            self.reader.tap.rest(network)
        self._is_opinion = heads is None
        if heads is None:
            heads = second_opinion(self.reader.n_features)
        specs = (heads,) if isinstance(heads, HeadSpec) else tuple(heads)
        sizes = self.reader.n_features, self.reader.n_classes
        bank = HeadBank(*sizes, specs, self.reader.n_labels).to(device)
        self._training = HeadTraining(
            bank, follow=follow, weight_decay=weight_decay, clip=clip, seed=own_seed
        )
        self._has_folds = any(spec.fold is not None for spec in specs)
        if isinstance(batches, Rows) and to_pair is None:
            whole = batches.whole(device, self._has_folds)
            targets = self.reader.targets(whole.labels)  # checks all of them
            # Of a batch of tokens or pixels some positions are drawn each time.
            if self.reader.task not in ("tokens", "pixels"):
                known = per_row(whole, targets, None, self._has_folds)
                batches.known = [part.unflatten(0, (len(whole.labels), -1)) for part in known]
                if augment is None:
                    batches.generator = torch.Generator().manual_seed(own_seed)
                    self._randomness = RandomnessOfRows(batches.generator, device)
        self._batches = Endless(batches, self._randomness)
        self.calls = self._failed = self._failed_in_a_row = 0
        self._has_warned = False
        self.active = True  # False once training the heads was given up

    @property
    def training(self) -> HeadTraining:
        """How the heads are trained, after the steps that were due."""
        self._training.catch_up()
        return self._training

    @property
    def bank(self) -> HeadBank:
        """The heads, after the steps that were due; ask again after further calls of `step`."""
        return self.training.bank

    @property
    def skipped(self) -> int:
        """How many calibration steps were skipped: a batch that could not be used, or a loss that is not finite."""
        self.training.count_skipped(wait=True)
        return self._failed + self._training.skipped

    def step(self, progress: float | None = None) -> bool:
        """Count one step of the network; every k-th call reads a calibration batch and gives True.

        The heads make one step for each batch, now or some calls later, which changes no result: the network does not
        depend on them, and `training`, `bank`, `finish` and `state_dict` make the steps that are due.

        Call it after your optimizer's step, inside your autocast block if you have one. `progress` is the share of
        the epoch that is over.
        """
        if progress is not None:
            anneal(1.0, progress)  # a mistake of the caller, not of a calibration batch: an error now
        self.calls += 1
        if self.calls % self.every or not self.active:
            return False
        several = not self._training.is_alone
        if several:  # of the steps before this one, so that all processes stop at the same call
            self._training.count_skipped(wait=True)
        with self._randomness:
            try:
                self._training.add(*self._read(progress))
            except Exception as error:  # whatever data and network raise
                if several:
                    raise  # the other processes wait for this one
                self._failed, self._failed_in_a_row = self._failed + 1, self._failed_in_a_row + 1
                self._note_failure(f"{type(error).__name__}: {error}", self._failed_in_a_row)
            else:
                self._failed_in_a_row = 0
        if not several:
            self._training.count_skipped()
        if self._training.skipped:
            self._note_failure("the calibration loss is not finite", self._training.skipped_in_a_row)
        return not self._failed_in_a_row

    def _ready(self, raw: Any) -> Ready:
        batch = unpack(raw, self._device, self.to_pair)
        labels = self.reader.targets(batch.labels, check=False)
        at = self.reader.pick(labels, POSITIONS_PER_STEP)
        known = per_row(batch, labels, at, self._has_folds)
        return Ready(batch.args, batch.kwargs, at, [part.clone() for part in known])

    def _read(self, progress: float | None) -> tuple[Any, ...]:
        """The progress of the epoch, and the logits, features, labels, folds and weights of the next batch."""
        raw = self._batches.next()
        args, kwargs, at, known = raw if isinstance(raw, Ready) else self._ready(raw)
        if self.augment is not None:
            args = (self.augment(args[0]), *args[1:]) if args else args
            kwargs = kwargs if args else self.augment(kwargs)
        network = self._inner
        with torch.set_grad_enabled(False), evaluating(network):  # no_grad is slower
            if self._is_compiled:
                torch.compiler.cudagraph_mark_step_begin()  # what the network's last step returned is used up
            logits, features = self.reader.rows(*self.reader.tap.run(network, args, kwargs), at)
        return self._progress(progress), logits, features, *known

    def _progress(self, given: float | None) -> float:
        if given is not None:
            return given
        if self.steps is not None:
            return ((self.calls - 1) % self.steps) / self.steps
        own = self._batches.progress
        return 1.0 if own is None else own

    def _note_failure(self, what: str, in_a_row: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"a calibration step was skipped: {what}; further ones are counted")
        if in_a_row >= PATIENCE and self.active:
            self.active = False
            warn(
                f"{in_a_row} calibration steps in a row were skipped ({what}): the calibration heads are no longer "
                "trained, and finish() will calibrate without them"
            )

    def opinion(self, readings: Readings) -> Tensor:
        """(N, K) log-probabilities of each sample by the head that never saw it, for calibration data just read."""
        if not self._is_opinion:
            raise ValueError(
                "calibrate takes a DoubleHead that trained the second opinion, got one with heads of its own: take "
                "these with double.bank.take(number)"
            )
        with torch.no_grad(), evaluating(self.bank):
            answers: Tensor = self.bank(readings.logits, readings.features).log_softmax(-1)  # (H, N, K)
        rows = torch.arange(len(readings.labels), device=answers.device)
        return answers[readings.folds, rows]

    def answer(self, main: Tensor, features: Tensor) -> Tensor:
        """(B, K) the heads' output at present: the logits of a single head, or the mean of all log-probabilities."""

        def answer(main: Tensor, features: Tensor) -> Tensor:
            answers: Tensor = self.bank(main, features)
            return answers[0] if len(answers) == 1 else answers.log_softmax(-1).mean(0)

        with evaluating(self.bank):
            return in_parts(answer, main, features)

    def finish(self, **options: Any) -> Calibrated:
        """Network and calibration as one module, put into evaluation mode; no weight of the network changes.

        A single head, such as the paper's, is used as it was trained. A second opinion is pooled in the staged head
        unless that does worse on held-back data. `options` are those of `calibrate`. Where several processes train
        together, all call it, or one does with `alone=True`.
        """
        if len(self.bank.specs) == 1:
            options.pop("alone", None)  # nothing is fitted, so no process needs another
            if options:
                raise TypeError(f"a single head is used as trained: finish takes no {sorted(options)} then")
            reader = self.reader.again(unwrapped(self.network))
            self.close()
            return Calibrated(reader.network, self.bank.take(0), reader).eval()
        if not self._is_opinion:
            raise ValueError(
                "finish needs one head or the second opinion; take others with double.bank.take(number)"
            )
        from doublehead.calibrate import calibrate

        model = calibrate(self.network, self.calib_data, beside=self, **options)
        self.close()
        return model

    def close(self) -> None:
        """Remove the hook from the network."""
        self.reader.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on, the heads' weights included."""
        return {
            "calls": self.calls,
            "failed": [self._failed, self._failed_in_a_row, self._has_warned, self.active],
            "training": self.training.state_dict(),
            "rank": rank(),
            "randomness": {**self._randomness.state, "dropout": self._training.generator.get_state()},
            "batches": self._batches.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where `state_dict` was taken, given the same calibration data.

        Of another process's state only the training is taken: each process draws its own calibration batches.
        """
        self.calls = state["calls"]
        self._failed, self._failed_in_a_row, self._has_warned, self.active = state["failed"]
        self._training.load_state_dict(state["training"])
        if state["rank"] == rank():
            self._batches.load_state_dict(state["batches"])
            self._randomness.state = dict(state["randomness"])
            self._training.generator.set_state(state["randomness"]["dropout"].cpu())
