"""Kinds of classifiers, on real data: every one goes through the same rows of logits and labels."""

import copy
import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import doublehead as dh
from doublehead.system import require
from doublehead.tasks import check_shifted, recognise, recognise_task
from samples import refused
from tiny_networks import Formed, assert_same

datasets = pytest.importorskip("sklearn.datasets")
pytestmark = pytest.mark.usefixtures("few_fits")
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


def binary_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y.float().reshape(out.shape))


def train(
    net: Any, x: Any, y: Any, steps: int = 150, double: Any = None, loss: Any = binary_loss, lr: float = 0.01
) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr)
    for _ in range(steps):
        loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if double is not None:
            double.step()


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_one_logit_is_calibrated_and_keeps_its_shape(squeeze: bool, kind: Any, tmp_path: Path) -> None:
    x, y = tumours()
    net = OneLogit(squeeze)
    double = dh.DoubleHead(net, (x[150:350], y[150:350].to(kind)))
    train(net, x[:150], y[:150], double=double)
    shape = net(x[350:]).shape
    for model in (dh.calibrate(net, (x[150:350], y[150:350].to(kind))), double.finish()):
        logit = model(x[350:])
        assert logit.shape == shape
        heads = model.heads(x[350:])
        torch.testing.assert_close(heads.calib.exp()[:, 1], logit.sigmoid().flatten())
        torch.testing.assert_close(heads.main.exp()[:, 1], net(x[350:]).sigmoid().flatten())
        assert torch.equal(logit > 0, net(x[350:]) > 0)
        assert binary_loss(logit, y[350:]) < binary_loss(net(x[350:]), y[350:])  # it was overfitted
        model.save(tmp_path)
        assert torch.equal(dh.load(tmp_path, OneLogit(squeeze)).eval()(x), model(x))


def trained_on_tumours() -> tuple[nn.Module, Tensor, Tensor]:
    (x, y), net = tumours(), OneLogit()
    train(net, x[:150], y[:150])
    return net, x, y


def test_a_network_with_one_logit_equals_one_with_two() -> None:
    """Logits (0, z) say the same as z, so the calibration is the same."""
    one, x, y = trained_on_tumours()

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(one(x), (1, 0))

    data = x[150:350], y[150:350]
    calibrated = dh.calibrate(one, data, method="temperature")(x)[:, 0]
    both = dh.calibrate(Two(), data, method="temperature")(x)
    torch.testing.assert_close(calibrated, both[:, 1] - both[:, 0], rtol=1e-4, atol=1e-4)


def test_probabilities_of_one_class_must_be_stated() -> None:
    (x, y), net = tumours(), OneLogit()
    train(net, x[:150], y[:150], steps=20)
    sigmoid = nn.Sequential(net, nn.Sigmoid())
    refused("outputs='probs'", dh.calibrate, sigmoid, (x[150:350], y[150:350]))
    stated = dh.calibrate(sigmoid, (x[150:350], y[150:350]), outputs="probs", layer="0.net.2")
    expected = dh.calibrate(net, (x[150:350], y[150:350]))
    torch.testing.assert_close(stated(x).sigmoid(), expected(x).sigmoid(), rtol=1e-2, atol=1e-2)


def test_one_logit_in_exports_and_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from doublehead.integrations.export import load_program
    from doublehead.integrations.sklearn import DoubleHeadClassifier

    net, x, y = trained_on_tumours()
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
    found = classifier.predict(x[350:].numpy())
    assert (found == np.where(y[350:] == 1, "benign", "malignant")).mean() > 0.85


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
    refused(r"\(4, 3\) and the labels \(5,\): supported are .* regression", recognise_task, b, torch.zeros(5))
    assert recognise(torch.zeros(4, 1), "binary") == "logits"  # a last layer of zeros
    ids = torch.arange(6).view(2, 3)  # a batch in which no token counts is not taken for inputs
    check_shifted(ids, torch.full_like(ids, -100), "tokens", -100)
    with pytest.raises(ValueError, match=r"task 'labels' does not fit outputs of shape \(8, 3\) and labels"):
        dh.calibrate(nn.Linear(5, 3), (torch.randn(8, 5), torch.arange(8) % 2), task="labels")
    data = torch.randn(8, 5), torch.arange(8) % 3
    for name in ("task", "outputs"):
        with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'multiclass'"):
            dh.calibrate(nn.Linear(5, 3), data, **{name: "multiclass"})
    for weight in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"weights must be finite and >= 0, got {weight:g}"):
            dh.calibrate(nn.Linear(5, 3), (*data, torch.full((8,), weight)))


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
            verb(nn.Linear(5, outputs), data)


