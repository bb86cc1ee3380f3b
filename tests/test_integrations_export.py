"""Exports: run by ONNX Runtime, torch.export and safetensors, from a real run and from models at hand."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from doublehead import DoubleHead, HeadBank, HeadSpec, Predictions, Readings, ShiftGuard, metrics
from doublehead.cli import app
from doublehead.cli.export import _taught_by, card
from doublehead.data import load
from doublehead.data.batches import Normalise
from doublehead.data.text import tokens_of
from doublehead.head_bank import AUTO
from doublehead.integrations.export import export_model, load_program, load_weights, single
from doublehead.integrations.fit_head import fit_head
from doublehead.integrations.head_config import describe, rebuild
from doublehead.integrations.model_card import model_card
from doublehead.integrations.run_model import _pick, open_run
from doublehead.models import build
from doublehead.optional import require
from doublehead.training.config import LEFT_OUT, PERTURBATIONS, Config
from doublehead.training.loop import train
from doublehead.training.methods import method
from doublehead.training.run_folder import RunError, RunFolder

onnxruntime = pytest.importorskip("onnxruntime")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def run_onnx(path: Path, **feed: Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == ["probs", "label", "confidence"]
    return session.run(None, {name: value.numpy() for name, value in feed.items()})  # type: ignore[no-any-return]


def test_onnx_gives_the_same_probabilities_labels_and_confidences(tmp_path: Path) -> None:
    normalise = Normalise((0.4,), (0.2,))
    model = DoubleHead(net(), reads=("statistics", "features"))
    nn.init.normal_(model.head.last.weight)
    x = torch.rand(33, 1, 8, 8)
    path = export_model(model, x[:1], tmp_path / "out", prepare=normalise, card="# A card\n")
    assert model.training  # the mode it had
    probs, label, confidence = run_onnx(path, input=x)
    want = model.eval()(normalise(x)).softmax(1).detach().numpy()
    np.testing.assert_allclose(probs, want, atol=1e-5)
    np.testing.assert_array_equal(label, want.argmax(1))
    np.testing.assert_allclose(confidence, want.max(1), atol=1e-5)
    assert sorted(file.name for file in path.parent.iterdir()) == ["README.md", "config.json", "model.onnx"]
    config = json.loads((path.parent / "config.json").read_text())
    assert config["inputs"] == ["input"]
    assert config["doublehead"]["heads"][0]["reads"] == ["statistics", "features"]


def test_torch_export_and_safetensors_come_back(tmp_path: Path) -> None:
    model = DoubleHead(net(), kind="mlp").eval()
    x = torch.randn(7, 1, 8, 8)
    want = model(x).softmax(1).detach()
    export_model(model, x[:2], tmp_path / "program", to="torch-export")
    probs, label, confidence = load_program(tmp_path / "program")(x)
    torch.testing.assert_close(probs, want)
    assert torch.equal(label, want.argmax(1))
    torch.testing.assert_close(confidence, want.amax(1))
    file = export_model(model, x[:2], tmp_path / "weights", to="safetensors")
    again = load_weights(file, net())
    torch.testing.assert_close(again(x).softmax(1), want, rtol=0, atol=0)


def test_words_of_any_length_by_keyword(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.classifier = nn.Embedding(30, 8), nn.Linear(8, 3)

        def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
            pooled = (self.embedding(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return {"logits": self.classifier(pooled)}

    model = DoubleHead(Keyed(), kind="mlp").eval()
    example = {"words": torch.randint(30, (2, 6)), "mask": torch.ones(2, 6, dtype=torch.long)}
    path = export_model(model, example, tmp_path)
    words, mask = torch.randint(30, (5, 11)), torch.ones(5, 11, dtype=torch.long)
    probs, _, _ = run_onnx(path, words=words, mask=mask)
    np.testing.assert_allclose(probs, model(words=words, mask=mask)["logits"].softmax(1).detach(), atol=1e-5)


def readings(n: int) -> Readings:
    logits = 4 * torch.randn(n, 5)
    return Readings(torch.randn(n, 144), logits, torch.multinomial((logits / 2).softmax(1), 1)[:, 0])


def with_bank(network: nn.Module) -> DoubleHead:
    specs = [HeadSpec(beta0=beta0, reads=("features", "statistics"), hidden=4) for beta0 in (1.0, 1.2)]
    model = DoubleHead(network, head=partial(HeadBank, specs=specs)).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("chosen", ["head", "temperature", "curve", "bent head", "ensemble"])
def test_a_bank_becomes_what_answers(chosen: str, tmp_path: Path) -> None:
    model = with_bank(net())
    bank = model.head
    assert isinstance(bank, HeadBank)
    if chosen == "temperature":
        bank.select(readings(200))
    if chosen in ("curve", "bent head"):
        bank.after.load_state_dict({**bank.after.state_dict(), "curve": torch.linspace(3, -1, 256)})
    if chosen != "ensemble":
        bank._choose(1 if "head" in chosen else HeadBank.CHOSEN_TEMPERATURE)
    x = torch.randn(6, 1, 8, 8)
    one = single(model)
    torch.testing.assert_close(one(x).softmax(1), model(x).softmax(1))
    assert isinstance(one.head, HeadBank) == (chosen == "ensemble")
    if chosen != "ensemble":
        file = export_model(model, x, tmp_path, to="safetensors")
        torch.testing.assert_close(load_weights(file, net())(x).softmax(1), model(x).softmax(1))
    if chosen == "bent head":
        probs, _, _ = run_onnx(export_model(model, x, tmp_path), input=x)
        np.testing.assert_allclose(probs, model(x).softmax(1).detach(), atol=1e-5)


def test_a_fitted_head_without_a_layer_comes_back() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    x = torch.randn(100, 4)
    model = fit_head(Odd(), [(x, torch.multinomial(x.softmax(1), 1)[:, 0])])
    again = rebuild(Odd(), json.loads(json.dumps(describe(model, 4))))
    again.head.load_state_dict(model.head.state_dict())
    torch.testing.assert_close(again.eval()(x), model(x))


def test_pickles_and_native_code_are_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    file = export_model(DoubleHead(net()), torch.randn(2, 1, 8, 8), tmp_path, to="torch-export")
    for name in ("model/data/sample_inputs/bomb.pt", "model/data/aotinductor/model.so"):
        bad = tmp_path / "bad.pt2"
        with zipfile.ZipFile(file) as whole, zipfile.ZipFile(bad, "w") as changed:
            for member in whole.namelist():
                changed.writestr(member, whole.read(member))
            changed.writestr(name, pickle.dumps(Bomb()))
        with pytest.raises(
            ValueError, match="must hold tensors alone, got code to execute in .* it was not opened"
        ):
            load_program(bad)
    assert not (tmp_path / "exploded").exists()


def test_an_export_that_answers_differently_is_not_kept(tmp_path: Path) -> None:
    class Moody(nn.Module):
        """Answers otherwise each time it is called: no program can hold that."""

        def __init__(self) -> None:
            super().__init__()
            self.calls, self.last = 0, nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.last(x) * self.calls

    class Broken(nn.Module):
        """Answers in a program with no number at all."""

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x) * (math.nan if torch.compiler.is_compiling() else 1)

    programs: list[tuple[nn.Module, Any]] = [
        (Moody(), "torch-export"), (Moody(), "safetensors"), (Broken(), "torch-export"),
    ]  # fmt: skip
    for network, to in programs:
        with pytest.raises(
            RuntimeError, match="does not give the same answers as the model: probs differ by up to"
        ):
            export_model(DoubleHead(network), torch.randn(2, 4), tmp_path / "out", to=to)
        assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="to must be one of onnx, torch-export, safetensors, got 'tflite'"):
        export_model(DoubleHead(net()), torch.randn(2, 1, 8, 8), tmp_path, to="tflite")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="example must be a tensor, or a tuple or dict of them, got str"):
        export_model(DoubleHead(net()), "x", tmp_path)
    with pytest.raises(TypeError, match="model must be a DoubleHead or a ShiftGuard, got Sequential"):
        export_model(net(), torch.randn(2, 1, 8, 8), tmp_path)  # type: ignore[arg-type]


def test_card_by_hand() -> None:
    probs = torch.tensor([[0.8, 0.2]] * 10)
    test = Predictions.from_probs(probs, torch.tensor([0] * 7 + [1] * 3))
    card = model_card(
        "tiny", dataset="coins", data="Ten coins.", method="Guessing.", test=test, classes=["a", "b"]
    )
    data = require("huggingface_hub", extra="transformers").ModelCard(card).data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == ("doublehead", "image-classification")
    found = {one["type"]: one["value"] for one in data["model-index"][0]["results"][0]["metrics"]}
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["ece"] == pytest.approx(0.1)
    floor = metrics.ece_floor(test)
    assert f"{100 * floor.mean:.2f} % ({100 * floor.low:.2f} to {100 * floor.high:.2f} %)" in card
    assert "| ECE, 15 bins, 95 % interval | 10.00 % (" in card
    for text in ("Ten coins.", "Guessing.", "1. b"):
        assert text in card


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run on real images, too short to be good."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    heads = {"paper": HeadSpec(beta0=1.2, kind="mlp"), "sample": HeadSpec(beta0=1.1)}
    config = Config(
        data="fashion", model="small_cnn", epochs=1, batch_size=64, augment="none", every=2, heads=heads, auto=True,
        n_train=256, n_calib=200, n_test=300,
    )  # fmt: skip
    train(config, RunFolder(folder), accelerator="cpu")
    return folder


def test_export_command(run: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(
        app, ["export", str(run), "--to", "onnx", "--head", "sample", "-o", str(tmp_path)]
    )
    assert made.exit_code == 0, made.output
    saved = Predictions.load(run / "predictions/test-sample.npz")
    images = _test_images(300)
    probs, label, _ = run_onnx(tmp_path / "model.onnx", input=images)
    np.testing.assert_allclose(probs, saved.probs, atol=1e-5)
    np.testing.assert_array_equal(label, saved.predicted)
    card = (tmp_path / "README.md").read_text()
    assert f"{100 * metrics.ece(saved):.2f} % (" in card
    assert "fashion: 256 samples to train, 200 to calibrate, 300 to test" in card
    assert "beta0 = 1.1" in card
    assert "guard" not in card.split("## Settings")[0]
    assert "9. ankle boot" in card


@pytest.mark.slow
def test_a_network_of_the_working_folder_is_trained_and_exported(tmp_path: Path) -> None:
    """In processes of their own that look for modules beside their script alone, as one that pip installed does."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/my_networks.py").write_text(
        "from torch import nn\n\n\n"
        "def tiny(n_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, n_classes))\n"
    )
    (tmp_path / "script.py").write_text("from doublehead.cli import app\n\napp()\n")

    def called(*words: str, folder: str = "here") -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, str(tmp_path / "script.py"), *words]
        return subprocess.run(command, cwd=tmp_path / folder, capture_output=True, text=True, check=False)

    settings = ("epochs=1", "n_train=128", "n_calib=100", "n_test=100", "augment=none")
    options = [word for setting in settings for word in ("--set", setting)]
    trained = called("train", "--data", "fashion", "--model", "my_networks:tiny", "--method", "double-head",
                     "--accelerator", "cpu", "-o", "runs", *options)  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    (run,) = (tmp_path / "here/runs").iterdir()
    exported = called("export", f"runs/{run.name}", "--to", "safetensors")
    assert exported.returncode == 0, exported.stderr
    assert (run / "export/model.safetensors").exists()
    elsewhere = called("export", str(run), "--to", "safetensors", folder="elsewhere")
    assert elsewhere.returncode == 2
    assert "cannot import the module of network 'my_networks:tiny'" in elsewhere.stderr


