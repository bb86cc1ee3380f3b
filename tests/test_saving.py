"""What a calibrated network keeps when it is saved, copied, moved, pickled and compiled."""

import copy
import itertools
import pickle
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calibrated_models import KINDS, N_CLASSES, data, make, network, with_stages
from doublehead import PAPER, DoubleHead, Predictions, calibrate, calibrators, load
from doublehead.calibrators import Head, NotFitted, Temperature
from doublehead.saving import describe, save
from samples import Bomb, refused
from tiny_networks import Formed

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("few_fits")


def log_probs(model: Any) -> Tensor:
    """Of the first images, normalised: a guard's logits are not."""
    return model(data()[0][:20]).log_softmax(1)


@pytest.mark.parametrize("kind", KINDS)
def test_models_come_back(kind: str, tmp_path: Path) -> None:
    model, fresh = make(kind)
    want = log_probs(model)
    file = save(model, tmp_path / "new")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    again = load(tmp_path / "new", fresh)
    assert type(again) is type(model)
    assert not again.training
    assert torch.equal(log_probs(again), want)
    assert describe(again) == describe(model)
    assert torch.equal(log_probs(copy.deepcopy(model)), want)
    assert torch.equal(log_probs(pickle.loads(pickle.dumps(model))), want)
    assert torch.equal(log_probs(model.to("cpu")), want)


def test_what_was_loaded_in_inference_mode_runs_outside_of_it(tmp_path: Path) -> None:
    model, fresh = make("guard")
    want = log_probs(model)
    with torch.inference_mode():
        again = load(save(model, tmp_path), fresh)
    torch.testing.assert_close(log_probs(again), want)


@pytest.mark.parametrize("kind", ["opinion", "guard"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent(kind: str, copied: Any) -> None:
    model, _ = make(kind)
    want, other = log_probs(model), copied(model)
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
        inner = other.model if kind == "guard" else other
        assert inner.reader.network is inner.network
        main = inner.heads(data()[0][:20]).main
        torch.testing.assert_close(main, torch.full_like(main, 1 / N_CLASSES).log())  # reads its own network
    assert torch.equal(log_probs(model), want)
    assert not torch.equal(log_probs(other), want)


@pytest.mark.parametrize("kind", ["no features", "opinion", "flip"])
def test_every_combination_of_stages_restores(kind: str) -> None:
    model, _ = make(kind)
    images = data()[0][:20]
    n_stages = 4 if kind == "no features" else 5
    seen = set()
    for flags in itertools.product((False, True), repeat=6):
        if flags[3] and n_stages == 4:
            continue  # nothing to pool
        with_stages(model, flags)
        answer = model.reader.run((images,), {})
        want = model(images)
        fresh = Head(keep=model.head.keep)
        fresh.load_state_dict(model.head.state_dict())
        model.head, kept = fresh, model.head
        assert torch.equal(model(images), want)
        model.head = kept
        assert fresh.in_words() == kept.in_words()
        assert fresh.keeps_argmax == flags[-1]
        if flags[-1]:
            assert torch.equal(want.argmax(1), answer.logits.argmax(1))
        seen.add(tuple(want.flatten().tolist()))
    assert len(seen) > 2**n_stages  # the stages act, each on its own


@pytest.mark.parametrize("kind", ["opinion", "flip"])
def test_it_compiles_without_a_break(kind: str) -> None:
    model, _ = make(kind)
    want = log_probs(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(log_probs(compiled), want)


@pytest.mark.parametrize("heads", [None, PAPER])
def test_a_compiled_network_is_saved_under_its_own_names(heads: Any, tmp_path: Path) -> None:
    compiled: Any = torch.compile(network(), backend="eager")
    double = DoubleHead(compiled, data(), heads=heads, every=1)
    double.step()
    model = double.finish()
    assert torch.equal(log_probs(load(model.save(tmp_path), network())), log_probs(model))
    assert torch.equal(log_probs(copy.deepcopy(model)), log_probs(model))


def test_the_calibration_stays_wide_in_a_half_model() -> None:
    model, _ = make("opinion")
    want = log_probs(model)
    half = copy.deepcopy(model).bfloat16()
    assert {value.dtype for value in half.network.parameters()} == {torch.bfloat16}
    kept = [*half.head.buffers(), *half.opinion.state_dict().values()]
    assert {value.dtype for value in kept if value.is_floating_point()} == {torch.float32}
    got = half(data()[0][:20].bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(data()[0][:20])
    for found in (got, mixed):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.exp(), want.exp(), atol=0.03, rtol=0)


def test_channels_last_and_shared_weights(tmp_path: Path) -> None:
    """Both are refused by safetensors as they are."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(128, N_CLASSES)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            x = x.expand(-1, 2, -1, -1)
            return self.last(self.again(self.first(x)).flatten(1))

    model = calibrate(Shared().to(memory_format=torch.channels_last), data())
    assert not model.network.first.weight.is_contiguous()
    torch.testing.assert_close(log_probs(load(model.save(tmp_path), Shared())), log_probs(model))


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="path must be a folder with model.safetensors"):
        load(tmp_path, network())
    calibrators.save(Temperature().fit(Predictions(torch.randn(50, 3), torch.arange(50) % 3)), file)
    refused("must be a file that model.save wrote", load, tmp_path, network())
    for content in (b"", b"no model", pickle.dumps(Bomb(tmp_path / "exploded"))):
        file.write_bytes(content)
        refused("must be a file that doublehead saved", load, file, network())
    assert not (tmp_path / "exploded").exists()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    model, _ = make("head")
    model.save(tmp_path)
    refused("layer must name a module of Sequential, got '4'", load, tmp_path, network()[:3])
    wider = network()
    wider[0], wider[1] = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
    refused("size mismatch", load, tmp_path, wider, error=RuntimeError)


def test_what_cannot_be_described_is_refused(tmp_path: Path) -> None:
    model = calibrate(network(), data(), views=[lambda x: x])
    refused("views of your own", model.save, tmp_path, error=TypeError)
    model.reader.views = ()
    model.head = Temperature()
    refused("this Temperature is not fitted: there is nothing to save", model.save, tmp_path, error=NotFitted)
    model.head = nn.Identity()
    refused("must be one of .* got Identity", model.save, tmp_path, error=TypeError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("form", "place"), [(lambda logits: (-logits, logits), 1), (lambda logits: {"out": logits}, "out")]
)
def test_logits_of_is_given_again(form: Any, place: Any, tmp_path: Path) -> None:
    model, fresh = (Formed(network(), form) for _ in range(2))
    model = calibrate(model, data(), logits_of=itemgetter(place))
    model.save(tmp_path)
    with pytest.raises(TypeError, match="logits_of must be the function with which the saved model was made"):
        load(tmp_path, fresh)
    again = load(tmp_path, fresh, logits_of=itemgetter(place))
    assert torch.equal(log_probs(again), log_probs(model))