# --- several labels per sample


def segments() -> tuple[Tensor, Tensor]:
    """Images of digits and the segments of a seven-segment display that each lights: seven labels at once."""
    lit = "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011".split()  # noqa: SIM905
    images, digits = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    table = torch.tensor([[float(mark) for mark in marks] for marks in lit])
    return torch.from_numpy(images[order]).float() / 16, table[torch.from_numpy(digits[order])]


def segment_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 7))


@cache
def overfitted_segments() -> tuple[nn.Module, Tensor, Tensor]:
    x, y = segments()
    net = segment_net()
    noisy = torch.where(torch.rand(200, 7) < 0.1, 1 - y[:200], y[:200])
    train(net, x[:200], noisy, steps=300)
    return net, x, y


@pytest.mark.parametrize("method", ["head", "temperature", "per_label"])
def test_several_labels_are_calibrated_and_keep_their_shape(method: str, tmp_path: Path) -> None:
    net, x, y = overfitted_segments()
    model = dh.calibrate(net, (x[200:900], y[200:900]), method=method)
    before, after = (dh.Predictions.multilabel(m(x[900:]), y[900:]) for m in (net, model))
    assert model(x).shape == net(x).shape
    assert torch.equal(after.predicted, before.predicted)
    assert dh.metrics.nll(after) < 0.8 * dh.metrics.nll(before)
    assert dh.metrics.ece(after) < 0.7 * dh.metrics.ece(before)
    model.save(tmp_path)
    assert torch.equal(dh.load(tmp_path, segment_net())(x), model(x))
    assert model.head.choice is not None
    assert list(model.head.choice.scores)[:2] == ["none", "temperature"]
    found = model.report((x[900:], y[900:]))
    assert list(found) == ["network", "temperature", "calibrated"]
    assert found["network"].values["nll"] == pytest.approx(dh.metrics.nll(before), abs=1e-5)
    assert len(found["calibrated"].groups) == 7


def test_a_missing_label_has_no_weight() -> None:
    net, x, y = overfitted_segments()
    x, y = x[200:700], y[200:700]
    counts = (torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.7).float()
    banks, models = [], []
    for guess in (y, torch.where(counts > 0, y, 1 - y)):  # a missing label may be anything
        double = dh.DoubleHead(net, (x, guess, counts), every=1, batch_size=100)
        for _ in range(10):
            double.step()
        assert double.skipped == 0
        double.close()
        banks.append(double.bank.state_dict())
        models.append(dh.calibrate(net, (x, guess, counts), method="temperature"))
    assert_same(*banks)
    torch.testing.assert_close(*(model(x) for model in models))
    assert not torch.equal(models[0](x), dh.calibrate(net, (x, y), method="temperature")(x))


def test_bad_labels_in_memory_and_heads_that_cannot_read_several_are_found_at_once() -> None:
    x, y = segments()
    classes, weights = torch.arange(len(x)) % 7, torch.ones(len(x), 7)
    rows = torch.eye(7)[classes]

    def ending_in(value: float, values: Tensor) -> Tensor:
        return torch.cat([values[:-1], torch.full_like(values[-1:], value)])

    for labels, options, message in (
        ((ending_in(math.nan, y),), {}, r"labels must lie in 0\.\.1 .* missing is a 0 with weight 0"),
        ((ending_in(math.nan, rows),), {"task": "classes"}, "must be >= 0 and sum to 1"),
        ((ending_in(7, classes),), {}, r"labels must lie in 0\.\.6"),
        ((rows, weights), {}, r"weights must be one for each of 10 samples, got shape \(10, 7\)"),
        ((classes, ending_in(-1, weights[:, 0])), {}, "weights must be finite and >= 0, got -1"),
        ((y,), {"heads": dh.HeadSpec(reads="statistics")}, "reads must not hold"),
        ((y,), {"heads": dh.HeadSpec(kind="temperature", reads="features")}, "reads must not hold"),
    ):
        refused(message, dh.DoubleHead, segment_net(), (x, *labels), batch_size=10, **options)


