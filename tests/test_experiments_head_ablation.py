"""The ablation of the choices behind fit_head."""

from __future__ import annotations

import doctest
import json
import sys
from pathlib import Path

import pytest
import torch

from doublehead import Predictions, Readings, fit_head_on, last_map, metrics
from doublehead.calibrators import Temperature
from doublehead.integrations import fit_head as fitting

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
pytest.importorskip("matplotlib")

import committed
import constants
import head_ablation
import post_hoc
from head_ablation import CURVE, NO_CURVE, VARIANTS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short passes."""
    monkeypatch.setattr(fitting, "PASSES", 3)
    monkeypatch.setattr(fitting, "STEPS", 4)


def known(n: int, seed: int) -> Predictions:
    """Logits whose size says nothing of half of the samples: a temperature for each sample is worth something."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 4, generator=draw)
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    factor = 1 + 3 * (torch.rand(n, 1, generator=draw) > 0.5)
    return Predictions(factor * logits, labels)


@pytest.mark.slow
def test_each_variant_is_fit_head_with_one_thing_changed() -> None:
    calib = known(200, 0)
    found = {line["variant"]: line["behind"] for line in head_ablation.measure(calib)}
    assert list(found) == [*VARIANTS, CURVE, NO_CURVE]
    readings = Readings(torch.empty(200, 0), calib.logits, calib.labels)
    for name in ("as it is", "linear heads alone", "reads the logits"):
        choice = fit_head_on(readings, candidates=VARIANTS[name].candidates).choice
        assert found[name] == choice.nll - choice.nll_of_temperature
    choice = fit_head_on(readings).choice
    assert found["the best head even within a standard error"] == min(choice.nlls) - choice.nll_of_temperature
    scalar = metrics.nll(post_hoc.cross_fitted(Temperature(), calib))
    head = metrics.nll(post_hoc.cross_fitted(head_ablation.HeadCalibrator(), calib))
    assert found[CURVE] == pytest.approx(float(head - scalar), abs=1e-7)
    assert found[NO_CURVE] == found[CURVE]  # 160 samples are too few for one
    assert len(set(found.values())) > 6


def test_variants_are_what_their_names_say() -> None:
    def all_of(name: str, field: str) -> set[object]:
        return {getattr(spec, field) for spec in VARIANTS[name].candidates}

    assert VARIANTS["as it is"].candidates == fitting.CANDIDATES
    assert all_of("linear heads alone", "hidden") == {0}
    assert all_of("16 hidden units alone", "hidden") == {16}
    assert all_of("64 hidden units alone", "hidden") == {64}
    assert all_of("no annealing (beta0 1 alone)", "beta0") == {1.0}
    assert all_of("the paper's beta0 (1.2 alone)", "beta0") == {1.2}
    assert all_of("reads statistics and logits", "reads") == {("statistics", "logits")}
    assert all_of("three times the learning rate", "lr") == {3.0}


def test_without_an_early_stop_all_passes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "PASSES", 8)
    monkeypatch.setattr(fitting, "STEPS", 20)
    calib = known(60, 1)  # soon learned by heart
    readings = Readings(torch.empty(60, 0), calib.logits, calib.labels)
    before = fitting.LEAST
    with head_ablation.constants(fitting, VARIANTS["no early stop: 20 passes"].constants):
        choice = fit_head_on(readings).choice
    assert before == fitting.LEAST
    assert choice.passes == (fitting.PASSES if choice.spec else 0)
    usual = fit_head_on(readings).choice
    assert all(late >= early - 1e-3 for late, early in zip(choice.nlls, usual.nlls))
    assert choice.nlls != usual.nlls
    with pytest.raises(KeyError), head_ablation.constants(last_map, {"ENOUGH": 3}):
        raise KeyError
    assert last_map.ENOUGH == 1_000


def test_the_table_is_made_of_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert head_ablation.ablation_table(tmp_path) is None
    (tmp_path / "run/predictions").mkdir(parents=True)
    for part in ("calib", "test"):
        known(80, 3).save(tmp_path / f"run/predictions/{part}-main.npz")
    monkeypatch.setattr(sys, "argv", ["head_ablation.py", "SST fine, TreeLSTM", str(tmp_path / "run"),
                                      "--results", str(tmp_path)])  # fmt: skip
    head_ablation.main()
    assert capsys.readouterr().out.startswith("as it is")
    networks = json.loads((tmp_path / head_ablation.NAME).read_text())
    made = networks["SST fine, TreeLSTM"]
    assert (made["sources"], made["calib"], len(made["numbers"])) == (["run"], 80, len(VARIANTS) + 2)
    names = (*VARIANTS, CURVE, NO_CURVE)
    for network, values in (
        ("CIFAR-10, A", (-0.01, -0.03)),
        ("CIFAR-10, B", (0.01,)),
        ("SST fine, C", (0.0,)),
    ):
        numbers = [{"variant": name, "behind": value} for value in values for name in names]
        networks[network] = {**made, "numbers": numbers}
    del networks["SST fine, TreeLSTM"]
    (tmp_path / head_ablation.NAME).write_text(json.dumps(networks))
    table = head_ablation.ablation_table(tmp_path)
    assert table is not None
    assert table.head == ["variant", "CIFAR-10: 2", "texts: 1", "worst network", "below"]
    assert table.lines[0] == ["as it is", "-0.0050", "+0.0000", "+0.0100", "1 of 3"]
    assert doctest.testmod(head_ablation).failed == doctest.testmod(constants).failed == 0
    for line in networks["SST fine, C"]["numbers"]:
        line["behind"] = {"no early stop: 20 passes": 0.002, CURVE: 0.001, NO_CURVE: 0.004}.get(
            line["variant"], 0.0
        )
    (tmp_path / head_ablation.NAME).write_text(json.dumps(networks))
    text = head_ablation.ablation_text(tmp_path)
    assert (
        "no early stop +0.0000 (CIFAR-10), +0.0020 (texts); no curve +0.0000 (CIFAR-10), +0.0030 (texts);"
        in text
    )
    assert head_ablation.ablation_text(tmp_path / "nothing") == ""


def test_what_is_in_use_holds_its_own_on_the_committed_networks() -> None:
    networks = head_ablation.read_ablation(committed.RESULTS)
    assert set(networks) <= set(post_hoc.read_networks())
    for name, one in networks.items():
        assert one["sources"] == post_hoc.read_networks()[name]["sources"]
        assert "dirty" not in one["environment"]["commit"]
    assert all(head_ablation.mean_of(one, "as it is") <= 0 for one in networks.values())  # by construction
