"""`doublehead export`: real runs on real data as models for production."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from commands import call
from doublehead import HeadSpec, Predictions, load, metrics
from doublehead.cli.export import RunModel, _pick, open_run
from doublehead.cli.export import card as make_card
from doublehead.data import load as load_data
from doublehead.data.text import tokens_of
from doublehead.integrations.export import load_program
from doublehead.models import build
from doublehead.training.config import Config, method
from doublehead.training.loop import train
from doublehead.training.run_folder import RunError, RunFolder

onnxruntime = pytest.importorskip("onnxruntime")
STORED = 5e-3  # by which probabilities in a run folder may be off: its logits are float16


def export(*words: str | Path, code: int = 0) -> str:
    return call("export", *words, code=code).output


def run_onnx(path: Path, **feed: Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(path)
    return session.run(["probs", "label"], {name: value.numpy() for name, value in feed.items()})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run on real images, too short to be good."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    heads = {"paper": HeadSpec(), "sample": HeadSpec(kind="temperature", beta0=1.1)}
    config = Config(
        data="fashion", model="small_cnn", epochs=1, batch_size=64, augment="none", every=2, heads=heads, auto=True,
        n_train=256, n_calib=200, n_test=300,
    )  # fmt: skip
    train(config, RunFolder(folder), accelerator="cpu")
    return folder


def probs_of(found: RunModel, inputs: Tensor) -> Any:
    with torch.no_grad():
        return found.model(found.inputs.normalise(inputs)).softmax(1).numpy()


def test_export_command(run: Path, tmp_path: Path) -> None:
    export(run, "--to", "onnx", "--head", "sample", "-o", tmp_path)
    saved = Predictions.load(run / "predictions/test-sample.npz")
    images = _test_images(300)
    probs, label = run_onnx(tmp_path / "model.onnx", input=images)
    np.testing.assert_allclose(probs, saved.probs, atol=STORED)
    want = probs_of(open_run(run, "sample"), images)
    np.testing.assert_allclose(probs, want, atol=1e-5)
    np.testing.assert_array_equal(label, want.argmax(1))
    card = (tmp_path / "README.md").read_text()
    assert f"{100 * metrics.ece(saved):.2f} %" in card
    assert "fashion: 256 samples to train, 200 to calibrate, 300 to test" in card
    assert "'sample': temperature, beta0 = 1.1" in card
    assert "guard" not in card.split("## Settings")[0]
    assert "9. ankle boot" in card
    assert "'paper': mlp, beta0 = 1.2" in make_card(open_run(run, "paper"))


def _test_images(n: int) -> Tensor:
    from doublehead.data import fashion_subset
    from doublehead.data.splits import stratified_draw

    test: Any = fashion_subset().test
    chosen = test.images[np.sort(stratified_draw(test.labels, n))]  # as n_test of a config chooses
    return torch.from_numpy(chosen).permute(0, 3, 1, 2).float() / 255


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_export_command_of_the_automatic_head(
    run: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, "--to", to, "--head", "auto", "-o", tmp_path)
    if to == "torch-export":
        saved = Predictions.load(run / "predictions/test-auto.npz")
        probs = load_program(tmp_path)(_test_images(300))[0].detach().numpy()
        np.testing.assert_allclose(probs, saved.probs, atol=STORED)
        np.testing.assert_allclose(probs, probs_of(open_run(run, "auto"), _test_images(300)), atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["classes"][0] == "T-shirt/top"
    card = (tmp_path / "README.md").read_text()
    method = card.split("**Method.**")[1].split("\n")[0]
    assert "staged head" in method
    assert ("second opinion" in method) == ("pool" in method.split("stages in use:")[1])
    assert "guard" not in method
    (code,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"network": open_run(run, "auto").model.network}
    exec(code, names)
    assert names["probs"].shape == (1, 10)


@pytest.mark.slow
def test_a_network_that_reads_words_brings_its_vocabulary(treebank: Path, tmp_path: Path) -> None:
    (tmp_path / "sst").mkdir()
    for name, n in (("train.txt", 200), ("dev.txt", 100), ("test.txt", 60)):
        (tmp_path / "sst" / name).write_text("".join((treebank / name).open().readlines()[:n]))
    settings = {"data": "sst-binary", "embeddings": "random:8", "epochs": 1, "batch_size": 32, "every": 2}
    heads = {"sample": HeadSpec(kind="temperature")}
    config = Config(model="gp_cnn", augment="none", heads=heads, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a part of the data set is no longer the data set
        train(config, RunFolder(tmp_path / "run"), root=str(tmp_path), accelerator="cpu")
        export(tmp_path / "run", "--root", tmp_path)
        test = load_data("sst-binary", str(tmp_path)).test
    folder = tmp_path / "run/export"
    rows = {word: row for row, word in enumerate((folder / "vocabulary.txt").read_text().splitlines(), 2)}
    texts = [[rows.get(token, 1) for token in tokens] for tokens in tokens_of(test)]
    words = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for place, text in enumerate(texts):
        words[place, : len(text)] = torch.tensor(text)
    saved = Predictions.load(tmp_path / "run/predictions/test-sample.npz")
    probs = run_onnx(folder / "model.onnx", input=words)[0]
    np.testing.assert_allclose(probs, saved.probs, atol=STORED)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "guarded"
    config = Config(
        data="fashion", model="small_cnn", epochs=3, batch_size=64, augment="none", every=2,
        n_train=512, n_calib=200, n_test=300,
    )  # fmt: skip
    train(method("guarded").apply(config), RunFolder(folder), accelerator="cpu")
    return folder


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_export_command_of_a_guarded_run(guarded: Path, tmp_path: Path, to: str) -> None:
    assert "head: guarded" in export(guarded, "--to", to, "-o", tmp_path)
    saved = Predictions.load(guarded / "predictions/test-guarded.npz")
    images, original = _test_images(300), open_run(guarded)
    normalise = original.inputs.normalise
    strange = (images + torch.randn(images.shape)).clamp(0, 1)
    with torch.no_grad(), original.model.guard.alone():  # a program has no window
        under_noise = original.model(normalise(strange)).softmax(1)
        unguarded = original.model.model(normalise(strange)).exp()
        assert float((under_noise - unguarded).abs().max()) > 0.05
    batches = (images, strange, images[:1])
    if to == "torch-export":
        program = load_program(tmp_path)
        probs, noisy, one = (program(x)[0].detach().numpy() for x in batches)
    else:
        again = load(tmp_path, build("small_cnn", 10))
        with again.guard.alone():
            probs, noisy, one = (again(normalise(x)).softmax(1).detach().numpy() for x in batches)
    np.testing.assert_allclose(probs, saved.probs, atol=STORED)
    np.testing.assert_allclose(probs, probs_of(original, images), atol=1e-5)
    np.testing.assert_allclose(one, probs[:1], atol=1e-5)
    np.testing.assert_allclose(noisy, under_noise, atol=1e-4)
    card = (tmp_path / "README.md").read_text()
    assert f"{100 * metrics.ece(saved):.2f} %" in card
    assert "shift guard ('guarded')" in card
    assert "perturbed by 'shifts'" in card
    assert json.loads((tmp_path / "config.json").read_text())["head"] == "guarded"


def test_which_head_is_exported() -> None:
    asked = method("guarded").apply(Config())
    assert _pick(asked, None) == "guarded"
    for head in ("auto", "guarded"):
        assert _pick(asked, head) == head
    assert _pick(Config(auto=True), None) == "auto"
    assert _pick(Config(heads={"a": HeadSpec()}), None) == "a"
    for config, names in (
        (replace(asked, heads={"a": HeadSpec()}), "a, auto, guarded"),
        (Config(auto=True, guards=("noise",)), "auto, guarded@noise"),  # not what a method asks for
        (Config(auto=True, guards=("shifts", "noise")), "auto, guarded, guarded@noise"),
    ):
        with pytest.raises(RunError, match=f"several heads, name one with --head: {names}$"):
            _pick(config, None)
        assert _pick(config, names.split(", ")[-1]) == names.split(", ")[-1]
    with pytest.raises(RunError, match="head must be one of auto, guarded, got 'guarded@noise'"):
        _pick(asked, "guarded@noise")


def test_export_command_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([run], "several heads, name one with --head: paper, sample, auto"),
        ([run, "--head", "x"], "head must be one of paper, sample, auto, got 'x'"),
        ([run, "--to", "tflite"], "--to must be one of onnx, torch-export, safetensors, got 'tflite'"),
        ([tmp_path], "must be the folder of a finished run"),
    ):
        assert message in export(*arguments, code=2)