def test_heads_learn_several_labels_beside_the_network(tmp_path: Path) -> None:
    x, y = segments()
    wrong = torch.rand(200, 7, generator=torch.Generator().manual_seed(1)) < 0.1
    noisy = torch.where(wrong, 1 - y[:200], y[:200])
    bare, net = segment_net(), segment_net()
    double = dh.DoubleHead(net, (x[200:900], y[200:900]), every=5)
    train(bare, x[:200], noisy, steps=300)
    train(net, x[:200], noisy, double=double, steps=300)
    assert_same(net.state_dict(), bare.state_dict())
    assert double.skipped == 0
    finished, after = double.finish(), dh.calibrate(net, (x[200:900], y[200:900]))
    assert finished.opinion is not None
    own, calibrated, beside = (m(x[900:]).detach() for m in (net, after, finished))
    assert torch.equal(beside > 0, own > 0)
    loss = F.binary_cross_entropy_with_logits
    # The heads saw labels without mistakes, so their opinion says more than the network's logits can.
    assert loss(beside, y[900:]) < 0.9 * loss(calibrated, y[900:]) < 0.9 * loss(own, y[900:])
    finished.save(tmp_path)
    assert torch.equal(dh.load(tmp_path, segment_net())(x), finished(x))
    found = finished.report((x[900:], y[900:]))
    assert found["calibrated"].values["nll"] == pytest.approx(float(loss(beside, y[900:])), abs=1e-5)


@pytest.mark.parametrize(
    "spec",
    [dh.PAPER, dh.HeadSpec(reads=("features", "logits")), dh.HeadSpec(kind="temperature")],
    ids=["paper", "features and logits", "temperature"],
)
def test_one_head_of_several_labels_is_used_as_trained(spec: dh.HeadSpec, tmp_path: Path) -> None:
    x, y = segments()
    net = segment_net()
    train(net, x[:200], y[:200], steps=100)
    start, double = (dh.DoubleHead(net, (x[200:900], y[200:900]), heads=spec, every=1) for _ in range(2))
    for _ in range(100):
        assert double.step(1.0)
    before, model = start.finish(), double.finish()
    assert binary_loss(model(x[200:900]), y[200:900]) < binary_loss(before(x[200:900]), y[200:900])
    assert model(x).shape == (1797, 7)
    model.save(tmp_path)
    assert torch.equal(dh.load(tmp_path, segment_net())(x), model(x))


def test_the_summary_of_several_labels_has_each_of_them() -> None:
    net, x, y = overfitted_segments()
    p = dh.Predictions.multilabel(net(x), y.long())
    summary = dh.evaluate(p)
    assert summary.n == y.numel()
    assert len(summary.groups) == 7
    for i, group in enumerate(summary.groups.values()):
        own = p.of_label(i)
        assert group.values["ece"] == pytest.approx(dh.metrics.ece(own))
        assert torch.equal(own.labels, y[:, i].long())
        assert group.floor.mean > summary.floor.mean  # a seventh of the data
    with pytest.raises(ValueError, match=r"both have shape \(N, L\), got \(2, 3\) and \(2,\)"):
        dh.Predictions.multilabel(torch.randn(2, 3), [0, 1])
    refused(r"Predictions\.multilabel", dh.Predictions, net(x), y)