def _test_images(n: int) -> Tensor:
    from doublehead.data.fashion import fashion_subset
    from doublehead.data.splits import stratified_draw

    test: Any = fashion_subset().test
    chosen = test.images[np.sort(stratified_draw(test.labels, n))]  # as n_test of a config chooses
    return torch.from_numpy(chosen).permute(0, 3, 1, 2).float() / 255


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_export_command_of_the_automatic_head(run: Path, tmp_path: Path, to: str) -> None:
    made = CliRunner().invoke(app, ["export", str(run), "--to", to, "--head", "auto", "-o", str(tmp_path)])
    assert made.exit_code == 0, made.output
    if to == "torch-export":
        saved = Predictions.load(run / "predictions/test-auto.npz")
        probs = load_program(tmp_path)(_test_images(300))[0]
        torch.testing.assert_close(probs, saved.probs, atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "config.json").read_text())["classes"][0] == "T-shirt/top"


def test_a_network_that_reads_words_brings_its_vocabulary(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "sst").mkdir()
    with tarfile.open(shared / "data/sst/trees.tar.xz") as archive:
        for name, n in (("train.txt", 200), ("dev.txt", 100), ("test.txt", 60)):
            member = archive.extractfile(name)
            assert member is not None
            (tmp_path / "sst" / name).write_bytes(b"".join(member.readline() for _ in range(n)))
    settings = {"data": "sst-binary", "embeddings": "random:8", "epochs": 1, "batch_size": 32, "every": 2}
    config = Config(model="gp_cnn", augment="none", heads={"sample": HeadSpec()}, **settings)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a part of the data set is no longer the data set
        train(config, RunFolder(tmp_path / "run"), root=str(tmp_path), accelerator="cpu")
        made = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--root", str(tmp_path)])
        test = load("sst-binary", str(tmp_path)).test
    assert made.exit_code == 0, made.output
    folder = tmp_path / "run/export"
    rows = {word: row for row, word in enumerate((folder / "vocabulary.txt").read_text().splitlines(), 2)}
    texts = [[rows.get(token, 1) for token in tokens] for tokens in tokens_of(test)]  # type: ignore[arg-type]
    words = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for place, text in enumerate(texts):
        words[place, : len(text)] = torch.tensor(text)
    saved = Predictions.load(tmp_path / "run/predictions/test-sample.npz")
    np.testing.assert_allclose(run_onnx(folder / "model.onnx", input=words)[0], saved.probs, atol=1e-5)


