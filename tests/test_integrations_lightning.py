"""The Lightning callback in real Trainers."""

import copy
import pickle
import sys
import warnings
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from doublehead import PAPER, Calibrated, DoubleHead, HeadSpec, Predictions, calibrate, metrics, torch_tools
from doublehead.calibrated import read
from doublehead.data import fashion_subset
from doublehead.integrations import lightning as integration
from doublehead.integrations.callbacks import Attachment
from doublehead.integrations.lightning import DoubleHeadCallback, find_classifier, load_calibrated
from doublehead.system import require
from samples import refused
from tiny_networks import assert_same

pl = require("lightning.pytorch", extra="lightning")
CSVLogger = require("lightning.pytorch.loggers", extra="lightning").CSVLogger
CombinedLoader = require("lightning.pytorch.utilities", extra="lightning").CombinedLoader
Wrapper = require("lightning.fabric.utilities.distributed", extra="lightning").DistributedSamplerWrapper
Images = dict[str, TensorDataset]


@pytest.fixture(scope="module")
def images() -> Images:
    """Real images of clothes, 7 x 7, few enough for a test."""
    made = {}
    for name, samples in fashion_subset().first(256, 240, 121).parts.items():
        pixels = torch.from_numpy(samples.images).permute(0, 3, 1, 2).float() / 255
        made[name] = TensorDataset(F.avg_pool2d(pixels, 4), torch.from_numpy(samples.labels))
    return made


class Classifier(pl.LightningModule):
    """A user's module as it stands in Lightning's own tutorials."""

    def __init__(self, schedule: bool = False) -> None:
        super().__init__()
        body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)
        self.model = nn.Sequential(*body, nn.Linear(100, 10))
        self.schedule = schedule

    def loss(self, batch: Any, name: str) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log(name, loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, "train_loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val_loss")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test_loss")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader(data: TensorDataset, batch_size: int = 32, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(data, batch_size, shuffle=shuffle)


def quiet_trainer(folder: Path, **options: Any) -> Any:
    defaults = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    off = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return pl.Trainer(default_root_dir=folder, accelerator="cpu", **off, **{**defaults, **options})


def fit(images: Images, folder: Path, callback: DoubleHeadCallback | None, **how: Any) -> Classifier:
    pl.seed_everything(5, verbose=False)
    module = Classifier(how.pop("schedule", False))
    callbacks = [*([callback] if callback else []), *how.pop("callbacks", [])]
    trainer = quiet_trainer(folder, callbacks=callbacks, **how)
    trainer.fit(module, loader(images["train"], shuffle=True), loader(images["test"]))
    module.fitted_by = trainer
    return module


@pytest.mark.parametrize(
    "how", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}]
)
def test_network_is_bit_identical_beside_the_callback(images: Images, tmp_path: Path, how: Any) -> None:
    alone = fit(images, tmp_path, None, **how)
    callback = DoubleHeadCallback(loader(images["calib"], shuffle=True), every=2)
    beside = fit(images, tmp_path, callback, **how)
    assert_same(alone.state_dict(), beside.state_dict())
    assert alone.model.training == beside.model.training
    assert callback.double.calls == 16 // how.get("accumulate_grad_batches", 1)  # 2 epochs of 8 batches
    assert all(p.dtype == torch.float32 for p in callback.double.bank.parameters())
    assert callback.double.skipped == 0
    assert callback.settled
    assert callback.choice is not None
    fresh = DoubleHead(Classifier().model, images["calib"]).bank
    assert not any(map(torch.equal, callback.double.bank.parameters(), fresh.parameters()))