def test_labels_share_where_they_have_little_data_and_not_where_they_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 6, generator=generator)
    y = (torch.rand(4000, 6, generator=generator) < z.sigmoid()).long()
    for scales, chosen in ((torch.full((6,), 3.0), "shared"), (torch.linspace(1, 6, 6), "own")):
        p, test = (dh.Predictions.multilabel(z[i : i + 2000] * scales, y[i : i + 2000]) for i in (0, 2000))
        fitted = dh.calibrators.PerLabel("temperature").fit(p)
        assert fitted.choice.chosen == chosen
        best = dh.metrics.nll(dh.Predictions.multilabel(z[2000:], y[2000:]))
        assert dh.metrics.nll(fitted.calibrate(test)) < best + 0.005
    temperatures = float(fitted.shared.temperature_) / fitted.scale_
    torch.testing.assert_close(temperatures, scales, rtol=0.15, atol=0)


def test_a_label_on_which_the_network_is_wrong_is_not_turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doublehead.calibrators.parametric.MARGIN", -1e9)  # labels have maps of their own
    z = 2 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(2000, 2, generator=torch.Generator().manual_seed(1))
    yes = draws < (z * torch.tensor([1, -1])).sigmoid()
    for share in ("temperature", "head"):
        fitted = dh.calibrators.PerLabel(share).fit(dh.Predictions.multilabel(z, yes.long()))
        assert fitted.choice.chosen == "own"
        assert (fitted.scale_ > 0).all()