# ---------------------------------------------------------------------------------------------- guards


@pytest.mark.parametrize("inside", ["bank", "network"])
def test_a_guard_goes_along(inside: str, tmp_path: Path) -> None:
    network, x = net(), torch.rand(40, 1, 8, 8)
    model = with_bank(network) if inside == "bank" else network
    if isinstance(model, DoubleHead):
        model.head._choose(1)
    guard = ShiftGuard(model, layers=["model.1" if inside == "bank" else "1"]).train()
    labels = torch.randint(5, (40,))
    guard.fit([(x, labels)], lambda images: images + torch.randn_like(images), views=1, steps=10)
    with torch.no_grad():  # it knows nothing of random labels: weights that act on half of the data
        guard.guard.last.weight.normal_().abs_()
        guard.guard.threshold.copy_(guard.guard.humility(guard.look([(x, labels)]).stages).median() / 1.5)
        guard.guard.scale.fill_(0.7)
        want = guard(x).softmax(1)
        assert (want - model.eval()(x).softmax(1)).abs().amax(1).gt(1e-3).all()
        assert len(guard.guard(guard.look([(x, labels)]).stages).unique()) > 10
    guard.train()
    export_model(guard, x[:2], tmp_path / "program", to="torch-export")
    torch.testing.assert_close(load_program(tmp_path / "program")(x)[0], want)
    file = export_model(guard, x[:2], tmp_path / "weights", to="safetensors")
    again = load_weights(file, net())
    assert isinstance(again, ShiftGuard)
    torch.testing.assert_close(again(x).softmax(1), want)
    assert json.loads((file.parent / "config.json").read_text())["guard"] == {"layers": guard.tap.layers}
    assert guard.model is model  # as it was, and with no more hooks
    assert guard.training
    assert len(network[1]._forward_hooks) == 1
    torch.testing.assert_close(guard.eval()(x).softmax(1), want)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "guarded"
    config = Config(
        data="fashion", model="small_cnn", epochs=3, batch_size=64, augment="none", every=2,
        n_train=512, n_calib=200, n_test=300,
    )  # fmt: skip
    train(method("guarded").apply(config), RunFolder(folder), accelerator="cpu")
    return folder


