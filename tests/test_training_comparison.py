"""The table of several methods: its rows, its runs, and what is not trained again."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from doublehead import HeadSpec, Predictions, metrics
from doublehead.calibrators import Temperature
from doublehead.training import loop
from doublehead.training.loop import NUMBERS, compare
from training_helpers import fashion, small

pytest.importorskip("safetensors")
BASE = {"epochs": 1, "n_train": 120, "n_calib": 210, "n_test": 60, "shift": ("brightness:1",)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    names = ["brier", "double-head", "cross-entropy", "auto", "guarded", "brier"]
    return folder, compare(small(**BASE), names, folder, fashion(), accelerator="cpu")


def test_rows_in_the_order_asked_for(made: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = made
    titles = "Brier", "Brier + temperature", "Double head", "Cross entropy", "Cross entropy + temperature"
    assert [row["method"] for row in rows[:-1]] == [*titles, "Staged head, second opinion"]
    assert rows[-1]["method"] == "Staged head, shift guard"
    assert rows[-1]["accuracy"] == rows[-2]["accuracy"]
    assert len([*folder.iterdir()]) == 2  # two losses, two runs
    wanted = {"method", *NUMBERS, "auroc brightness:1", "ece brightness:1", "predictions"}
    for row in rows:
        assert set(row) - {"temperature"} == wanted
        assert ("temperature" in row) == row["method"].endswith("+ temperature")


def test_numbers_are_those_of_the_saved_predictions(made: tuple[Path, list[dict[str, Any]]]) -> None:
    by_name = {row["method"]: row for row in made[1]}
    for name in ("Brier", "Double head", "Staged head, second opinion", "Staged head, shift guard"):
        row = by_name[name]
        p = Predictions.load(row["predictions"])
        assert row["accuracy"] == pytest.approx(float(metrics.accuracy(p)), rel=1e-5)
        assert row["ece"] == pytest.approx(float(metrics.ece(p, 15)), abs=1e-3)  # files are float16
        assert row["nll"] == pytest.approx(float(metrics.nll(p)), rel=1e-3)
    row = by_name["Cross entropy + temperature"]
    test = Predictions.load(row["predictions"])
    calib = Predictions.load(row["predictions"].replace("test-main", "calib-main"))
    fitted = Temperature().fit(calib)
    assert row["temperature"] == pytest.approx(float(fitted.temperature_), rel=1e-3)
    assert row["nll"] == pytest.approx(float(metrics.nll(fitted.calibrate(test))), rel=1e-3)


def test_what_is_there_is_found(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rows = made
    monkeypatch.setattr(loop, "make_fabric", lambda *_, **__: pytest.fail("trained again"))
    again = compare(small(**BASE), ["auto", "brier"], folder, fashion())
    assert again == [rows[5], rows[0], rows[1]]  # one head of the run that has two answers


def test_other_methods_into_the_same_folder(made: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    kept, rows = made
    folder = Path(shutil.copytree(kept, tmp_path / "runs"))
    (folder / "fashion-tiny_networks-mlp-cross_entropy-e1-s0-000000").mkdir()  # not a run
    told, names = [], ["cross-entropy", "sample-temperature"]
    how = {"accelerator": "cpu", "started": lambda config, *rest: told.append(rest)}
    more = compare(small(**BASE), names, folder, fashion(), **how)
    assert told == [(names, 0, 1)]
    titles = ["Cross entropy", "Cross entropy + temperature", "Sample temperature head"]
    assert [row["method"] for row in more] == titles
    same = {key: value for key, value in more[0].items() if key != "predictions"}
    assert same == {key: value for key, value in rows[3].items() if key != "predictions"}  # the same network
    places = ((more[0], folder), (rows[3], kept))
    runs = [Path(row["predictions"]).relative_to(at).parts[0] for row, at in places]
    assert runs[0] != runs[1]


def test_a_run_with_more_guards_contains_one_with_fewer_but_no_settings_of_its_own_head() -> None:
    plain, one = small(), small(auto=True, guards=("shifts",))
    several = small(auto=True, guards=("noise", "shifts"))
    assert loop._contains(several, one)
    assert loop._contains(several, plain)
    assert not loop._contains(one, several)
    assert not loop._contains(small(auto=True), one)
    assert not loop._contains(small(auto=True, views=("flip",)), plain)
    assert not loop._contains(small(heads={"a": HeadSpec()}, every_of={"a": 5}), plain)


def test_each_head_of_a_sweep_has_a_row() -> None:
    numbers = dict.fromkeys(NUMBERS, 0.1)
    heads = [*(f"mlp-{b}" for b in ("0.1", "0.6", "0.8", "1", "1.1", "1.2", "1.35", "1.5", "2", "3"))]
    heads += [name.replace("mlp", "temperature") for name in heads]
    results = {"outputs": {name: {"before": numbers} for name in heads}, "shift": {}}
    rows = loop.method_rows("sweep", results, Path("run"))
    assert [row["method"] for row in rows] == heads
    assert rows[3]["predictions"] == "run/predictions/test-mlp-1.npz"
