"""The plain loop under Accelerate, Fabric, skorch and fastai: the network stays bit-identical. Trackers get figures."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import DoubleHead
from doublehead.curves import Reliability, reliability
from doublehead.integrations.callbacks import log_reliability, log_to_trackers
from doublehead.system import require
from samples import overconfident
from tiny_networks import assert_same


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def batches(n: int, seed: int) -> DataLoader[Any]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 16, shuffle=True)


def steps(model: nn.Module, loader: Any, double: DoubleHead | None, autocast: Any) -> Iterator[Tensor]:
    """Three epochs: yields losses to be stepped on, and calls the companion after each."""
    for _ in range(3):
        model.train()
        for step, (x, y) in enumerate(loader):
            yield F.cross_entropy(model(x), y)
            if double is not None:
                with autocast():
                    double.step(step / len(loader))


Trained = tuple[nn.Module, DoubleHead | None]


def under_accelerate(with_heads: bool, precision: str, accumulate: int) -> Trained:
    accelerate = require("accelerate", extra="transformers")
    accelerate.state.AcceleratorState._reset_state(True)  # another test of this process may have set it
    how = {"mixed_precision": precision, "gradient_accumulation_steps": accumulate}
    accelerator = accelerate.Accelerator(cpu=True, **how)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, batches(72, 1))
    double = DoubleHead(model, batches(240, 2), every=2, follow=optimizer) if with_heads else None
    for loss in steps(model, loader, double, accelerator.autocast):
        with accelerator.accumulate(model):
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(True)
    return net, double


def under_fabric(with_heads: bool, precision: str, accumulate: int) -> Trained:
    make = require("lightning.fabric", extra="lightning").Fabric
    fabric = make(accelerator="cpu", devices=1, precision=precision)
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    double = DoubleHead(model, batches(240, 2), every=2, follow=optimizer) if with_heads else None
    loader = fabric.setup_dataloaders(batches(72, 1))
    for number, loss in enumerate(steps(model, loader, double, fabric.autocast), 1):
        fabric.backward(loss / accumulate)
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net, double


def under_skorch(with_heads: bool, *_: Any) -> Trained:
    skorch = pytest.importorskip("skorch")
    net, train, doubles = network(), batches(72, 1).dataset, []

    class Calibrate(skorch.callbacks.Callback):
        def on_train_begin(self, net: Any, **_: Any) -> None:
            doubles.append(DoubleHead(net.module_, batches(240, 2), every=2, follow=net.optimizer_))

        def on_batch_end(self, net: Any, training: bool = False, **_: Any) -> None:
            if training:
                doubles[0].step()

    options = {"criterion": nn.CrossEntropyLoss, "batch_size": 16, "lr": 0.1, "iterator_train__shuffle": True}
    trained = skorch.NeuralNetClassifier(
        net, max_epochs=3, train_split=None, verbose=0, callbacks=[Calibrate()] * with_heads, **options
    ).fit(*(part.numpy() for part in train.tensors))
    return trained.module_, doubles[0] if doubles else None


def under_fastai(with_heads: bool, *_: Any) -> Trained:
    require("torchvision", extra="models")  # which fastai imports
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback
    from fastai.callback.schedule import Learner
    from fastai.data.core import DataLoaders

    net, doubles = network(), []

    class Calibrate(Callback):
        def before_fit(self) -> None:
            doubles.append(DoubleHead(self.model, batches(240, 2), every=2, follow=self.opt))

        def after_batch(self) -> None:
            if self.training:
                doubles[0].step()

    data, callbacks = DataLoaders(batches(72, 1), batches(32, 3)), [Calibrate()] * with_heads
    learner = Learner(data, net, loss_func=nn.CrossEntropyLoss(), cbs=callbacks)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(3, 1e-2)
    return net, doubles[0] if doubles else None


@pytest.mark.parametrize(
    ("loop", "precision", "accumulate"),
    [
        (under_accelerate, "no", 1),
        (under_accelerate, "bf16", 1),
        (under_accelerate, "no", 2),
        (under_fabric, "32-true", 1),
        (under_fabric, "bf16-mixed", 2),
        (under_skorch, "32-true", 1),
        (under_fastai, "32-true", 1),
    ],
)
def test_main_network_is_bit_identical(loop: Any, precision: str, accumulate: int) -> None:
    alone, _ = loop(False, precision, accumulate)
    beside, double = loop(True, precision, accumulate)
    assert_same(alone.state_dict(), beside.state_dict())
    assert (double.calls, double.skipped) == (15, 0)
    model = double.finish()
    x = torch.randn(7, 6)
    assert model.network is beside
    torch.testing.assert_close(model(x).exp().sum(1), torch.ones(7))
    torch.testing.assert_close(model.heads(x).main, alone.eval()(x).log_softmax(1))


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


def test_trackers_of_transformers(
    curve: Reliability, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: dict[str, Any] = {}
    args = SimpleNamespace(report_to=["wandb", "mlflow"], output_dir=str(tmp_path))
    log_to_trackers(args, {"eval_ece_calib": 0.01}, curve, "reliability", 5)  # neither has been imported
    run = SimpleNamespace(log=lambda row: got.update(wandb=row))
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(run=run, Image=lambda figure: ("image", figure))
    )
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
