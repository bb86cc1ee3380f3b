"""The loop: what it trains, what it leaves alone, and whether its numbers are what they say."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import tiny_networks
from doublehead import Calibrated, HeadSpec, Predictions, ShiftGuard, metrics
from doublehead.data import Images, corrupt
from doublehead.saving import rebuild
from doublehead.training import evaluation, loop
from doublehead.training.config import METHODS, Config
from doublehead.training.evaluation import as_plain
from doublehead.training.run_folder import RunError, RunFolder, algorithms
from samples import refused
from training_helpers import fashion, run, small

safetensors = pytest.importorskip("safetensors.torch")


def weights(folder: Path, part: str = "model") -> dict[str, torch.Tensor]:
    found = safetensors.load_file(folder / "model.safetensors")
    return {k.removeprefix(f"{part}."): v for k, v in found.items() if k.startswith(f"{part}.")}


def test_the_network_is_the_same_with_and_without_heads(tmp_path: Path) -> None:
    bare = small(model="tiny_networks:dropout_mlp", mixup=0.2, augment="crop-flip")
    heads = {"a": HeadSpec(dropout=0.5), "b": HeadSpec(kind="mlp", beta0=1.2)}
    settings = json.loads(bare.to_json())
    settings |= {"heads": heads, "auto": True, "calib_augment": "noise+broad", "guards": ("noise",)}
    beside = Config(**settings)
    run(bare, tmp_path / "bare")
    run(beside, tmp_path / "beside")
    tiny_networks.assert_same(weights(tmp_path / "bare"), weights(tmp_path / "beside"))
    main = [np.load(tmp_path / name / "predictions/test-main.npz")["logits"] for name in ("bare", "beside")]
    np.testing.assert_array_equal(*main)
    start = [row["train_loss"] for row in RunFolder(tmp_path / "bare").lines()]
    assert start == [row["train_loss"] for row in RunFolder(tmp_path / "beside").lines()]


@pytest.mark.parametrize("name", METHODS)
def test_each_method_trains(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    network = "tiny_networks:norm_mlp" if method.guards else "tiny_networks:mlp"
    few = {"epochs": 1, "n_train": 120, "n_test": 40, "n_calib": 100}
    results = run(method.apply(small(model=network, **few)), tmp_path)
    (row,) = RunFolder(tmp_path).lines()
    assert 0 < row["train_loss"] < 10
    answer = results["outputs"][method.output]["before"]
    assert all(math.isfinite(value) for value in answer.values())
    assert answer["n"] == 40
    guarded = method.apply(Config()).guarded()
    assert set(results["outputs"]) == {"main", *method.heads, *(["auto"] if method.auto else []), *guarded}


def test_the_loss_of_an_epoch_by_hand(tmp_path: Path) -> None:
    """Three steps of Nesterov SGD, written out."""
    focal = {"loss": "focal", "loss_options": {"gamma": 2.0}}
    config = small(epochs=1, n_train=120, momentum=0.5, weight_decay=0.01, **focal)
    run(config, tmp_path)
    again = loop.set_up(config, fabric_of(config), fashion(), None)
    net, losses = again.net.train(), []
    momentum = [torch.zeros_like(p) for p in net.parameters()]
    for step, (x, y) in enumerate(again.inputs.train):
        lr = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 3))
        p = net(x).softmax(1).gather(1, y[:, None])[:, 0]
        loss = (-((1 - p) ** 2) * p.log()).mean()
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient, v in zip(net.parameters(), gradients, momentum):
                d = gradient + 0.01 * parameter
                v.mul_(0.5).add_(d)
                parameter.sub_(lr * (d + 0.5 * v))
    (row,) = RunFolder(tmp_path).lines()
    assert row["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert row["lr"] == pytest.approx(lr)
    torch.testing.assert_close(weights(tmp_path), net.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(epochs=1)
    results = run(config, tmp_path)
    (tmp_path / "checkpoint.pt").touch()  # as if killed before it was removed
    run(config, tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(loop, "run_epoch", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(loop, "make_fabric", lambda *_, **__: pytest.fail("started again"))
    assert run(config, tmp_path) == results == RunFolder(tmp_path).results
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == stamps
    refused(r"other settings \(lr\)", run, small(epochs=1, lr=0.01), tmp_path, error=RunError)


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    config = small(heads={"h": HeadSpec(beta0=1.2)}, evaluate_every=2, epochs=3)
    ticks: list[tuple[int, int, int]] = []
    rows: list[dict[str, Any]] = []
    results = run(config, tmp_path, tick=lambda *at: ticks.append(at), report=rows.append)
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()) == [
        ".lock", "config.json", "metrics.jsonl", "model.safetensors",
        "predictions/calib-h.npz", "predictions/calib-main.npz", "predictions/test-h.npz",
        "predictions/test-main.npz", "predictions/train-main.npz", "results.json",
    ]  # fmt: skip
    assert ticks == [(epoch, step + 1, 6) for epoch in range(3) for step in range(6)]
    assert RunFolder(tmp_path).lines() == rows
    assert ["test" in row for row in rows] == [False, True, True]  # every second one, and the last
    assert rows[0]["beta"]["h"] == pytest.approx(1 + 0.2 * (1 - 5 / 6))  # the last of the steps 1, 3, 5
    p = Predictions.load(tmp_path / "predictions/test-main.npz")
    assert results["outputs"]["main"]["before"]["accuracy"] == pytest.approx(float(p.correct.double().mean()))
    assert rows[-1]["test"]["main"]["accuracy"] == pytest.approx(float(p.correct.double().mean()))
    np.testing.assert_array_equal(p.labels.numpy(), fashion().test.labels)
    trained = Predictions.load(tmp_path / "predictions/train-main.npz")
    assert results["train_accuracy"] == pytest.approx(float(trained.correct.double().mean()), abs=1e-6)
    assert results["sizes"] == [240, 240, 150]
    assert Config.from_json(json.dumps(results["config"])) == config


def test_a_process_may_have_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(heads={"h": HeadSpec()}, n_test=40)
    made = loop.set_up(config, fabric_of(config), fashion(), None)
    alone = evaluation.predict(made, made.inputs.make_eval(made.inputs.splits.test))
    other = {name: p.logits for name, p in alone.items()} | {"labels": alone["main"].labels}
    monkeypatch.setattr(evaluation, "n_processes", lambda: 2)
    monkeypatch.setattr(evaluation, "from_every_process", lambda value: [value, other])
    both = evaluation.predict(made, [])
    assert all(torch.equal(both[name].logits, alone[name].logits) for name in ("main", "h"))
    assert torch.equal(both["h"].labels, alone["h"].labels)


def test_predictions_of_the_train_split_are_optional(tmp_path: Path) -> None:
    results = run(small(epochs=1, predict_train=False, record_gradients=True), tmp_path)
    with np.load(tmp_path / "gradients.npz") as arrays:
        assert arrays["norms"].shape == (1, 6, 0)  # there are no heads
    assert results["train_accuracy"] is None
    assert not (tmp_path / "predictions/train-main.npz").exists()


def test_the_saved_weights_give_the_saved_predictions(tmp_path: Path) -> None:
    """Those of the network, of its heads, of the staged head and of the guards round it."""
    usual = {"model": "tiny_networks:norm_mlp", "auto": True, "shift": ("contrast:5",)}
    heads = {"a": HeadSpec(reads=("statistics", "features")), "b": HeadSpec(kind="mlp")}
    guards = {"guarded": "shifts", "guarded@noise": "noise", "guarded@noise+broad": "noise+broad"}
    several = small(guards=tuple(guards.values()), heads=heads, **usual)
    results = run(several, tmp_path / "several")
    assert [*results["outputs"]] == ["main", "a", "b", "auto", *guards]
    assert set(guards) < set(results["shift"]["contrast:5"])
    assert all("guarded" not in row["test"] for row in RunFolder(tmp_path / "several").lines())

    again = loop.set_up(several, fabric_of(several), fashion(), None)
    net, inputs, bank = again.net.eval(), again.inputs, again.companions["heads"].bank.eval()
    net.load_state_dict(weights(tmp_path / "several"))
    bank.load_state_dict(weights(tmp_path / "several", "heads"))
    auto = auto_of(tmp_path / "several", net)
    x = torch.cat([x for x, _ in inputs.make_eval(fashion().test)])
    main = net(x)
    a, b = bank(main, net[:4](x))  # what goes into the last layer
    wanted = {"main": main, "a": a, "b": b, "auto": auto(x)}
    saved = {name: logits_of(tmp_path / "several", name) for name in results["outputs"]}
    for name, logits in wanted.items():
        torch.testing.assert_close(saved[name], logits, rtol=1e-3, atol=1e-3)  # saved as float16
    for name in guards:
        guard = ShiftGuard(net).eval()
        guard.guard.load_state_dict(weights(tmp_path / "several", name))
        stages = guard.observe([(x, torch.zeros(len(x), dtype=torch.long))])[0].stages
        guard.reset()
        want = guard.guard(stages, saved["auto"]).detach()  # the test data are one batch
        torch.testing.assert_close(saved[name], want, rtol=1e-2, atol=1e-2)
        assert torch.equal(saved[name].argmax(1), saved["main"].argmax(1))

    calib, shifts = inputs.whole(inputs.splits.calib), inputs.perturbation("shifts", share=1.0)
    by_hand = ShiftGuard(auto).fit(calib, shifts, seed=several.seed)
    for key, value in weights(tmp_path / "several", "guarded").items():
        if key not in ("recent", "seen", "since", "last"):  # the state of the stream
            torch.testing.assert_close(value, by_hand.guard.state_dict()[key], rtol=1e-2, atol=5e-3, msg=key)

    run(small(guards=("noise",), heads=heads, **usual), tmp_path / "alone")
    # A guard knows nothing of the others: neither weights nor families they saw.
    assert torch.equal(logits_of(tmp_path / "alone", "guarded@noise"), saved["guarded@noise"])
    assert not any(torch.equal(saved["guarded"], saved[name]) for name in [*guards][1:])


def test_the_staged_head_reads_the_mirror_view(tmp_path: Path) -> None:
    config = small(auto=True, views=("flip",), model="tiny_networks:norm_mlp")
    run(config, tmp_path)
    net = tiny_networks.norm_mlp(10)
    net.load_state_dict(weights(tmp_path))
    inputs = loop.set_up(config, fabric_of(config), fashion(), None).inputs
    x = torch.cat([x for x, _ in inputs.make_eval(fashion().test)])
    both = torch.stack([net.eval()(images).log_softmax(1) for images in (x, x.flip(-1))]).mean(0)
    calibrated = auto_of(tmp_path, net)(x)
    saved = logits_of(tmp_path, "auto")
    torch.testing.assert_close(saved, calibrated, rtol=1e-2, atol=1e-2)  # saved as float16
    assert torch.equal(saved.argmax(1), both.argmax(1))
    assert not torch.equal(saved.argmax(1), logits_of(tmp_path, "main").argmax(1))


def auto_of(folder: Path, net: nn.Module) -> Calibrated:
    made = rebuild(net, RunFolder(folder).results["auto"])
    made.head.load_state_dict(weights(folder, "auto.head"))
    made.opinion.load_state_dict(weights(folder, "auto.opinion"))
    return made.eval()


def logits_of(folder: Path, name: str) -> torch.Tensor:
    return Predictions.load(folder / f"predictions/test-{name}.npz").logits


def fabric_of(config: Config) -> Any:
    return loop.make_fabric(config, accelerator="cpu", devices=1)


def test_shift_against_a_direct_computation(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    others = Images(random.randint(0, 256, (50, 28, 28, 1)).astype(np.uint8), np.arange(50))  # other classes
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", others.images)
        np.save(tmp_path / f"{split}_labels.npy", others.labels)
    elsewhere = f"arrays:{tmp_path}"
    config = small(shift=("gaussian_noise:3", elsewhere))
    results = run(config, tmp_path / "run")
    assert set(results["shift"]) == {"gaussian_noise:3", f"ood:{elsewhere}"}
    pixels = torch.from_numpy(fashion().test.images).permute(0, 3, 1, 2) / 255
    noisy = corrupt(pixels, "gaussian_noise", 3, torch.Generator().manual_seed(3))
    unseen = torch.from_numpy(others.images).permute(0, 3, 1, 2) / 255
    train = fashion().train.images / 255
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    net.load_state_dict(weights(tmp_path / "run"))
    temperature = results["outputs"]["main"]["temperature"]
    for suffix, divisor in (("", 1.0), ("+T", temperature)):
        sets = {"clean": pixels, "noisy": noisy, "unseen": unseen}
        with torch.no_grad():
            logits = {k: net(((x - train.mean()) / train.std()).float()) / divisor for k, x in sets.items()}
        confidence = {name: z.softmax(1).amax(1) for name, z in logits.items()}
        p = Predictions(logits["noisy"], fashion().test.labels)
        got = results["shift"]["gaussian_noise:3"][f"main{suffix}"]
        assert got["accuracy"] == pytest.approx(metrics.accuracy(p), abs=1e-6)
        assert got["ece"] == pytest.approx(metrics.ece(p), abs=1e-4)
        noise, strange = (metrics.auroc(confidence["clean"], confidence[k]) for k in ("noisy", "unseen"))
        assert got["auroc"] == pytest.approx(noise, abs=1e-3)
        other = results["shift"][f"ood:{elsewhere}"][f"main{suffix}"]
        assert set(other) == {"mean_confidence", "auroc"}
        assert other["mean_confidence"] == pytest.approx(float(confidence["unseen"].mean()), abs=1e-4)
        assert other["auroc"] == pytest.approx(strange, abs=1e-3)


def test_shifts_that_cannot_be_had_are_told_before_training(tmp_path: Path) -> None:
    for shift, error, message in (
        ("saturate:2", ValueError, "shift must be one for grey images, got 'saturate:2'"),
        ("svhn", FileNotFoundError, "svhn was not found"),
        ("gausian_noise:5", ValueError, "shift must name .* did you mean gaussian_noise"),
        ("svnh", ValueError, "shift must name .* did you mean svhn"),
    ):
        refused(message, run, small(shift=(shift,)), tmp_path / "run", root=str(tmp_path), error=error)
    assert not (tmp_path / "run").exists()
    results = run(small(epochs=1, n_train=80, n_test=20, shift=("cifar10c",)), tmp_path / "run")
    assert len(results["shift"]) == 12 * 5
    assert not any("saturate" in name for name in results["shift"])


def test_gradients_of_the_heads(tmp_path: Path) -> None:
    """Six places of each epoch: the first, 5th, 10th, 10th last, 5th last and last calibration step."""
    heads = {"a": HeadSpec(), "b": HeadSpec(kind="mlp"), "late": HeadSpec()}
    config = small(heads=heads, every=1, every_of={"late": 4}, auto=True, record_gradients=True, epochs=3)
    run(config, tmp_path)
    with np.load(tmp_path / "gradients.npz") as arrays:
        norms, names = arrays["norms"], arrays["heads"].tolist()
    assert names == ["a", "b", "late"]
    assert norms.shape == (3, 6, 3)
    seen = np.isfinite(norms)
    assert seen[:, :, 0].tolist() == [[True, True, False, False, True, True]] * 3  # six steps an epoch
    assert (norms[:, [0, 1, 4, 5], :2] > 0).all()
    first_and_last = [[True, False, False, False, False, True]] * 3  # its steps: 4 | 8, 12 | 16
    assert seen[:, :, 2].tolist() == first_and_last
    assert (norms[:, 0, 2] == norms[:, 5, 2]).tolist() == [True, False, True]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """Torch's loaders are then as they were: Fabric changes them while it runs, and Lightning could not use them."""
    names = ("__init__", "__setattr__", "__delattr__")
    before = [getattr(cls, name) for cls in (DataLoader, BatchSampler) for name in names]
    with pytest.raises(RunError, match=r"the training loss is (nan|inf) in epoch 0: lower lr \(now 1e\+30\)"):
        run(small(lr=1e30), tmp_path)
    assert not (tmp_path / "results.json").exists()
    assert [getattr(cls, name) for cls in (DataLoader, BatchSampler) for name in names] == before


def test_deterministic_algorithms_are_on_for_the_run_alone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def settings() -> tuple[bool, bool, bool, str | None]:
        cudnn, workspace = torch.backends.cudnn, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, workspace

    before, seen = settings(), []
    for deterministic in (True, False):
        folder = tmp_path / str(deterministic)
        config = small(deterministic=deterministic, auto=True)
        made = run(config, folder, report=lambda row: seen.append(settings()))
        assert settings() == before
        assert made["environment"]["deterministic"] is deterministic
    assert seen == [(True, True, False, ":4096:8")] * 2 + [before] * 2  # two epochs each
    with pytest.raises(RunError, match="the training loss is"):
        run(small(lr=1e30, deterministic=True), tmp_path / "fails")
    assert settings() == before
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with algorithms(deterministic=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own is as good
        with algorithms(deterministic=False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_numbers_for_json() -> None:
    made = as_plain({"a": 0.123456789, "b": (1, 2.0), "c": math.nan, "d": HeadSpec(), "e": None, "f": True})
    assert made.pop("d")["beta0"] == 1.2
    assert made == {"a": 0.123457, "b": [1, 2.0], "c": None, "e": None, "f": True}
