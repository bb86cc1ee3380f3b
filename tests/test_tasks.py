"""Kinds of classifiers, on real data: every one goes through the same rows of logits and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import doublehead as dh
from doublehead.calibration_data import unpack
from doublehead.network import Reader
from doublehead.tasks import recognise, recognise_task

datasets = pytest.importorskip("sklearn.datasets")
F = torch.nn.functional


def tumours() -> tuple[Tensor, Tensor]:
    """569 samples of 30 measurements; 0 malignant, 1 benign."""
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    order = np.random.default_rng(0).permutation(len(x))
    return torch.from_numpy(x[order]).float(), torch.from_numpy(y[order])


class OneLogit(nn.Module):
    """A binary classifier that overfits."""

    def __init__(self, squeeze: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net, self.squeeze = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1)), squeeze

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out[:, 0] if self.squeeze else out


def train(
    net: nn.Module, x: Tensor, y: Tensor, double: dh.DoubleHead | None = None, steps: int = 150
) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        out = net(x)
        F.binary_cross_entropy_with_logits(out, y.float().reshape(out.shape)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if double is not None:
            double.step()


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_one_logit_is_calibrated_and_keeps_its_shape(
    squeeze: bool, kind: torch.dtype, tmp_path: Path
) -> None:
    x, y = tumours()
    net = OneLogit(squeeze)
    double = dh.DoubleHead(net, (x[150:350], y[150:350].to(kind)))
    train(net, x[:150], y[:150], double)
    shape = net(x[350:]).shape
    for model in (dh.calibrate(net, (x[150:350], y[150:350].to(kind))), double.finish()):
        logit = model(x[350:])
        assert logit.shape == shape
        heads = model.heads(x[350:])
        torch.testing.assert_close(heads.calib.exp()[:, 1], logit.sigmoid().flatten())
        torch.testing.assert_close(heads.main.exp()[:, 1], net(x[350:]).sigmoid().flatten())
        assert torch.equal(logit > 0, net(x[350:]) > 0)
        target = y[350:].float().reshape(shape)
        loss = F.binary_cross_entropy_with_logits
        assert loss(logit, target) < loss(net(x[350:]), target)  # an overfitted network gets better
        model.save(tmp_path)
        assert torch.equal(dh.load(tmp_path, OneLogit(squeeze)).eval()(x), model(x))


def test_a_network_with_one_logit_equals_one_with_two() -> None:
    """Logits (0, z) say the same as z, so the calibration is the same."""
    x, y = tumours()
    one = OneLogit()
    train(one, x[:150], y[:150])

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(one(x), (1, 0))

    data = x[150:350], y[150:350]
    calibrated = dh.calibrate(one, data, method="temperature")(x)[:, 0]
    both = dh.calibrate(Two(), data, method="temperature")(x)
    torch.testing.assert_close(calibrated, both[:, 1] - both[:, 0], rtol=1e-4, atol=1e-4)


def test_probabilities_of_one_class_must_be_stated() -> None:
    x, y = tumours()
    net = OneLogit()
    train(net, x[:150], y[:150], steps=20)
    sigmoid = nn.Sequential(net, nn.Sigmoid())
    with pytest.raises(ValueError, match="outputs='probs'"):
        dh.calibrate(sigmoid, (x[150:350], y[150:350]))
    stated = dh.calibrate(sigmoid, (x[150:350], y[150:350]), outputs="probs", layer="0.net.2")
    expected = dh.calibrate(net, (x[150:350], y[150:350]))
    torch.testing.assert_close(stated(x).sigmoid(), expected(x).sigmoid(), rtol=1e-2, atol=1e-2)


def test_one_logit_in_exports_and_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from doublehead.integrations.export import load_program
    from doublehead.integrations.sklearn import DoubleHeadClassifier

    x, y = tumours()
    net = OneLogit()
    train(net, x[:150], y[:150])
    model = dh.calibrate(net, (x[150:350], y[150:350]))
    model.export(tmp_path, x[:4], "torch-export")
    model.export(tmp_path, x[:4], "onnx")  # compares itself with the model
    probs, label, confidence = load_program(tmp_path)(x)
    torch.testing.assert_close(probs[:, 1], model(x)[:, 0].sigmoid())
    assert torch.equal(label, probs.argmax(1))
    torch.testing.assert_close(confidence, probs.amax(1))

    classifier = DoubleHeadClassifier(module=OneLogit(), epochs=20, random_state=0)
    classifier.fit(x[:350].numpy(), np.where(y[:350] == 1, "benign", "malignant"))
    assert classifier.predict_proba(x.numpy()).shape == (569, 2)
    assert (
        classifier.predict(x[350:].numpy()) == np.where(y[350:] == 1, "benign", "malignant")
    ).mean() > 0.85


def test_one_logit_in_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from doublehead.integrations.lightning import DoubleHeadCallback

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = OneLogit(squeeze=True)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    x, y = tumours()
    loaders = [
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[rows], y[rows].float()), 64)
        for rows in (slice(150), slice(150, 350), slice(350, None))
    ]
    callback = DoubleHeadCallback(loaders[1], every=2, figure=False)
    trainer = lightning.Trainer(
        max_epochs=5, callbacks=[callback], logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module(), loaders[0], loaders[2])
    assert trainer.callback_metrics["val_accuracy_calib"] > 0.8
    assert callback.model(x).shape == (569,)


def test_tasks_are_recognised_by_shapes_or_refused() -> None:
    b = torch.randn(4, 3)
    for values, labels, task in (
        (b, torch.arange(4) % 3, "classes"),
        (b, b.softmax(1), "classes"),
        (b, torch.tensor([[0, 1, 1]] * 4), "labels"),
        (b[:, 0], torch.zeros(4), "binary"),
        (b[:, :1], torch.zeros(4, 1), "binary"),
        (torch.randn(4, 7, 3), torch.zeros(4, 7), "tokens"),
        (torch.randn(4, 3, 7), torch.zeros(4, 7), "pixels"),
        (torch.randn(4, 3, 5, 6), torch.zeros(4, 5, 6), "pixels"),
    ):
        assert recognise_task(values, labels) == task
    with pytest.raises(
        ValueError, match=r"shape \(4, 3\) and the labels \(5,\): supported are .* regression"
    ):
        recognise_task(b, torch.zeros(5))
    assert recognise(torch.zeros(4, 1), "binary") == "logits"  # a last layer of zeros


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (1, torch.linspace(20, 80, 32)),  # a regression
        (1, torch.arange(32) % 5),  # stages of a disease as one number
        (4, torch.arange(32) % 5),  # five stages as four thresholds
        (3, torch.rand(32)),
    ],
)
def test_ordinal_and_regression_models_get_a_sentence(outputs: int, labels: Tensor) -> None:
    data = torch.randn(32, 5), labels
    for verb in (dh.calibrate, dh.DoubleHead):
        with pytest.raises((TypeError, ValueError), match="ordinal and regression models are not"):
            verb(nn.Linear(5, outputs), data)  # type: ignore[operator]


def test_reading_gives_rows() -> None:
    x, y = tumours()
    batch = unpack((x[:8], y[:8]), torch.device("cpu"))
    readings = Reader(OneLogit(), batch).read([(x[:8], y[:8])])
    assert readings.logits.shape == (8, 2)
    assert readings.features.shape == (8, 32)
    assert not readings.logits[:, 0].any()