def test_files_with_several_label_columns(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    from commands import call
    from doublehead.files import read_predictions

    net, x, y = overfitted_segments()
    names = "abcdefg"
    frame = pd.DataFrame(net(x).detach().numpy(), columns=[f"logit_{n}" for n in names])
    frame[[f"y_{n}" for n in names]] = y.int().numpy()
    calib, test, bare = (tmp_path / f"{name}.csv" for name in ("calib", "test", "bare"))
    frame[200:900].to_csv(calib, index=False)
    frame[900:].to_csv(test, index=False)
    frame[900:].drop(columns=[f"y_{n}" for n in names]).to_csv(bare, index=False)
    want = dh.evaluate(dh.Predictions.multilabel(net(x[900:]).detach(), y[900:]))
    for logits, labels in ((str(test), "y_*"), (frame[900:], [f"y_{n}" for n in names])):
        found = dh.evaluate(logits=logits, labels=labels)
        assert found.values["ece"] == pytest.approx(want.values["ece"], abs=1e-5)
        assert list(found.groups) == [f"y_{n}" for n in names]

    fixed, again = tmp_path / "fixed.csv", tmp_path / "again.csv"
    said = call(*f"calibrate --fit {calib} --apply {test} --logits --label y_* -o {fixed}".split()).output
    assert "Held back, by cross-fitting" in said
    probs = pd.read_csv(fixed)[[f"prob_{n}" for n in names]].to_numpy()
    after = dh.Predictions.multilabel(probs, y[900:], are_probs=True)
    assert dh.metrics.nll(after) < 0.8 * want.values["nll"]
    fitted = tmp_path / "fixed.calibrator.safetensors"
    call(*f"calibrate --use {fitted} --apply {bare} --logits -o {again}".split())
    np.testing.assert_allclose(pd.read_csv(again).to_numpy(), probs, atol=1e-6)
    page = tmp_path / "report.html"
    call(*f"report {fixed} --probs --label y_* -o {page}".split())
    assert page.stat().st_size > 10_000
    arrays = tmp_path / "a.npz"
    np.savez(arrays, logits=net(x[900:]).detach().numpy(), labels=y[900:].int().numpy())
    assert dh.evaluate(arrays).values["ece"] == pytest.approx(want.values["ece"], abs=1e-5)
    unlabelled, out = tmp_path / "b.npz", tmp_path / "c.npz"
    np.savez(unlabelled, logits=net(x[900:]).detach().numpy())
    call(*f"calibrate --fit {arrays} --apply {unlabelled} -o {out} --method temperature".split())
    assert np.load(out)["probs"].shape == (len(x) - 900, 7)
    lines = tmp_path / "a.jsonl"
    rows = zip(net(x[900:]).tolist(), y[900:].int().tolist())
    lines.write_text("".join(json.dumps({"logits": z, "labels": t}) + "\n" for z, t in rows))
    assert dh.evaluate(logits=lines).values["ece"] == pytest.approx(want.values["ece"], abs=1e-5)
    sites = frame[900:].assign(site=np.where(np.arange(len(x) - 900) % 2, "s", "t"))
    assert list(dh.evaluate(logits=sites, labels=[f"y_{n}" for n in names], by="site").groups) == ["s", "t"]
    for wrong, message in (
        ({"label": "y_a,y_b"}, "0 or 1 for each of its 7 scores"),
        ({"label": "y_*", "where": {"y_a": "1"}}, "grouped by their label"),
        ({"label": ["y_a", "z"]}, "no column 'z' for the labels"),
    ):
        with pytest.raises(ValueError, match=message):
            read_predictions(test, kind="logits", **wrong).load()


# --- tokens and pixels


class Pixels(nn.Module):
    """Gives every pixel of an image the class of its digit, or background: (B, 11, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 11, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def inked_digits() -> tuple[Tensor, Tensor]:
    """Images (900, 1, 8, 8), labels (900, 8, 8): the digit where there is ink, 10 elsewhere; pale pixels count not."""
    images, digits = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[:900]
    x = torch.from_numpy(images[order]).float().view(-1, 1, 8, 8) / 16
    y = torch.where(x[:, 0] > 0.5, torch.from_numpy(digits[order])[:, None, None], 10)
    return x, torch.where((x[:, 0] > 0.2) & (x[:, 0] <= 0.5), 255, y)


@cache
def trained_pixels() -> tuple[nn.Module, Tensor, Tensor]:
    (x, y), net = inked_digits(), Pixels()
    train(net, x[:100], y[:100], 60, loss=pixel_loss, lr=0.02)
    return net, x, y


def test_pixels_are_calibrated_and_keep_their_form(tmp_path: Path) -> None:
    net, x, y = copy.deepcopy(trained_pixels())
    with torch.no_grad():
        net.net[-1].weight *= 3  # overconfident
    data = [(x[i : i + 50], y[i : i + 50]) for i in range(100, 700, 50)]
    model = dh.calibrate(net, data, ignore_index=255, positions=5000)
    assert model.head.choice.n == 5000
    out = model(x[700:])
    assert out.shape == (200, 11, 8, 8)
    torch.testing.assert_close(out.exp().sum(1), torch.ones(200, 8, 8))
    before, after = (pixel_predictions(z, y[700:]) for z in (net(x[700:]), out))
    assert len(before) == int((y[700:] != 255).sum())
    assert torch.equal(before.predicted, after.predicted)
    assert dh.metrics.nll(after) < 0.95 * dh.metrics.nll(before)
    model.save(tmp_path)
    again = dh.load(tmp_path, Pixels())
    assert torch.equal(again(x[:3]), model(x[:3]))
    assert len(again.report((x[700:800], y[700:800]))) == 3  # it still knows which pixels do not count


def test_labels_that_do_not_count_are_named() -> None:
    x, y = torch.randn(4, 3, 6, 6), torch.randint(4, (4, 6, 6))
    network = nn.Conv2d(3, 4, 1)
    with pytest.raises(ValueError, match=r"in 0..3 .* where they are not ignore_index = -100, got 0..255"):
        dh.calibrate(network, (x, torch.where(y == 1, 255, y)))
    with pytest.raises(ValueError, match="some other than ignore_index = 255, got none in 4 samples"):
        dh.calibrate(network, (x, torch.full_like(y, 255)), ignore_index=255)


def test_heads_learn_beside_pixels() -> None:
    net, x, y = trained_pixels()
    double = dh.DoubleHead(net, (x[100:400], y[100:400]), every=1, ignore_index=255, batch_size=64)
    assert double.reader.n_features == 16
    for _ in range(8):
        assert double.step()
    assert torch.isfinite(double.training.losses).all()
    model = double.finish(positions=2000)
    assert model(x[:2]).shape == (2, 11, 8, 8)


@pytest.mark.parametrize("channel", [True, False])
def test_masks_of_one_logit(tmp_path: Path, channel: bool) -> None:
    x, y = inked_digits()
    y = (y < 10).float()  # ink, pale pixels without
    y = y[:, None] if channel else y
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
    double = dh.DoubleHead(net, (x[100:500], y[100:500]), every=3)
    assert (double.reader.task, double.reader.n_features) == ("pixels", 16)
    train(net, x[:100], y[:100], 15, double, lr=0.02)
    assert double.skipped == 0
    model = double.finish(positions=4000)
    with torch.no_grad():
        out, before = model(x[500:]), net(x[500:])
    assert out.shape == (400, 1, 8, 8)
    nlls = [binary_loss(values, y[500:]) for values in (out, before)]
    assert nlls[0] < nlls[1]
    p = dh.Predictions.positions(out, y[500:])
    assert dh.metrics.nll(p) == pytest.approx(float(nlls[0]), abs=1e-5)
    model.save(tmp_path)
    again = dh.load(tmp_path, copy.deepcopy(net))
    assert torch.equal(again(x[:3]), model(x[:3]))
    with pytest.raises(ValueError, match="the network's outputs lie between 0 and 1"):
        dh.calibrate(nn.Sequential(net, nn.Sigmoid()), (x[:200], y[:200]))
    with torch.no_grad():
        net[-1].weight.zero_().add_(1e-6)
        net[-1].bias.fill_(0.5)
    reader = dh.DoubleHead(net, (x[:200], y[:200])).reader
    assert reader.outputs == "logits"  # a layer's, whatever their range


pixel_loss = partial(F.cross_entropy, ignore_index=255)
pixel_predictions = partial(dh.Predictions.positions, ignore_index=255)


@pytest.mark.parametrize(
    ("data", "make", "loss", "predictions", "options"),
    [
        (tumours, partial(OneLogit, squeeze=True), binary_loss, dh.Predictions.from_binary, {}),
        (segments, segment_net, binary_loss, dh.Predictions.multilabel, {}),
        (inked_digits, Pixels, pixel_loss, pixel_predictions, {"ignore_index": 255}),
    ],
    ids=["one logit", "several labels", "pixels"],
)
def test_in_lightning(data: Any, make: Any, loss: Any, predictions: Any, options: Any, tmp_path: Any) -> None:
    lightning = require("lightning", extra="lightning")
    from doublehead.integrations.lightning import DoubleHeadCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.tested = make(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            out: Tensor = loss(self.net(batch[0]), batch[1])
            return out

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(batch[0])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.tested.append(self.net(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    x, y = data()
    parts = [(x[i::3], y[i::3]) for i in range(3)]  # to train on, to calibrate and to validate with
    loaders = [DataLoader(TensorDataset(*part), 64) for part in parts]
    callback = DoubleHeadCallback(loaders[1], figure=False, every=2, **options)
    plain, module = Module(), Module()
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    for one, callbacks in ((plain, []), (module, [callback])):
        how = {"max_epochs": 5, "accelerator": "cpu", "default_root_dir": tmp_path, **off}
        trainer = lightning.Trainer(callbacks=callbacks, enable_checkpointing=False, **how)
        trainer.fit(one, loaders[0], loaders[2])
    assert_same(module.net.state_dict(), plain.net.state_dict())
    (numbers,) = trainer.validate(module, loaders[2], verbose=False)
    outs = {"main": module.net(parts[2][0]), "calib": callback.model(parts[2][0])}
    assert outs["calib"].shape == outs["main"].shape
    for name, out in outs.items():  # of all pairs of a sample and a label, or pixels that count
        p = predictions(out, parts[2][1])
        assert numbers[f"val_nll_{name}"] == pytest.approx(dh.metrics.nll(p), abs=1e-4)
        assert numbers[f"val_accuracy_{name}"] == pytest.approx(dh.metrics.accuracy(p))
    assert numbers["val_nll_calib"] <= numbers["val_nll_main"] + 0.01
    trainer.test(module, loaders[2], verbose=False)
    torch.testing.assert_close(torch.cat(module.tested), outs["calib"], rtol=1e-4, atol=1e-5)


def test_large_images_are_calibrated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = trained_pixels()
    model = dh.calibrate(net, (x[100:700], y[100:700]), ignore_index=255, positions=2000)
    double = dh.DoubleHead(net, (x[100:200], y[100:200]), ignore_index=255)
    rows = torch.randn(1280, 11), torch.randn(1280, 16)
    whole, answer = model(x[:20]), double.answer(*rows)
    monkeypatch.setattr("doublehead.calibrated.ROWS_AT_ONCE", 500)
    torch.testing.assert_close(model(x[:20]), whole)
    torch.testing.assert_close(double.answer(*rows), answer)


@pytest.mark.parametrize("limit", [10_000_000, 3000])
def test_a_stream_counts_what_the_whole_counts(limit: int) -> None:
    net, x, y = (part[:450] if isinstance(part, Tensor) else part for part in trained_pixels())
    with torch.no_grad():
        out = net(x)
    stream = dh.Stream(ignore_index=255, sample=limit)
    for i in range(0, len(x), 150):
        stream.add(out[i : i + 150], y[i : i + 150], group=f"part {i // 300}")
    p = dh.Predictions.positions(out, y, ignore_index=255)
    found, want = stream.summary(), dh.evaluate(p)
    assert found.n == want.n == len(p)
    for name in ("accuracy", "mean_confidence", "ece", "nll", "brier", "mean_entropy", "mce"):
        assert found.values[name] == pytest.approx(want.values[name], abs=1e-5), name
    assert found.floor.mean == pytest.approx(want.floor.mean, rel=0.05)
    for name in ("ece_classwise", "smooth_ece", "aurc"):
        assert found.values[name] == pytest.approx(want.values[name], abs=1e-4 if limit > len(p) else 0.03)
    assert found.classes.counts.tolist() == want.classes.counts.tolist()
    assert [group.n for group in found.groups.values()] == [int((part != 255).sum()) for part in y.split(300)]
    assert len(stream.sample) == len(stream.groups) == min(limit, len(p))
    if limit > len(p):  # in the order in which they came
        part = dh.Predictions.positions(out[:300], y[:300], ignore_index=255)
        torch.testing.assert_close(stream.sample.labels[stream.groups == "part 0"], part.labels)
    by_image = dh.evaluate(stream.sample, by=stream.groups)
    assert set(by_image.groups) == set(found.groups)
    probs = dh.Stream(ignore_index=255, are_probs=True)
    probs.add(out.softmax(1), y)
    assert probs.summary().values["nll"] == pytest.approx(want.values["nll"], abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_stream_refuses_scores_that_are_not_finite_where_labels_count(bad: float) -> None:
    scores, labels = torch.randn(2, 50, 3), torch.randint(3, (2, 50))
    scores[1, 7, 0] = bad
    stream = dh.Stream(sample=5)
    refused("scores must give a finite NLL", stream.add, scores, labels)
    labels[1, 7] = -100
    stream.add(scores, labels)
    assert stream.summary().n == 99


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_positions_take_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    scores, labels = torch.randn(2, 3, 8, 8), torch.randint(3, (2, 8, 8))
    labels[0, 0] = 100
    stream, whole = (dh.Stream(ignore_index=100) for _ in range(2))
    stream.add(scores, labels.to(dtype))
    whole.add(scores, labels)
    assert stream.summary().to_dict() == whole.summary().to_dict()
    p = dh.Predictions.positions(scores, labels.to(dtype), ignore_index=100)
    assert len(p) == stream.summary().n == 2 * 64 - 8


@pytest.mark.parametrize("are_probs", [False, True])
def test_a_stream_takes_pixels_with_one_logit(are_probs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 1, 9, 9, generator=generator)
    masks = (torch.rand(4, 1, 9, 9, generator=generator) < logits.sigmoid()).float()
    want = dh.Summary.of(dh.Predictions.from_binary(logits.flatten(), masks.flatten().long()))
    for labels in (masks, masks[:, 0].long()):
        stream = dh.Stream(are_probs=are_probs)
        stream.add(logits.sigmoid() if are_probs else logits, labels)
        found = stream.summary()
        assert (found.n, found.n_classes) == (4 * 81, 2)
        for name in ("accuracy", "ece", "nll", "brier"):
            assert found.values[name] == pytest.approx(want.values[name], abs=1e-6)


def test_a_stream_takes_a_probability_of_0_as_predictions_do() -> None:
    probs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).mul(3).softmax(1).mul(50).round()
    probs /= probs.sum(1, keepdim=True)
    labels = torch.arange(200) % 4
    stream = dh.Stream(are_probs=True, task="classes")
    for part in torch.arange(200).split(70):
        stream.add(probs[part], labels[part])
    found, want = stream.summary(), dh.evaluate(probs, labels)
    assert found.n_zero_labels == want.n_zero_labels > 20
    assert found.zero_floor == pytest.approx(want.zero_floor)
    assert found.metrics["nll"] == pytest.approx(tuple(want.metrics["nll"]), rel=1e-5)


def test_the_reservoir_draws_every_row_as_often() -> None:
    from doublehead.tasks import Reservoir

    hits, generator = torch.zeros(400), torch.Generator().manual_seed(0)
    for _ in range(600):
        kept = Reservoir(40, generator)
        for start in range(0, 400, 50):
            numbers = torch.arange(start, start + 50)
            targets = torch.where(numbers % 4 == 0, -1, numbers)
            rows = kept.draw(targets)
            kept.add(numbers[rows], targets[rows])
        hits[kept.rows()[0]] += 1
        assert len(kept.rows()[0]) == 40
    assert not hits[::4].any()
    expected = 600 * 40 / 300
    counted = hits.view(8, 50).sum(1) / (hits.view(8, 50) > 0).sum(1)
    assert float((counted / expected - 1).abs().max()) < 0.08  # as many of the last batch as of the first
    assert float((hits[hits > 0] / expected - 1).abs().max()) < 0.6


def tagging(n: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """A small Bert with random weights, and sentences of words with tags; three in ten tags are drawn at random."""
    transformers = require("transformers", extra="transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(4, 60, (n, 12))
    mask = (torch.arange(12) < torch.randint(4, 13, (n, 1))).long()
    tags = torch.where(torch.rand(n, 12) < 0.3, torch.randint(4, (n, 12)), ids % 4)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, tags, -100)}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(n)]
    return transformers.BertForTokenClassification(config), rows


def together(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_tokens_of_a_real_model_class() -> None:
    net, rows = tagging(400)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        net(**together(rows[:60])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    model = dh.calibrate(net, [together(rows[i : i + 30]) for i in range(60, 240, 30)])
    test = together(rows[240:])
    labels = test.pop("labels")
    with torch.no_grad():
        before, after = net(**test).logits, model(**test).logits
    assert after.shape == before.shape == (160, 12, 4)
    nlls = [dh.evaluate(logits=out, labels=labels).values["nll"] for out in (before, after)]
    assert nlls[1] < nlls[0]
    assert model.reader.task == "tokens"
    assert model.reader.n_features == 32


def test_tokens_in_the_trainer(tmp_path: Path) -> None:
    transformers = require("transformers", extra="transformers")
    pytest.importorskip("accelerate")
    from doublehead.integrations.transformers import DoubleHeadTrainerCallback, load_calibrated

    net, rows = tagging(160)
    callback = DoubleHeadTrainerCallback(rows[60:120], every=2, figure=False)
    args = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=16, learning_rate=3e-3, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    sets = {"train_dataset": rows[:60], "eval_dataset": rows[120:]}
    trainer = transformers.Trainer(net, args, **sets, callbacks=[callback])
    trainer.train()
    assert 0 < trainer.evaluate()["eval_nll_calib"] < 2
    trainer.save_model(str(tmp_path / "kept"))
    test = together(rows[120:])
    out, again = (model.eval()(**test).logits for model in (net, load_calibrated(tmp_path / "kept")))
    assert out.shape == (40, 12, 4)
    assert torch.equal(out, again)
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(40, 12))


def test_a_last_batch_of_one_whose_logit_is_squeezed() -> None:
    net = nn.Linear(4, 1)
    squeezed = Formed(net, torch.squeeze)  # () for one sample
    x = torch.randn(241, 4)
    batches = [(some, (some[:, 0] > 0).float()) for some in x.split(60)]
    model = dh.calibrate(squeezed, batches)
    assert model.head.choice.n == 241
    torch.testing.assert_close(model(x[:1]), model(x[:2])[0])
