"""Exports: run by ONNX Runtime, torch.export and safetensors, against the model they came from."""

import json
import math
import pickle
import re
import zipfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calibrated_models import data, guarded, make, network
from doublehead import Predictions, ShiftGuard, calibrate, load, metrics
from doublehead.data.batches import Normalise
from doublehead.integrations.export import export_model, load_program, model_card
from doublehead.system import require
from samples import Bomb
from tiny_networks import Formed

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("few_fits")


def run_onnx(path: Path, **feed: Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == ["probs", "label", "confidence"]
    return session.run(None, {name: value.numpy() for name, value in feed.items()})


def check(found: Any, want: Tensor) -> None:
    want = want.detach()
    probs, label, confidence = (np.asarray(torch.as_tensor(part).detach()) for part in found)
    np.testing.assert_allclose(probs, want, atol=1e-5)
    np.testing.assert_array_equal(label, want.argmax(1))
    np.testing.assert_allclose(confidence, want.amax(1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opinion", "flip", "paper", "temperature head", "no features", "guard"])
def test_programs_give_the_same_probabilities_labels_and_confidences(kind: str, tmp_path: Path) -> None:
    """All stages with a second opinion, views, heads as trained, and a guard round it."""
    model, _ = make(kind)
    x = data()[0][:33]
    want = model(x).softmax(1)
    if kind == "guard":
        assert (want - model.model(x).exp()).abs().amax(1).gt(1e-3).all()  # the guard acts
        assert len(log_scales(model).unique()) > 10
    model.train()
    export_model(model, tmp_path, x[:2], to="torch-export")
    check(load_program(tmp_path)(x), want)
    path = export_model(model, tmp_path, x[:1])
    check(run_onnx(path, input=x), want)
    check(run_onnx(path, input=x[:1]), want[:1])
    assert model.training  # the mode it had


def test_calibrated_export(tmp_path: Path) -> None:
    normalise = Normalise((0.4,), (0.2,))
    model, fresh = make("head")
    x = torch.rand(33, 1, 8, 8)
    want = model(normalise(x)).exp()
    about = {"card": "# A card\n", "facts": {"classes": ["a", "b"]}}
    path = model.export(tmp_path / "out", x[:2], prepare=normalise, **about)
    check(run_onnx(path, input=x), want)
    assert sorted(file.name for file in path.parent.iterdir()) == ["README.md", "config.json", "model.onnx"]
    config = json.loads((path.parent / "config.json").read_text())
    assert (config["format"], config["inputs"], config["classes"]) == ("onnx", ["input"], ["a", "b"])
    file = model.export(tmp_path / "weights", x[:2], "safetensors", prepare=normalise)
    assert torch.equal(load(file.parent, fresh)(normalise(x)).exp(), want)
    compiled: Any = torch.compile(model, backend="eager")
    assert export_model(compiled, tmp_path / "compiled", x[:2], "safetensors").exists()


@pytest.mark.parametrize(
    "options", [{"views": [lambda images: images.roll(1, -1)]}, {"logits_of": itemgetter("out")}]
)
def test_views_of_your_own_and_outputs_that_are_no_tensor(options: dict[str, Any], tmp_path: Path) -> None:
    net = Formed(network(), lambda logits: {"out": logits}) if "logits_of" in options else network()
    model, x = calibrate(net, data(), **options), data()[0][:9]
    model.export(tmp_path, x[:2], "torch-export")
    check(load_program(tmp_path)(x), model(x).exp())


def test_words_of_any_length_by_keyword(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.classifier = nn.Embedding(30, 8), nn.Linear(8, 3)

        def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
            pooled = (self.embedding(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return {"logits": self.classifier(pooled)}

    def batch(n: int, length: int) -> dict[str, Tensor]:
        return {"words": torch.randint(30, (n, length)), "mask": torch.ones(n, length, dtype=torch.long)}

    model = calibrate(Keyed(), [{**batch(300, 6), "labels": torch.randint(3, (300,))}])
    path = model.export(tmp_path, batch(2, 6))
    some = batch(5, 11)
    check(run_onnx(path, **some), model(**some)["logits"].exp())


def test_pickles_and_native_code_are_refused(tmp_path: Path) -> None:
    model, _ = make("temperature")
    file = model.export(tmp_path, data()[0][:2], "torch-export")
    for name in ("model/data/sample_inputs/bomb.pt", "model/data/aotinductor/model.so"):
        bad = tmp_path / "bad.pt2"
        with zipfile.ZipFile(file) as whole, zipfile.ZipFile(bad, "w") as changed:
            for member in whole.namelist():
                changed.writestr(member, whole.read(member))
            changed.writestr(name, pickle.dumps(Bomb(tmp_path / "exploded")))
        with pytest.raises(ValueError, match="tensors alone, got code to execute in .* it was not opened"):
            load_program(bad)
    assert not (tmp_path / "exploded").exists()


def test_an_export_that_answers_differently_is_not_kept(tmp_path: Path) -> None:
    class Moody(nn.Module):
        """Gives another output each time it is called: no program can hold that."""

        def __init__(self) -> None:
            super().__init__()
            self.calls, self.last = 0, nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.last(x) * self.calls

    class Broken(Moody):
        """Gives nan in a program."""

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x) * (math.nan if torch.compiler.is_compiling() else 1)

    class Rounded(nn.Linear):
        """Saves other weights than it has."""

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            state[f"{kwargs['prefix']}weight"] = self.weight.detach().round()
            return state

    x = torch.randn(150, 4)
    programs: list[tuple[nn.Module, Any]] = [
        (Moody(), "torch-export"), (nn.Sequential(Rounded(4, 3)), "safetensors"), (Broken(), "torch-export"),
    ]  # fmt: skip
    for moody, to in programs:
        labels = (5 * moody(x)).softmax(1).multinomial(1)[:, 0]
        model = calibrate(moody, (x, labels))
        with pytest.raises(RuntimeError, match="the same answers as the model: probs differ by up to"):
            model.export(tmp_path / "out", x[:2], to)
        assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="to must be one of onnx, torch-export, safetensors, got 'tflite'"):
        model.export(tmp_path, x[:2], "tflite")
    with pytest.raises(TypeError, match="example must be a tensor, or a tuple or dict of them, got str"):
        model.export(tmp_path, "x")
    with pytest.raises(TypeError, match="model must be a Calibrated or a ShiftGuard, got Broken"):
        export_model(model.network, tmp_path, x[:2])


@pytest.mark.filterwarnings("error:No complete tensor")
def test_a_guard_round_a_network_alone(tmp_path: Path) -> None:
    alone, x = network(), data()[0][:40]
    guard = guarded(alone)
    want = guard(x).softmax(1)
    export_model(guard, tmp_path, x[:2], to="torch-export")
    check(load_program(tmp_path)(x), want)
    assert "a window is state" in json.loads((tmp_path / "config.json").read_text())["guard"]
    again = load(export_model(guard, tmp_path, x[:2], to="safetensors"), network())
    assert isinstance(again, ShiftGuard)
    assert "guard" not in json.loads((tmp_path / "config.json").read_text())  # its window is saved
    torch.testing.assert_close(again(x).softmax(1), want)
    torch.testing.assert_close(guard(x).softmax(1), want)
    assert guard.model is alone
    assert len(alone[1]._forward_hooks) == 1  # no more hooks than before


def test_an_export_that_loses_its_guard_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is data on which the guard does not act."""
    guard, _ = make("guard")
    with torch.no_grad():
        guard.guard.posterior[-1] = -5  # acts on unusual data alone
        usual = data()[0][log_scales(guard).argsort()[-2:]]
    forward = guard.guard.forward

    def lost(stages: Tensor, logits: Tensor) -> Tensor:
        return logits if torch.compiler.is_compiling() else forward(stages, logits)

    monkeypatch.setattr(guard.guard, "forward", lost)
    with pytest.raises(RuntimeError, match=r"torch.export does not give the same answers .* up to 0\.\d+$"):
        export_model(guard, tmp_path, usual, to="torch-export")
    assert list(tmp_path.iterdir()) == []


def log_scales(guard: ShiftGuard) -> Tensor:
    observed, _ = guard.observe([data()])
    return guard.guard.log_scale(observed.stages, observed.logits)[:, 0]


def test_card_by_hand() -> None:
    probs = torch.tensor([[0.8, 0.2]] * 10)
    test = Predictions.from_probs(probs, torch.tensor([0] * 7 + [1] * 3))
    words = {"dataset": "coins", "data": "Ten coins.", "method": "Guessing."}
    card = model_card("tiny", test=test, classes=["a", "b"], **words)
    data = require("huggingface_hub", extra="transformers").ModelCard(card).data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == ("doublehead", "image-classification")
    found = {one["type"]: one["value"] for one in data["model-index"][0]["results"][0]["metrics"]}
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["ece"] == pytest.approx(0.1)
    floor = metrics.ece_floor(test)
    shown = f"{100 * floor.mean:.2f} % {100 * floor.low:.2f} to {100 * floor.high:.2f} %"
    assert shown in " ".join(card.split())
    assert re.search(r"ECE \(15 bins\) +10.00 %", card)
    for text in ("Ten coins.", "Guessing.", "1. b"):
        assert text in card
