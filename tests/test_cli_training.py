"""Training on the command line: tables and files when all is well, one sentence and exit code 2 when not."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from commands import call
from doublehead.cli import train as demo_command
from doublehead.cli.output import is_first_process, told_to_user
from doublehead.cli.train import _shift_columns, change, recipe, show_rows
from doublehead.data import catalog
from doublehead.training.config import IMAGENET, METHODS, RECIPES, TEXT, Config
from doublehead.training.loop import NUMBERS
from training_helpers import fashion

pytest.importorskip("safetensors")
SMALL = [
    *("--data", "fashion", "--accelerator", "cpu", "--set", "epochs=1", "--set", "n_train=160"),
    *("--set", "n_calib=210", "--set", "n_test=60", "--set", "batch_size=40", "--set", "every=2"),
]


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Decoding all 17,000 takes half a second each time."""
    if "data_list" not in request.node.name:
        monkeypatch.setattr(catalog, "fashion_subset", fashion)


def refused(*arguments: str | Path) -> str:
    """The one sentence that a command says instead of working."""
    result = call(*arguments, code=2)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    return lines[0].removeprefix("Error: ")


def test_train_prints_a_table_and_keeps_the_run(tmp_path: Path) -> None:
    command = ("train", *SMALL, "--method", "double-head", "--set", "shift=brightness:2", "-o", tmp_path)
    result = call(*command)
    header, *of_network, row = result.stdout.strip().splitlines()
    assert header.split()[:3] == ["method", "accuracy", "%"]
    assert header.rstrip().endswith("AUROC % brightness:2  ECE % brightness:2")
    assert [line[:27].strip() for line in of_network] == ["Cross entropy", "Cross entropy + temperature"]
    assert row.startswith("Double head")
    assert "epoch 1/1  loss " in result.stderr
    (folder,) = tmp_path.iterdir()
    assert f"run folder: {folder}" in result.stderr
    numbers = json.loads((folder / "results.json").read_text())["outputs"]["double-head"]["before"]
    assert f"{100 * numbers['accuracy']:.2f}" in row
    assert f"{numbers['nll']:.4f}" in row

    again = call(*command, "--json")
    assert "epoch" not in again.stderr  # it was finished
    *_, shown = json.loads(again.stdout)
    assert shown["nll"] == numbers["nll"]


def shown(text: str) -> list[str]:
    """The lines with text: rich 13 ends its bar by an empty one."""
    return list(filter(None, text.splitlines()))


def test_compare_prints_one_table(tmp_path: Path) -> None:
    result = call("compare", *SMALL, "--methods", "cross-entropy, sample-temperature", "-o", tmp_path)
    titles = [line[:27].strip() for line in result.stdout.splitlines()]
    assert titles == ["method", "Cross entropy", "Cross entropy + temperature", "Sample temperature head"]
    assert shown(result.stderr) == [f"run folders: {tmp_path}"]
    result = call("compare", *SMALL, "--methods", "sample-temperature,brier", "-o", tmp_path)
    assert shown(result.stderr)[:-1] == ["run 2/2 brier"]  # the first was there; no bar is drawn here