def test_beta_and_lr_follow_the_epoch_and_the_schedule(images: Images, tmp_path: Path) -> None:
    seen = []

    class Spy(DoubleHeadCallback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(*args, **kwargs)
            training = self.double.training
            seen.append((float(training.beta), self.double.bank.specs[0].lr * training.schedule.now()))

    callback = Spy(loader(images["calib"]), every=1, heads=HeadSpec(beta0=1.4, lr=0.2))
    fit(images, tmp_path, callback, schedule=True)
    betas = [1 + 0.4 * (1 - step / 8) for step in range(8)]
    assert [beta for beta, _ in seen] == pytest.approx(betas + betas)
    # Lightning updates its schedule before the end of an epoch's last batch is reported.
    assert [lr for _, lr in seen] == pytest.approx([0.2] * 7 + [0.1] * 8 + [0.05])


def test_resume_is_exact(images: Images, tmp_path: Path) -> None:
    def callback() -> DoubleHeadCallback:
        return DoubleHeadCallback(loader(images["calib"], shuffle=True), every=3)

    class Saver(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 8:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    class Still(Classifier):  # without dropout: Lightning does not save the random state
        def __init__(self) -> None:
            super().__init__(schedule=True)
            self.model[4] = nn.Identity()

    def run(head: DoubleHeadCallback, *others: Any, checkpoint: Path | None = None) -> Still:
        pl.seed_everything(1 if checkpoint is None else 2, verbose=False)
        module = Still()
        trainer = quiet_trainer(tmp_path, callbacks=[head, *others])
        trainer.fit(module, loader(images["train"]), ckpt_path=checkpoint, weights_only=True)
        return module

    whole, resumed = callback(), callback()
    first = run(whole, Saver())
    second = run(resumed, checkpoint=tmp_path / "half.ckpt")
    assert_same(first.state_dict(), second.state_dict())
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert resumed.double.calls == 16
    assert_same(whole.double.bank.state_dict(), resumed.double.bank.state_dict())


def test_numbers_and_figure_are_logged(images: Images, tmp_path: Path) -> None:
    callback = DoubleHeadCallback(loader(images["calib"]), every=2)
    module = fit(images, tmp_path, callback, logger=CSVLogger(tmp_path, name="log"))
    logged = module.fitted_by.callback_metrics
    y = images["test"].tensors[1]
    # the heads as they were in the last validation, before the calibration was fitted
    readings = read(callback.double.reader, images["test"])
    calib = callback.double.answer(readings.logits, readings.features)
    for name, logits in (("main", readings.logits), ("calib", calib)):
        p = Predictions(logits, y)
        assert float(logged[f"val_ece_{name}"]) == pytest.approx(metrics.ece(p), abs=1e-6)
        assert float(logged[f"val_nll_{name}"]) == pytest.approx(metrics.nll(p), abs=1e-6)
        assert float(logged[f"val_accuracy_{name}"]) == pytest.approx(metrics.accuracy(p), abs=1e-6)
    floor = metrics.ece_floor(Predictions(calib, y)).mean
    assert float(logged["val_ece_floor"]) == pytest.approx(floor, abs=1e-6)
    assert "calib_loss" in logged
    figures = sorted(Path(module.fitted_by.logger.log_dir).glob("reliability-*.png"))
    assert [path.name for path in figures] == ["reliability-00000008.png", "reliability-00000016.png"]


def test_testing_and_predicting_are_calibrated_by_hooks(images: Images, tmp_path: Path) -> None:
    callback = DoubleHeadCallback(loader(images["calib"]), every=2)
    module = fit(images, tmp_path, callback, max_epochs=1)
    data = loader(images["test"])
    x, y = images["test"].tensors
    names = list(module.state_dict())
    with torch.no_grad():
        main, calib = callback.model.eval().heads(x)
    trainer = module.fitted_by
    predicted = torch.cat(trainer.predict(module, data))
    tested = trainer.test(module, data, verbose=False)[0]["test_loss"]
    torch.testing.assert_close(predicted, calib)
    torch.testing.assert_close(predicted.exp().sum(1), torch.ones(len(x)))
    assert tested == pytest.approx(float(F.cross_entropy(calib, y)), abs=1e-5)
    torch.testing.assert_close(module.eval().model(x).log_softmax(1), main)
    assert not torch.allclose(main, calib)
    assert list(module.state_dict()) == names == list(Classifier().state_dict())


@pytest.mark.parametrize("heads", [None, PAPER])
def test_a_checkpoint_brings_the_heads_to_a_new_process(images: Images, tmp_path: Path, heads: Any) -> None:
    calib = loader(images["calib"], shuffle=True)
    callback, again = (DoubleHeadCallback(calib, every=2, heads=heads) for _ in range(2))
    module = fit(images, tmp_path, callback, max_epochs=1)
    module.fitted_by.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(RuntimeError, match="has no model yet"):
        again.model  # noqa: B018
    trainer = quiet_trainer(tmp_path, callbacks=[again])
    found = trainer.predict(Classifier(), loader(images["test"]), ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(torch.cat(found), callback.model.eval()(images["test"].tensors[0]))
    assert_same(callback.double.bank.state_dict(), again.double.bank.state_dict())


def test_the_calibration_is_that_of_finish(images: Images, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    callback = DoubleHeadCallback(loader(images["calib"]), every=2, seed=4)
    fit(images, tmp_path, callback)
    found, want = callback.model, callback.double.finish(seed=4)
    assert isinstance(found, Calibrated)
    assert callback.choice == want.head.choice
    assert_same(want.state_dict(), found.state_dict())
    assert f"calibration: {callback.choice}" in caplog.text


def test_one_head_is_used_as_trained(images: Images, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"augment": lambda inputs: inputs.flip(-1)}, {"heads": PAPER}]
    for how in options:
        callback = DoubleHeadCallback(loader(images["calib"]), every=2, **how)
        module = fit(images, tmp_path, callback, max_epochs=1)
        x = images["test"].tensors[0]
        readings = read(callback.double.reader, images["test"])
        want = callback.double.answer(readings.logits, readings.features).log_softmax(1)
        torch.testing.assert_close(callback.model.eval()(x), want)
        predicted = module.fitted_by.predict(module, loader(images["test"]))
        torch.testing.assert_close(torch.cat(predicted), want)
        assert callback.choice is None
        trainer = quiet_trainer(tmp_path, callbacks=[DoubleHeadCallback(loader(images["calib"]), **how)])
        with pytest.raises(RuntimeError, match="it was not trained yet: call trainer.fit first"):
            trainer.test(Classifier(), loader(images["test"]), verbose=False)


@pytest.mark.parametrize(
    ("precision", "alone"), [("32-true", False), ("32-true", True), ("bf16-mixed", False), ("64-true", False)]
)
def test_the_best_checkpoint_is_calibrated(images: Any, tmp_path: Path, precision: str, alone: bool) -> None:
    """The checkpoint of an earlier epoch holds the heads as they were then."""
    every = 99 if alone else 2  # a checkpoint of weights alone holds no heads
    dtype = torch.float64 if precision == "64-true" else torch.float32

    def to_pair(batch: Any) -> Any:
        return batch[0].to(dtype), batch[1]

    class Early(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "early.ckpt", weights_only=alone)

    def check(callback: DoubleHeadCallback, module: Classifier, trainer: Any) -> None:
        data, path = loader(images["test"]), tmp_path / "early.ckpt"
        tested = trainer.test(module, data, ckpt_path=path, verbose=False, weights_only=True)
        predicted = torch.cat(trainer.predict(module, data))
        assert callback.settled
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            beside = DoubleHead(module.model, loader(images["calib"]), every=every, to_pair=to_pair)
            if not alone:
                state = torch.load(path, weights_only=True)["callbacks"][callback.state_key]
                assert state["calls"] == 8
                beside.load_state_dict(state)
            how = {"to_pair": to_pair} if alone else {"beside": beside}
            model = calibrate(module.model, loader(images["calib"]), **how)
            x, y = to_pair(images["test"].tensors)
            want = model(x).detach()
        assert callback.choice.nll == pytest.approx(model.head.choice.nll, rel=1e-5)
        assert predicted.dtype == torch.float32
        assert tested[0]["test_loss"] == pytest.approx(float(F.cross_entropy(want, y)), rel=1e-5)
        torch.testing.assert_close(predicted, want, rtol=1e-4, atol=1e-4)

    callback, again = (DoubleHeadCallback(loader(images["calib"]), every=every) for _ in range(2))
    module = fit(images, tmp_path, callback, callbacks=[Early()], precision=precision)
    assert callback.double.skipped == 0
    last = callback.choice
    check(callback, module, module.fitted_by)
    assert callback.choice != last
    trainer = quiet_trainer(tmp_path, callbacks=[again], precision=precision)
    check(again, Classifier(), trainer)  # a new process, which did not train


def test_a_checkpoint_after_training_is_loaded_with_its_calibration(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = DoubleHeadCallback(loader(images["calib"]), every=2)
    module = fit(images, tmp_path, callback, enable_checkpointing=True)
    trainer = module.fitted_by
    best = trainer.checkpoint_callback.best_model_path  # of the weights at the end, without a calibration
    trainer.test(module, loader(images["test"]), ckpt_path=best, verbose=False, weights_only=True)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    x = images["test"].tensors[0]
    load, pickles = torch.load, []
    monkeypatch.setattr(
        torch,
        "load",
        lambda *files, **how: pickles.append(how["weights_only"] is False) or load(*files, **how),
    )
    again = load_calibrated(tmp_path / "last.ckpt", Classifier)
    assert isinstance(again, Classifier)
    assert not any(pickles)  # unless asked for
    torch.testing.assert_close(again.model(x), callback.model.eval()(x))
    refused("saved after fit", load_calibrated, tmp_path / "weights.ckpt", Classifier)


def test_training_goes_on_after_testing(images: Images, tmp_path: Path) -> None:
    """Testing runs in inference mode, whose tensors cannot learn."""
    seen = []

    class Spy(DoubleHeadCallback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(*args, **kwargs)
            seen.append(self.settled)

    callback = Spy(loader(images["calib"]), every=1)
    trainer = quiet_trainer(tmp_path, callbacks=[callback], max_epochs=1)
    module = Classifier()
    trainer.test(module, loader(images["test"]), verbose=False)
    untrained = callback.choice
    assert callback.settled
    trainer.fit(module, loader(images["train"]))
    assert seen == [False] * 8
    assert (callback.double.calls, callback.double.skipped) == (8, 0)
    assert callback.settled
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(images["train"]))  # the heads go on where they were
    assert callback.double.calls == 16
    assert module.model.training
    assert callback.choice.nll < untrained.nll


def test_the_calibration_belongs_to_the_weights_that_are_tested(images: Images, tmp_path: Path) -> None:
    """However they came into the module since the calibration was fitted: it is fitted again, and only then."""
    callback = DoubleHeadCallback(loader(images["calib"]), every=2)
    module = fit(images, tmp_path, callback, max_epochs=1)
    trainer, others = module.fitted_by, Classifier().state_dict()
    torch.save({"state_dict": others, "pytorch-lightning_version": pl.__version__}, tmp_path / "others.ckpt")
    trained = copy.deepcopy(module.state_dict())

    def check(fits: bool, **how: Any) -> None:
        before = callback.choice
        tested = trainer.test(module, loader(images["test"]), verbose=False, **how)[0]["test_loss"]
        x, y = images["test"].tensors
        model = calibrate(module.model, loader(images["calib"]), beside=callback.double)
        assert tested == pytest.approx(float(F.cross_entropy(model(x).detach(), y)), rel=1e-5)
        assert callback.settled
        assert (callback.choice is not before) == fits

    check(fits=False)
    module.load_state_dict(others)
    assert not callback.settled
    check(fits=True)
    module.load_state_dict(trained)
    trainer.validate(module, loader(images["test"]), ckpt_path=tmp_path / "others.ckpt", verbose=False)
    check(fits=False)  # validation loaded the weights that were tested last
    check(fits=False, ckpt_path=tmp_path / "others.ckpt")
    module.load_state_dict(trained)
    trainer.validate(module, loader(images["test"]), verbose=False)
    check(fits=False)  # validation fitted the calibration


def test_a_compiled_network_answers_with_the_calibration_of_now(images: Images, tmp_path: Path) -> None:
    callback, module = DoubleHeadCallback(loader(images["calib"]), every=2), Classifier()
    network = module.model
    module.model = torch.compile(network, backend="eager")
    trainer, x = quiet_trainer(tmp_path, callbacks=[callback], max_epochs=1), images["test"].tensors[0]
    choices = []
    trainer.fit(module, loader(images["train"]), loader(images["test"]))
    for factor in (1.0, 1.0, 0.5):  # of the weights: the calibration is fitted again to others only
        network[-1].weight.data.mul_(factor)
        predicted = torch.cat(trainer.predict(module, loader(images["test"])))
        torch.testing.assert_close(predicted, callback.model.eval()(x), rtol=1e-4, atol=1e-4)
        choices.append(callback.choice)
    assert choices[0] is choices[1]
    assert choices[2] != choices[1]


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_another_callback_changes(images: Images, tmp_path: Path, first: bool) -> None:
    class Average(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.model[-1].weight.data.mul_(0.5)

    callback = DoubleHeadCallback(loader(images["calib"]), every=2)
    order = [Average(), callback] if first else [callback, Average()]
    trainer, module = quiet_trainer(tmp_path, callbacks=order, max_epochs=1), Classifier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, loader(images["train"]))
    words = "put the callback that changes them before DoubleHeadCallback"
    assert sum(words in str(one.message) for one in said) == (not first)
    assert callback.settled == first
    trainer.test(module, loader(images["test"]), verbose=False)
    assert callback.settled


def test_a_module_can_be_copied_while_its_heads_are_trained() -> None:
    """As averages of weights begin. The DoubleHead holds an open loader, which cannot be copied."""
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 4)
    double = DoubleHead(net, (torch.randn(60, 4), torch.randint(3, (60,))), every=1)
    double.step()
    Attachment(net, double.reader, double.answer, replace=False, seen=lambda *_: None)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(again(x), net(x))


def test_a_copied_module_answers_for_itself(images: Images, tmp_path: Path) -> None:
    """The hooks of a test lead to the callback, whose position in a loader cannot be copied."""
    callback = DoubleHeadCallback(loader(images["calib"], shuffle=True), every=2)
    module = fit(images, tmp_path, callback, max_epochs=1)
    x = images["test"].tensors[0]
    copy.deepcopy(module.model)
    callback._attach(replace=True)
    again = copy.deepcopy(module.model).eval()
    assert callback._seen is None
    torch.testing.assert_close(again(x), callback.model.eval()(x))
    assert callback._seen is None
    with torch.no_grad():
        callback.model.head.temperature_ *= 3
    assert not torch.allclose(again(x), callback.model(x))


def test_the_key_of_weights_knows_them_apart() -> None:
    net = Classifier().model
    keys = {integration.key_of_weights(net)}
    for value in net.state_dict().values():
        value.view(-1)[0] += 1
        keys.add(integration.key_of_weights(net))
    assert len(keys) == 1 + len(net.state_dict())
    assert integration.key_of_weights(copy.deepcopy(net)) == integration.key_of_weights(net)
    assert integration.key_of_weights(copy.deepcopy(net).bfloat16()) != integration.key_of_weights(net)
    assert integration.key_of_weights(nn.ReLU()) == 0


class Rank(DoubleHeadCallback):
    """Writes what each process ends with."""

    folder: Path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.double.seed += trainer.global_rank  # reads in another order, so that other folds are held back
        super().on_train_end(trainer, pl_module)
        state = {"heads": self.double.bank.state_dict(), "main": pl_module.state_dict(), "logged": logged}
        fitted = {"fitted": self.model.head.state_dict(), "choice": str(self.choice)}
        torch.save({**state, **fitted}, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a forked process cannot use CUDA again, and Lightning does"
)
@pytest.mark.usefixtures("one_thread")
def test_two_processes(images: Images, tmp_path: Path) -> None:
    callback = Rank(loader(images["calib"], shuffle=True), every=2)
    callback.folder = tmp_path
    how = {"devices": 2, "strategy": "ddp_fork", "max_epochs": 1}
    fit(images, tmp_path, callback, logger=CSVLogger(tmp_path, name="log"), **how)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["choice"] == second["choice"] != "None"
    for part in ("heads", "main", "fitted"):
        for name, value in first[part].items():
            if "running" not in name:  # each process has its own moments of BatchNorm
                assert torch.equal(value, second[part][name]), name
    assert first["logged"]["val_ece_calib"] == second["logged"]["val_ece_calib"]
    net, halves = Classifier(), []
    for rank, part in enumerate((first, second)):  # each process saw every other sample
        net.load_state_dict(part["main"])
        double = DoubleHead(net.model, images["calib"])
        double.bank.load_state_dict(first["heads"])
        readings = read(double.reader, images["test"])
        answers = double.answer(readings.logits, readings.features)
        halves.append(Predictions(answers[rank::2], readings.labels[rank::2]))
    both = Predictions(torch.cat([p.logits for p in halves]), torch.cat([p.labels for p in halves]))
    assert first["logged"]["val_ece_calib"] == pytest.approx(metrics.ece(both), abs=1e-6)
    alone = fit(images, tmp_path, None, **how)
    assert_same(alone.state_dict(), first["main"])
    assert len(list((tmp_path / "log").rglob("reliability-*.png"))) == 1


class Halves(torch_data.Sampler[int]):
    """A user's own way to deal out samples."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows[torch_tools.rank() :: torch_tools.n_processes()])

    def __len__(self) -> int:
        return len(self.rows[torch_tools.rank() :: torch_tools.n_processes()])


@pytest.mark.usefixtures("one_thread")
def test_two_processes_count_every_validation_sample_once(images: Images, tmp_path: Path) -> None:
    pl.seed_everything(5, verbose=False)
    module = Classifier()

    def validate(data: Any, **how: Any) -> dict[str, float]:
        trainer = quiet_trainer(tmp_path, callbacks=[DoubleHeadCallback(loader(images["calib"]))], **how)
        # No advice to synchronise what is the same everywhere; the module's own val_loss may get it.
        warnings.filterwarnings("error", "It is recommended to use `self.log.'val_(?!loss)")
        trainer.validate(module, data, verbose=False)
        return {k: float(v) for k, v in trainer.callback_metrics.items() if k != "val_loss"}

    for n in (1, 41):  # of one sample the second process has none of its own
        data = TensorDataset(*(part[:n] for part in images["test"].tensors))
        p = Predictions(module.eval().model(data.tensors[0]), data.tensors[1])
        one = validate(loader(data, 4))
        assert one["val_nll_main"] == pytest.approx(metrics.nll(p), rel=1e-6)
        wrapped = DataLoader(data, 4, sampler=torch_data.SubsetRandomSampler(range(n)))
        two = validate(loader(data, 4) if n == 1 else wrapped, devices=2, strategy="ddp_fork")
        assert two == pytest.approx(one, rel=1e-6)
        assert two["val_accuracy_main"] == one["val_accuracy_main"]
    how = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False}
    parts = validate(DataLoader(data, 4, sampler=Halves(range(n))), **how)
    assert parts == pytest.approx(one, rel=1e-6)  # a part in each


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_samples_count_once_over_all_processes(wrapped: bool, drop_last: bool) -> None:
    for n, n_processes, batch_size in product((1, 2, 5, 12, 13), (1, 2, 3, 4), (1, 3, 4, 20)):
        seen: list[int] = []
        for rank in range(n_processes):
            how = {"num_replicas": n_processes, "rank": rank, "drop_last": drop_last}
            sampler = Wrapper(range(n), **how) if wrapped else DistributedSampler(range(n), **how)
            batches = DataLoader(range(n), batch_size, sampler=sampler)
            for i, batch in enumerate(batches):
                seen += batch[: integration._n_own(batches, i, len(batch))].tolist()
        wanted = n // n_processes * n_processes if drop_last else n
        assert len(seen) == len(set(seen)) == wanted, (n, n_processes, batch_size)


def test_samples_in_an_unknown_order_all_count() -> None:
    class Sorted(torch_data.BatchSampler):
        pass

    class Blocks(DistributedSampler[int]):
        pass

    def counted(loader: Any, sizes: tuple[int, ...] = (2, 2, 1)) -> tuple[int, ...]:
        return tuple(integration._n_own(loader, i, size) for i, size in enumerate(sizes))

    data = range(9)  # the second of two processes gets its fifth from the first
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    known = DataLoader(data, 2, sampler=sampler)
    assert counted(known) == (2, 2, 0)
    assert counted(known, (6, 6, 3)) == (6, 6, 3)  # three rows for each sample
    for unknown in (
        DataLoader(data, batch_sampler=Sorted(sampler, 2, False)),
        DataLoader(data, 2, sampler=Blocks(data, num_replicas=2, rank=1)),
        DataLoader(data, 2, sampler=sampler, in_order=False),
        [torch.zeros(2), torch.zeros(2), torch.zeros(1)],
    ):
        assert counted(unknown) == (2, 2, 1)


def test_repeats_are_looked_for_in_the_data_that_is_validated(images: Images, tmp_path: Path) -> None:
    class Silent(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    some, other = (TensorDataset(*(part[:n] for part in images["test"].tensors)) for n in (9, 5))
    mine = DataLoader(some, 2, sampler=DistributedSampler(some, num_replicas=2, rank=1, shuffle=False))
    to_pair = lambda batch: batch["other"] if isinstance(batch, dict) else batch  # noqa: E731
    callback = DoubleHeadCallback(loader(images["calib"]), to_pair=to_pair)
    trainer = quiet_trainer(tmp_path, callbacks=[callback], max_epochs=1)

    def nll(data: Any) -> float:
        trainer.validate(module, data, verbose=False)
        return float(trainer.callback_metrics["val_nll_main"])

    def wanted(data: TensorDataset, rows: slice = slice(None)) -> Any:
        p = Predictions(module.eval().model(data.tensors[0][rows]), data.tensors[1][rows])
        return pytest.approx(metrics.nll(p), rel=1e-5)

    module = Silent()
    trainer.fit(module, loader(images["train"]), mine)
    assert float(trainer.callback_metrics["val_nll_main"]) == wanted(some, slice(1, 9, 2))
    assert nll(loader(other, 2)) == wanted(other)
    assert nll(CombinedLoader({"mine": mine, "other": loader(other, 2)}, "max_size")) == wanted(other)


def test_other_batches_through_to_pair(images: Images, tmp_path: Path) -> None:
    class Keyed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.model(batch["image"]), batch["target"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.model(batch["image"][:1])  # not the forward of the whole batch

    def keyed(data: TensorDataset) -> Any:
        return DataLoader([{"image": x, "target": y} for x, y in data], 32)

    to_pair = lambda batch: (batch["image"], batch["target"])  # noqa: E731
    callback = DoubleHeadCallback(keyed(images["calib"]), every=2, to_pair=to_pair)
    data = keyed(images["test"])
    trainer = quiet_trainer(tmp_path, callbacks=[callback], max_epochs=1)
    module = Keyed()
    trainer.fit(module, keyed(images["train"]), data)
    trainer.validate(module, data, verbose=False)  # with the calibration that was fitted at the end
    x, y = images["test"].tensors
    want = metrics.ece(Predictions(callback.model.eval()(x).detach(), y))
    assert float(trainer.callback_metrics["val_ece_calib"]) == pytest.approx(want, abs=1e-6)


def test_an_attachment_reads_and_replaces_answers() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = torch.randn(5, 4)
    double = DoubleHead(net, (torch.randn(60, 4), torch.randint(3, (60,))), every=1, heads=PAPER)
    plain = net(x)
    seen: list[Any] = []
    attachment = Attachment(net, double.reader, double.answer, seen=lambda heads, _: seen.append(heads))
    answer, model = net(x), double.finish()
    main, calib = model.heads(x)
    torch.testing.assert_close(answer, calib)
    torch.testing.assert_close(plain.log_softmax(1), main)
    assert not torch.allclose(main, calib)
    assert len(seen) == 1  # not where the reader runs the network
    for a, b, c in zip(attachment.ask((x,), {}), seen[0], (main, calib)):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)
    with attachment.resting():
        torch.testing.assert_close(net(x), plain)
    torch.testing.assert_close(net.train()(x), plain)
    net.eval()
    with pytest.raises(RuntimeError):
        net(torch.randn(5, 3))  # a forward that fails leaves nothing open
    torch.testing.assert_close(net(x), calib)
    with pytest.raises(RuntimeError, match="cannot follow the copies of a model that nn.DataParallel makes"):
        net._replicate_for_data_parallel()(x)
    attachment.detach()
    torch.testing.assert_close(net(x), plain)


def test_classifier_is_found_or_named() -> None:
    class Parts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.top = nn.Linear(4, 8), nn.Linear(8, 3)

    class Whole(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.backbone(x))

    module, whole, parts = Classifier(), Whole(), Parts()
    assert find_classifier(module) is module.model
    assert find_classifier(whole) is whole
    assert find_classifier(module, "model.0") is module.model[0]
    refused(r"found in Parts: .*'backbone', 'top'.*classifier='...'", find_classifier, parts)
    refused("Classifier has no attribute `net`", find_classifier, module, "net", error=AttributeError)


def test_a_module_that_is_the_classifier_itself(images: Images, tmp_path: Path) -> None:
    class Itself(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.top = self.model[:5], self.model[5]
            self.model = None

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.features(x))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    callback, module = DoubleHeadCallback(loader(images["calib"]), every=2), Itself()
    trainer = quiet_trainer(tmp_path, callbacks=[callback], max_epochs=1)
    trainer.fit(module, loader(images["train"]))
    predicted = torch.cat(trainer.predict(module, loader(images["test"])))
    assert callback.model.network is module
    want = callback.model.eval()(images["test"].tensors[0]).detach()
    torch.testing.assert_close(predicted, want, rtol=1e-5, atol=1e-4)
    module.predict_step = lambda batch, batch_idx: module.forward(batch[0])
    with pytest.warns(UserWarning, match="not calibrated") as caught:
        trainer.predict(module, loader(images["test"]))
    assert sum("not calibrated" in str(one.message) for one in caught) == 1


def test_bad_use_is_named(images: Images, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="calibration data must not be training data: at least 256 of 256"):
        fit(images, tmp_path, DoubleHeadCallback(loader(images["train"])))
    with pytest.raises(ValueError, match="calibration data must hold at least one batch"):
        fit(images, tmp_path, DoubleHeadCallback([], every=1))
    for options in ({"wrap": DoubleHead}, {"follow": None}, {"steps": 3}):
        refused(next(iter(options)), DoubleHeadCallback, images["calib"], error=TypeError, **options)
    with pytest.raises(ValueError, match="heads must be None or one HeadSpec, got 2 of them"):
        DoubleHeadCallback(images["calib"], heads=[HeadSpec(beta0=1.0), HeadSpec(beta0=1.2)])
    trainer = quiet_trainer(tmp_path, callbacks=[DoubleHeadCallback(images["calib"])], max_epochs=1)
    with pytest.warns(UserWarning, match="the validation data holds calibration data"):
        trainer.fit(Classifier(), loader(images["train"]), loader(images["calib"]))


def test_without_matplotlib_the_figure_is_refused_before_training(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for figure in (True, False):
        callback = DoubleHeadCallback(loader(images["calib"]), figure=figure, every=2)
        how: Any = {"logger": CSVLogger(tmp_path), "max_epochs": 1}
        if figure:
            with pytest.raises(ImportError, match=r"needs the package 'matplotlib'.*doublehead\[plots\]"):
                fit(images, tmp_path, callback, **how)
            assert callback.double is None
        else:
            fit(images, tmp_path, callback, **how)


def test_training_data_of_unknown_length(images: Images, tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(images["train"])

    callback = DoubleHeadCallback(images["calib"], every=2)
    trainer = quiet_trainer(tmp_path, callbacks=[callback], max_epochs=1)
    trainer.fit(Classifier(), DataLoader(Stream(), 32))
    assert (callback.double.calls, callback.double.skipped) == (8, 0)


def test_calibration_data_without_an_end(images: Images, tmp_path: Path, monkeypatch: Any) -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            return cycle(images["calib"])

    for batch_size, n_max, n in ((60, 100, 120), (250, 600, 250)):  # enough, or until they come again
        monkeypatch.setattr("doublehead.calibrated.MAX_SAMPLES", n_max)
        callback = DoubleHeadCallback(DataLoader(Endless(), batch_size), every=2)
        fit(images, tmp_path, callback, max_epochs=1)
        assert callback.choice.n == n