@pytest.mark.parametrize("to", ["onnx", "torch-export", "safetensors"])
def test_export_command_of_a_guarded_run(guarded: Path, tmp_path: Path, to: str) -> None:
    made = CliRunner().invoke(app, ["export", str(guarded), "--to", to, "-o", str(tmp_path)])
    assert made.exit_code == 0, made.output
    assert "head: guarded" in made.output
    saved = Predictions.load(guarded / "predictions/test-guarded.npz")
    auto = Predictions.load(guarded / "predictions/test-auto.npz")
    assert float((saved.probs - auto.probs).abs().max()) > 0.05  # the guard acts
    images, original = _test_images(300), open_run(guarded)
    normalise = original.prepare
    assert normalise is not None
    strange = (images + torch.randn(images.shape)).clamp(0, 1)
    with torch.no_grad():
        under_noise = original.model(normalise(strange)).softmax(1)
        unguarded = original.model.model(normalise(strange)).softmax(1)
        assert float((under_noise - unguarded).abs().max()) > 0.2
    if to == "onnx":
        probs, noisy, one = (
            run_onnx(tmp_path / "model.onnx", input=x)[0] for x in (images, strange, images[:1])
        )
    elif to == "torch-export":
        program = load_program(tmp_path)
        probs, noisy, one = (program(x)[0].detach().numpy() for x in (images, strange, images[:1]))
    else:
        again = load_weights(tmp_path, build("small_cnn", 10))
        probs, noisy, one = (
            again(normalise(x)).softmax(1).detach().numpy() for x in (images, strange, images[:1])
        )
    np.testing.assert_allclose(probs, saved.probs, atol=1e-5)
    np.testing.assert_allclose(one, saved.probs[:1], atol=1e-5)
    np.testing.assert_allclose(noisy, under_noise, atol=1e-4)
    card = (tmp_path / "README.md").read_text()
    assert f"{100 * metrics.ece(saved):.2f} % (" in card
    assert "shift guard ('guarded')" in card
    assert "motion blur, contrast, brightness, jpeg compression, pixelate" in card
    assert json.loads((tmp_path / "config.json").read_text())["head"] == "guarded"