def test_a_network_of_your_own_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for modules beside the script alone, as it does for a command that pip installed."""
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\ndef net(n_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, n_classes))\n"
    )
    path = [place for place in sys.path if place not in ("", ".")]

    def called(*words: str | Path, folder: str = ".", code: int = 0) -> Any:
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "path", path.copy())
        monkeypatch.delitem(sys.modules, "my_networks", raising=False)
        return call(*words, code=code)

    called("train", *SMALL, "--model", "my_networks:net", "--method", "double-head")
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("fashion-my_networks-net-cross_entropy-e1-s0-")
    called("export", run, "--to", "safetensors")
    elsewhere = called("export", run, "--to", "safetensors", folder="runs", code=2)
    assert "cannot import network 'my_networks:net'" in elsewhere.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "magic"], "method must be one of cross-entropy, .* got 'magic'"),
        (["--method", "focl"], "did you mean focal or adafocal?"),
        (["--set", "epoch=3"], "got 'epoch=3'; did you mean epochs?"),
        (["--set", "epochs"], "--set takes NAME=VALUE with a NAME of "),
        (["--set", "epochs=two"], "epochs must be a whole number, got 'two'"),
        (["--set", "compile=maybe"], "compile must be true or false, got 'maybe'"),
        (["--set", "milestones=0.5,x"], "milestones must be a number, got 'x'"),
        (["--set", "loss=brier"], "--set takes NAME=VALUE"),  # that is what --method is for
        (["--method", "double-head", "--set", "guards=shifts"], "guards must be empty without auto"),
        (["--method", "guarded", "--set", "guards=noise"], "--set takes NAME=VALUE"),
        (["--set", 'loss_options={"gamma":2}'], "loss_options must be among [] for cross_entropy"),
        (["--model", "nowhere:net"], "cannot import network 'nowhere:net'"),
        (["--accelerator", "warp"], "cannot train with accelerator warp"),
        (["--devices", "0"], "cannot train with accelerator cpu, devices 0"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    sentence = refused("train", *SMALL, *arguments, "-o", tmp_path)
    assert said.split(" .* ", maxsplit=1)[0] in sentence
    assert said.rsplit(" .* ", maxsplit=1)[-1] in sentence
    assert not any(tmp_path.iterdir())


def test_missing_data_and_wrong_methods(tmp_path: Path) -> None:
    for arguments in (["train"], ["compare"], ["data", "check", "cifar10"]):
        data = [] if arguments[0] == "data" else ["--data", "cifar10", "-o", tmp_path / "runs"]
        sentence = refused(*arguments, *data, "--root", tmp_path)
        assert f"cifar10 was not found in {tmp_path}: put the folder cifar-10-batches-py there" in sentence
    assert "missing" in refused("train", "--data", f"table:{tmp_path}/none.csv", "-o", tmp_path / "runs")
    sentence = refused("train", "--data", "fashio", "-o", tmp_path / "runs")
    assert "data set must be one of fashion, " in sentence
    assert "got 'fashio'; did you mean fashion?" in sentence
    assert "--set takes NAME=VALUE" in refused("compare", *SMALL, "--set", "mixup=0.3", "-o", tmp_path)
    assert "--methods must name at least one of" in refused("compare", "--methods", ",", "-o", tmp_path)
    assert "got 'magic'" in refused("compare", *SMALL, "--methods", "brier,magic", "-o", tmp_path)


def test_train_fits_the_staged_head_unless_told_otherwise(tmp_path: Path) -> None:
    result = call("train", *SMALL, "-o", tmp_path)
    assert "Staged head, second opinion" in result.stdout
    (folder,) = tmp_path.iterdir()
    made = json.loads((folder / "results.json").read_text())
    assert made["choice"]["chosen"] in made["choice"]["nlls"]
    assert len(made["auto"]["opinion"]["heads"]) == 5


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "torch.utils.tensorboard", None)
        sentence = refused("train", *SMALL, "--tensorboard", "-o", tmp_path)
    assert sentence == "--tensorboard needs the package tensorboard: pip install tensorboard"
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    call("train", *SMALL, "--method", "annealing-double-head", "--tensorboard", "-o", tmp_path)
    (folder,) = tmp_path.iterdir()
    read = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    row = json.loads((folder / "metrics.jsonl").read_text())
    (ece,) = read.Scalars("ece/annealing-double-head")
    assert ece.value == pytest.approx(row["test"]["annealing-double-head"]["ece"], rel=1e-5)
    assert read.Scalars("train_loss")[0].value == pytest.approx(row["train_loss"], rel=1e-5)


def test_help_lists_methods_and_settings() -> None:
    for command in ("train", "compare", "demo", "data", "data list", "data check"):
        assert "Usage: " in call(*command.split(), "--help").stdout
    shown = " ".join(call("train", "--help").stdout.replace("│", " ").split())
    listed = "annealing-double-head guarded mmce-published calib_batch_size=128 evaluate_every=1"
    for name in listed.split():
        assert name in shown
    assert "loss_options" not in call("compare", "--help").stdout
    assert "guards=" not in call("compare", "--help").stdout


def test_data_list_and_check() -> None:
    listed = call("data", "list").stdout
    for one in RECIPES.values():
        assert one.data in listed
    assert "45,000" in listed
    result = call("data", "check", "fashion")
    assert "fashion is fine: 8,500 / 2,500 / 6,000 for train / calib / test" in result.stdout


def test_data_that_cannot_be_had(tmp_path: Path) -> None:
    sentence = refused("data", "get", "imagenet", "--root", tmp_path)
    assert f"to {tmp_path / 'imagenet'} without an account: put the folders train and val there" in sentence
    assert "data set must be one of fashion, " in refused("data", "check", "mnist")


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "fashion_subset", fashion)
    result = call("demo", "--epochs", "1", "-o", tmp_path)
    titles = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert titles == ["method", "network", "temperature scaling", "paper's head", "doublehead"]
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert len([*tmp_path.glob("*/results.json")]) == 1
    again = call("demo", "--epochs", "1", "-o", tmp_path, "--json")
    assert len(json.loads(again.stdout)) == 4
    assert "epochs must be at least 1" in call("demo", "--epochs", "0", "-o", tmp_path, code=2).stderr


def test_recipes_by_the_kind_of_data() -> None:
    assert recipe("cifar100") == RECIPES["cifar100"]
    assert recipe("svhn-paper").data == "svhn"
    assert recipe("table:x.csv") == Config.from_json(TEXT.to_json().replace("20newsgroups", "table:x.csv"))
    assert recipe("folder:x").lr == IMAGENET.lr
    assert not recipe("folder:x").predict_train
    assert recipe("arrays:x", "resnet18").model == "resnet18"


def test_settings_are_read_as_what_they_are() -> None:
    asked = METHODS["mixup"]
    given = {
        "lr=1": 1.0, "n_train=None": None, "n_test=7": 7, "milestones=0.3,0.6": (0.3, 0.6), "mixup=0.4": 0.4,
        "shift=svhn,fog:2": ("svhn", "fog:2"), "compile=True": True, "deterministic=true": True,
    }  # fmt: skip
    config = change(asked.apply(Config()), list(given), asked)
    for setting, want in given.items():
        assert getattr(config, setting.partition("=")[0]) == want
    assert change(Config(), ["calib_clip=inf", "augment=none"]).calib_clip == float("inf")
    focal = METHODS["focal"]
    assert change(focal.apply(Config()), ['loss_options={"gamma":1}'], focal).loss_options == {"gamma": 1.0}


def test_many_shifts_become_means(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = {"method": "Main", **dict.fromkeys(NUMBERS, 0.25)}
    for level, value in ((1, 0.5), (2, 0.6), (3, 1.0)):
        row |= {f"auroc fog:{level}": value, f"ece fog:{level}": value / 2}
    row["auroc ood:svhn"] = 0.9
    assert [*_shift_columns(row)] == ["AUROC % mean of 4 shifts", "ECE % mean of 3 shifts"]
    show_rows([row], as_json=False)
    assert "75.00" in capsys.readouterr().out.splitlines()[1]  # (0.5 + 0.6 + 1.0 + 0.9) / 4


def test_only_the_first_process_speaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert is_first_process()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_first_process()
    assert call("train", *SMALL, "--method", "magic", "-o", tmp_path, code=2).output == ""


def test_our_warnings_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    place = "src/doublehead/training/run_folder.py"
    with warnings.catch_warnings(), told_to_user():
        warnings.simplefilter("always")
        warnings.warn_explicit("checkpoint.pt cannot be read", UserWarning, place, 7)
    assert capsys.readouterr().err == "Warning: checkpoint.pt cannot be read\n"
