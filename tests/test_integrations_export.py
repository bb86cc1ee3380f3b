"""Exports: run by ONNX Runtime, torch.export and safetensors, from a real run and from models at hand."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tarfile
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from doublehead import DoubleHead, HeadBank, HeadSpec, Predictions, Readings, metrics
from doublehead.cli import app
from doublehead.data import load
from doublehead.data.normalise import Normalise
from doublehead.data.text import tokens_of
from doublehead.integrations.export import export_model, load_program, load_weights, single
from doublehead.integrations.fit_head import fit_head
from doublehead.integrations.head_config import describe, rebuild
from doublehead.integrations.model_card import model_card
from doublehead.integrations.run_model import _pick
from doublehead.optional import require
from doublehead.training.config import Config
from doublehead.training.loop import train
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
    model = DoubleHead(net(), kind="temperature", reads=("statistics", "features"))
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
    model = DoubleHead(net()).eval()
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

    model = DoubleHead(Keyed()).eval()
    example = {"words": torch.randint(30, (2, 6)), "mask": torch.ones(2, 6, dtype=torch.long)}
    path = export_model(model, example, tmp_path)
    words, mask = torch.randint(30, (5, 11)), torch.ones(5, 11, dtype=torch.long)
    probs, _, _ = run_onnx(path, words=words, mask=mask)
    np.testing.assert_allclose(probs, model(words=words, mask=mask)["logits"].softmax(1).detach(), atol=1e-5)


def readings(n: int) -> Readings:
    logits = 4 * torch.randn(n, 5)
    return Readings(torch.randn(n, 144), logits, torch.multinomial((logits / 2).softmax(1), 1)[:, 0])


@pytest.mark.parametrize("chosen", ["head", "temperature", "ensemble"])
def test_a_bank_becomes_what_answers(chosen: str, tmp_path: Path) -> None:
    specs = [HeadSpec(beta0=beta0, reads=("features", "statistics"), hidden=4) for beta0 in (1.0, 1.2)]
    model = DoubleHead(net(), head=partial(HeadBank, specs=specs)).eval()
    bank = model.head
    assert isinstance(bank, HeadBank)
    for parameter in bank.parameters():
        nn.init.normal_(parameter, std=0.3)
    if chosen == "head":
        bank._choose(1)
    elif chosen == "temperature":
        bank.select(readings(200))
        bank._choose(HeadBank.CHOSEN_TEMPERATURE)
    x = torch.randn(6, 1, 8, 8)
    one = single(model)
    torch.testing.assert_close(one(x).softmax(1), model(x).softmax(1))
    assert isinstance(one.head, HeadBank) == (chosen == "ensemble")
    if chosen != "ensemble":
        file = export_model(model, x, tmp_path, to="safetensors")
        torch.testing.assert_close(load_weights(file, net())(x).softmax(1), model(x).softmax(1))


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

    with pytest.raises(
        RuntimeError, match="does not give the same answers as the model: probs differ by up to"
    ):
        export_model(
            DoubleHead(Moody(), kind="temperature"), torch.randn(2, 4), tmp_path / "out", to="torch-export"
        )
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="to must be one of onnx, torch-export, safetensors, got 'tflite'"):
        export_model(DoubleHead(net()), torch.randn(2, 1, 8, 8), tmp_path, to="tflite")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="example must be a tensor, or a tuple or dict of them, got str"):
        export_model(DoubleHead(net()), "x", tmp_path)


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
    assert f"{100 * floor.mean:.2f} % ({100 * floor.low:.2f} .. {100 * floor.high:.2f})" in card
    assert "| ECE, 15 bins, 95 % interval | 10.00 % (" in card
    for text in ("Ten coins.", "Guessing.", "no miscalibration can be shown", "1. b"):
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
    assert "9. ankle boot" in card


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


def test_a_guard_is_not_exported_by_accident() -> None:
    config = Config(auto=True, guards=("shifts",))
    for head in (None, "guarded"):
        with pytest.raises(RunError, match="a guard cannot be exported: --head auto exports the head"):
            _pick(config, head)
    assert _pick(config, "auto") == "auto"
    assert _pick(Config(auto=True), None) == "auto"


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