def test_an_export_that_loses_its_guard_is_not_kept(
    guarded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, images = open_run(guarded, "guarded"), _test_images(300)
    model, prepare = found.model, found.prepare
    assert isinstance(model, ShiftGuard)
    assert prepare is not None
    stages = model.look([(prepare(images), torch.zeros(300, dtype=torch.long))]).stages
    usual = images[(model.guard(stages)[:, 0] == 1).nonzero()[:2, 0]]
    forward = model.guard.forward

    def lost(stages: Tensor) -> Tensor:
        return torch.ones_like(stages[:, :1]) if torch.compiler.is_compiling() else forward(stages)

    monkeypatch.setattr(model.guard, "forward", lost)
    with pytest.raises(
        RuntimeError, match=r"torch.export does not give the same answers .* by up to 0\.\d+$"
    ):
        export_model(model, usual, tmp_path, to="torch-export", prepare=prepare)
    assert list(tmp_path.iterdir()) == []


def test_which_head_is_exported() -> None:
    asked = method("guarded").apply(Config())
    assert _pick(asked, None) == "guarded"
    for head in ("auto", "guarded"):
        assert _pick(asked, head) == head
    assert _pick(Config(auto=True), None) == "auto"
    assert _pick(Config(heads={"a": HeadSpec()}), None) == "a"
    for config, names in (
        (replace(asked, heads={"a": HeadSpec()}), "a, auto, guarded"),
        (
            Config(auto=True, guards=("shifts-noises",)),
            "auto, guarded@shifts-noises",
        ),  # not what a method asks for
        (Config(auto=True, guards=("shifts", "noise")), "auto, guarded, guarded@noise"),
    ):
        with pytest.raises(RunError, match=f"several heads, name one with --head: {names}$"):
            _pick(config, None)
        assert _pick(config, names.split(", ")[-1]) == names.split(", ")[-1]
    with pytest.raises(RunError, match="head must be one of auto, guarded, got 'guarded@noise'"):
        _pick(asked, "guarded@noise")


def test_cards_say_what_was_chosen(guarded: Path, tmp_path: Path) -> None:
    files, other = require("safetensors.torch", extra="export"), tmp_path / "other"
    shutil.copytree(guarded, other)
    for chosen, spec in ((HeadBank.CHOSEN_TEMPERATURE, None), (13, AUTO[13])):
        weights = files.load_file(guarded / "model.safetensors")
        files.save_file({**weights, "auto.chosen": torch.tensor(chosen)}, other / "model.safetensors")
        assert open_run(other, "guarded").spec == spec
    found = open_run(guarded, "auto")
    about = {
        kind: card(replace(found, spec=spec)).split("**Method.**")[1].split("\n")[0]
        for kind, spec in (
            ("mlp", HeadSpec(kind="mlp", beta0=1.2)), ("own", HeadSpec(kind="temperature")), ("scalar", None),
        )
    }  # fmt: skip
    assert "('auto', chosen among 14 on data held back) with logits of its own" in about["mlp"]
    assert "beta0 = 1.2" in about["mlp"]
    assert "so that no prediction changes" in about["own"]
    assert "Its logits are divided by one temperature" in about["scalar"]
    assert not any("guard" in text or "bent" in text for text in about.values())
    assert "divided by a last temperature." in about["own"]
    for spec in (None, HeadSpec(kind="temperature")):
        assert "and then bent by a smooth curve" in card(replace(found, spec=spec, bends=True))


def test_cards_name_the_teachers_of_a_guard() -> None:
    for name in PERTURBATIONS[1:]:
        grey, coloured = (_taught_by(name, coloured) for coloured in (False, True))
        assert "saturate" not in grey
        assert ("saturate" in coloured) == (name in ("shifts", "shifts-1", "shifts-2", "shifts-noises",
                                                     "shifts-blurs", "shifts-digital"))  # fmt: skip
        for family in LEFT_OUT.get(name.removeprefix("shifts-"), ()):
            assert family.replace("_", " ") not in coloured
    assert _taught_by("noise", True) == "Gaussian noise"
    assert _taught_by("noise+broad", True).startswith("Gaussian noise, changes of geometry")
    assert _taught_by("shifts-colours", False).startswith("gaussian noise, shot noise, ")


def test_export_command_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([str(run)], "several heads, name one with --head: paper, sample, auto"),
        ([str(run), "--head", "x"], "head must be one of paper, sample, auto, got 'x'"),
        ([str(run), "--to", "tflite"], "--to must be one of onnx, torch-export, safetensors, got 'tflite'"),
        ([str(tmp_path)], "must be the folder of a finished run"),
    ):
        made = CliRunner().invoke(app, ["export", *arguments])
        assert made.exit_code == 2
        assert message in made.output


def test_weights_of_a_channels_last_network(tmp_path: Path) -> None:
    """Their memory is in another order, which safetensors refuses."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    model, x = DoubleHead(net().to(memory_format=torch.channels_last)).eval(), torch.randn(5, 3, 8, 8)
    assert not model.model[0].weight.is_contiguous()
    export_model(model, x, tmp_path, to="safetensors")
    torch.testing.assert_close(load_weights(tmp_path, net())(x), model(x))
