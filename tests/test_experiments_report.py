"""What the report says of brief trials, of what is missing, of what auto chose and of the search for the guard."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from doublehead import Annealing, DoubleHead, HeadBank, ShiftGuard, shift_guard

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
pytest.importorskip("matplotlib")

import auto_choice  # noqa: E402
import committed  # noqa: E402
import disagreements  # noqa: E402
import findings  # noqa: E402
import guard_search  # noqa: E402
import make  # noqa: E402
import other_networks  # noqa: E402
import report  # noqa: E402
import tables  # noqa: E402

from test_experiments import made_up, output_of  # noqa: E402

RESNET = "cifar10-resnet50-cross_entropy-e30-s0"

# Other networks, and what is missing -------------------------------------------------------------------------------


def test_brief_trials_are_shown_as_no_results(tmp_path: Path) -> None:
    made_up(tmp_path / "brief", auto=output_of(0.02))
    run = made_up(tmp_path / "brief", seed=1)
    run.results["outputs"]["main"]["before"]["accuracy"] = 0.1006
    run.results["config"]["model"] = "resnet152"
    committed.write_small(run.results, run.path / "results.json")
    runs = other_networks.read_brief(tmp_path / "brief")
    table = other_networks.networks_table(runs)
    assert [line[:3] for line in table.lines] == [
        ["CIFAR-10, ResNet-50", "30", "90.0"],
        ["CIFAR-10, ResNet-152", "30", "10.1"],
    ]
    assert table.lines[0][3:6] == ["not run", "not run", "90.0"]
    assert "Not results." in table.notes[0]
    assert "So CIFAR-10, ResNet-152 had learned nothing yet" in table.notes[1]
    assert "So " not in other_networks.networks_table(runs[:1]).notes[1]
    rows = committed.rows_of(runs[:1])  # as if one of them were a result
    assert other_networks.only_brief(rows, runs) == [("cifar10", "resnet152")]
    assert any("no result, of CIFAR-10, ResNet-152." in line for line in report.gaps(rows, runs))
    assert other_networks.read_brief(tmp_path / "nothing") == []


def test_missing_seeds_and_guards_are_named(tmp_path: Path) -> None:
    guards = {f"guarded@shifts-{part}": output_of(0.02) for part in (1, 2, 3)}
    for seed in (0, 2):
        made_up(tmp_path, seed=seed, shifted=("main", "main+T"), **(guards if seed else {}))
    made_up(tmp_path, "brier")
    lines = report.gaps(committed.rows_of(committed.read_runs(tmp_path)))
    seeds = "CIFAR-10, ResNet-50, of 3 seeds, missing: "
    assert f"{seeds}1 for cross-entropy; 2 for brier. One seed has no spread." in lines
    assert "CIFAR-10, ResNet-50: guards on seed 0." in lines
    assert "CIFAR-10, ResNet-50: guards with a whole kind of corruption unseen." in lines
    assert any(line.startswith("SVHN's rows for want of its training set") for line in lines)
    assert any(line.startswith("ECE against the calibration period k") for line in lines)


def test_what_is_committed_names_all_that_was_planned() -> None:
    """By the names of folders: a method without any is a gap, and none with one is."""
    names = {
        "mmce": "MMCE", "brier": "Brier", "focal": "Focal", "mmce_published": "MMCE as published", "flsd53": "FLSD-53",
        "adafocal": "AdaFocal",
        "label_smoothing": "Label smoothing", "last_layer": "Last-layer retraining (TST)",
        "ensemble-4": "Deep ensemble of 4",
    }  # fmt: skip
    lines = report.gaps(committed.rows_of(committed.read_runs()), other_networks.read_brief())
    for which, title in {
        "cifar10-resnet50": "CIFAR-10, ResNet-50", "cifar100-resnet50": "CIFAR-100, ResNet-50",
        "sst-fine-tree_lstm": "SST fine, TreeLSTM", "sst-binary-gp_cnn": "SST binary, GP CNN",
        "20newsgroups-bydate-gp_cnn": "20 Newsgroups by date, GP CNN",
    }.items():  # fmt: skip
        found = [
            line.removeprefix(f"{title}: ").rstrip(".") for line in lines if line.startswith(f"{title}: ")
        ]
        gaps = [one for line in found if "guards" not in line for one in line.split(", ") if one != "Mixup"]
        assert gaps == [
            one for loss, one in names.items() if not list(committed.RESULTS.glob(f"{which}-{loss}-e*-s*"))
        ]
    assert any("SVHN's rows" in line for line in lines)


# What auto chose ---------------------------------------------------------------------------------------------------

CHOICES = {
    "the scalar temperature": None,
    "the paper's head, beta0 1.2": {"kind": "mlp", "reads": "features", "beta0": 1.2},
    "reads features and logits, beta0 1": {"kind": "temperature", "reads": ["features", "logits"], "beta0": 1.0},
}  # fmt: skip


def chosen(tmp_path: Path, accuracies: tuple[float, float, float]) -> Any:
    """Three seeds with each of the choices; temperature scaling has ECE 1 %, NLL 0.3; auto 0.5, 2 and 0.9 %.

    The first one ends with a curve, the second without, the third was made before there was one.
    """
    for seed, (spec, ece) in enumerate(zip(CHOICES.values(), (0.005, 0.02, 0.009))):
        run = made_up(tmp_path, seed=seed, auto=output_of(ece, after=0.5, accuracy=accuracies[seed]))
        run.results["selection"] = {"spec": spec, **({"bends": seed == 0} if seed < 2 else {})}
        run.results["outputs"]["auto"]["before"] |= {"nll": 0.29 + ece, "brier": 0.12 + seed / 100}
        committed.write_small(run.results, run.path / "results.json")
    return committed.rows_of(committed.read_runs(tmp_path))


def test_candidates_are_measured_against_the_temperature(tmp_path: Path) -> None:
    n = len(auto_choice.CANDIDATES)
    for seed, shift in enumerate((-0.01, 0.03)):
        run = made_up(tmp_path, seed=seed, auto=output_of(0.01))
        scores = [0.3 + shift + number / 1000 for number in range(n)]
        run.results["selection"] = {"spec": None, "scores": scores, "temperature_score": 0.3}
        committed.write_small(run.results, run.path / "results.json")
    table = auto_choice.candidates_table(committed.rows_of(committed.read_runs(tmp_path)))
    assert table.head[1:4] == ["CIFAR-10, mean of 2", "CIFAR-100, mean of 0", "texts, mean of 0"]
    assert table.lines[0] == ["reads features, beta0 1", "+0.0100", "", "", "+0.0300", "1 of 2"]
    assert table.lines[4] == ["**reads statistics, beta0 1**", "+0.0140", "", "", "+0.0340", "1 of 2"]
    assert table.lines[-1] == ["the paper's head, beta0 1.2", "+0.0230", "", "", "+0.0430", "0 of 2"]
    assert auto_choice.candidates_table({}).lines == []


def test_the_head_by_default_is_the_one_that_the_candidates_recommend() -> None:
    spec = auto_choice.DEFAULT
    assert spec in auto_choice.CANDIDATES
    head = DoubleHead(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 12))).head
    assert (head.kind, head.reads, head.hidden) == (spec.kind, spec.reads, spec.hidden)
    assert head.annealing == Annealing(spec.beta0)
    assert head.lr == pytest.approx(spec.lr * HeadBank.lr)
    rows = committed.rows_of(committed.read_runs())
    behind = [run for names in auto_choice.KINDS.values() for run in auto_choice._behind(rows, names)]
    assert all(len(run) == len(auto_choice.CANDIDATES) for run in behind)
    worst = [max(run[number] for run in behind) for number in range(len(auto_choice.CANDIDATES))]
    by_worst = sorted(range(len(worst)), key=worst.__getitem__)
    assert all(auto_choice.CANDIDATES[number].reads == ("statistics",) for number in by_worst[:4])
    assert auto_choice.CANDIDATES[by_worst[0]] == spec
    for run in (run for row in rows for run in rows[row].get("cross-entropy", [])):
        selection = run.results.get("selection")
        if selection and selection["index"] is not None:  # the scores are those of the present candidates
            assert (
                json.loads(json.dumps(asdict(auto_choice.CANDIDATES[selection["index"]])))
                == selection["spec"]
            )


def test_what_auto_chose_is_shown_run_by_run(tmp_path: Path) -> None:
    rows = chosen(tmp_path, (0.9, 0.912, 0.9))
    lines = auto_choice.auto_table(rows).lines
    assert [line[1] for line in lines] == list(CHOICES)
    assert [line[2] for line in lines] == [
        "a temperature and a curve",
        "a temperature",
        "a temperature (made before curves)",
    ]
    assert tables.auto_note(rows).endswith("with a temperature alone: CIFAR-10, ResNet-50.")
    few = committed.having(rows[next(iter(rows))]["cross-entropy"], "auto")[2]
    few.results["sizes"][1] = 900  # too few for a curve anyway
    assert auto_choice.last_of(few) == "a temperature"
    assert tables.auto_note(rows) == tables.AUTO_NOTE
    assert lines[1] == ["CIFAR-10, ResNet-50, seed 1", "the paper's head, beta0 1.2", "a temperature", "90.00", "91.20",
                        "1.00 (0.40 to 0.90)", "2.00 (0.40 to 0.90)", "0.3000", "0.3100", "0.1400",
                        "0.1300"]  # fmt: skip
    line = next(line for line in tables.table1(rows).lines if line[1] == "Auto head (ours)")
    assert line[4:7] == ["1.13 ± 0.78 (0.40 to 0.90)", "", ""]  # it is not scaled again
    assert auto_choice.auto_table({}).lines == []


def test_auto_is_counted_against_temperature_scaling(tmp_path: Path) -> None:
    text = findings.auto(chosen(tmp_path, (0.9, 0.912, 0.9)))
    assert (
        "its NLL is lower in 2 of 3 runs and higher in 1 (auto minus temperature: -0.0050 .. 0.0100), its ECE lower "
        "in 2 of 3 and higher in 1. An ECE not above a perfect model's band: auto 2 of 3 runs, temperature scaling 0 "
        "of 3. It chose the scalar temperature "
        "in 1 of 3 runs, the paper's head in 1 of 3, and ended with a curve in 1 of 3. In 1 of 3 runs "
        "its accuracy is not the network's: +1.20 points."
    ) in text
    text = findings.auto(chosen(tmp_path, (0.899, 0.912, 0.9)))
    assert text.endswith("In 2 of 3 runs its accuracy is not the network's: -0.10 to +1.20 points.")
    assert findings.auto(chosen(tmp_path, (0.9, 0.9, 0.9))).endswith("a curve in 1 of 3.")
    assert findings.auto({}) == "**The auto head:** not run."


def test_an_output_after_temperature_scaling_has_a_name_of_its_own(tmp_path: Path) -> None:
    run = made_up(tmp_path, shifted=("main", "main+T"))
    assert (run.number("main", "ece"), run.number("main+T", "ece")) == (0.03, 0.01)
    assert run.number("main+T", "ece", "after") == 0.01
    assert run.number("main+T", "temperature", "") == 1.5
    assert run.number("nothing+T", "ece") is None
    assert run.shifted("contrast:1", "main+T", "ece") == pytest.approx(0.2)


# The search --------------------------------------------------------------------------------------------------------


def setting(network: str, nll: float, family: float, kind: float | None, **more: Any) -> dict[str, Any]:
    return {"network": network, "reads": "distances", "form": "guard", "keep": 0.9, "clean_ece": 0.02, "clean_nll": nll,
            "family_ece": family, "kind_ece": kind, "n_images": 1000, **more}  # fmt: skip


def test_the_search_is_shown_where_its_file_is_there(tmp_path: Path) -> None:
    assert guard_search.read_search(tmp_path) == []
    tried = [
        setting("large", 0.1, 0.01, 0.01),  # another network
        setting("small", 0.25, 0.12, 0.13, note="10 epochs"),  # higher in all
        setting("small", 0.24, 0.08, 0.09, chosen=True),
        setting("small", 0.30, 0.05, 0.10),  # lower on families
        setting("small", 0.23, 0.07, 0.08),  # lower in all
        setting("small", 0.1, 0.01, None, keep=None),  # not tried on whole kinds
    ]
    (tmp_path / guard_search.NAME).write_text(json.dumps(tried))
    table = guard_search.search_table(guard_search.read_search(tmp_path))
    assert table.lines[1] == [
        "small", "distances", "guard", "0.9", "2.00", "0.2500", "12.00", "13.00", "1,000", "10 epochs"
    ]  # fmt: skip
    assert table.lines[2][:4] == ["**small**", "**distances**", "**guard**", "**0.9**"]
    assert table.lines[5][3:8] == ["", "2.00", "0.1000", "1.00", ""]
    text = guard_search.search_text(tried)
    assert text == (
        "On small the setting in use has a mean ECE of 8.00 on families left out, 9.00 on whole kinds left out, and a "
        "clean NLL of 0.2400. Of the 3 other trials there 2 are lower on families, 1 on whole kinds and 1 in clean "
        "NLL; 1 in all three."
    )
    both = guard_search.search_text([*tried, setting("large", 0.2, 0.03, 0.04, chosen=True)])
    assert both.startswith(
        f"{text} On large the setting in use has a mean ECE of 3.00 on families left out, 4.00"
    )
    assert both.endswith("Of the 1 other trials there 1 are lower on families, 1 on whole kinds and 1 in clean NLL; "
                         "1 in all three.")  # fmt: skip
    assert "not among those" in guard_search.search_text(tried[:1])
    shutil.copytree(committed.RESULTS / RESNET, tmp_path / RESNET)
    rows = committed.rows_of(committed.read_runs(tmp_path))
    made = make.all_tables(rows, tmp_path)
    report = make.page(rows, committed.read_runs(tmp_path), made, [], tmp_path)
    assert f"{text} [All that was tried](guard-search.md)." in report
    assert "guard-search" not in make.all_tables(rows, tmp_path / "nothing")


def test_a_search_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / guard_search.NAME).write_text(json.dumps([{"reads": "stages"}]))
    with pytest.raises(ValueError, match=r"guard-search.json must hold network, reads.*got reads in entry 0"):
        guard_search.read_search(tmp_path)


def test_the_committed_search_has_its_chosen_line_and_no_percents() -> None:
    tried = guard_search.read_search()
    in_use = {one["network"]: one for one in tried if one.get("chosen")}
    assert next(iter(in_use)) == "CIFAR-10, ResNet of 20 layers"  # where it was chosen
    assert len(in_use) == sum(bool(one.get("chosen")) for one in tried)
    assert len({tuple(one[key] for key in ("reads", "form", "keep")) for one in in_use.values()}) == 1
    for network, chosen in in_use.items():
        (scalar,) = (
            one for one in tried if (one["network"], one["form"]) == (network, "temperature scaling")
        )
        assert chosen["kind_ece"] < 0.6 * scalar["kind_ece"]
    assert all(0.005 < one["clean_ece"] < 0.07 and 0.04 < one["family_ece"] < 0.18 for one in tried)
    report = " ".join((make.OUTPUT / "index.md").read_text().split())
    assert "That a last temperature is needed was learned from test numbers of earlier runs" in report


def test_what_the_report_says_of_the_guard_is_what_the_code_does() -> None:
    chosen, *_ = (one for one in guard_search.read_search() if one.get("chosen"))
    keep = inspect.signature(ShiftGuard.fit).parameters["keep"].default
    assert keep == chosen["keep"] == 0.9  # "nine tenths" in report.md and in notes
    assert inspect.signature(ShiftGuard).parameters["n_layers"].default == shift_guard.N_LAYERS == 9
    assert "at nine normalisation layers" in report.TEMPLATE.read_text()
    assert f"({shift_guard.MARGIN} times)" in report.TEMPLATE.read_text()


def test_networks_that_learned_nothing_are_named(tmp_path: Path) -> None:
    """Ten classes: 10.9 % of the training data right is guessing, 11.1 % is not."""
    runs = [made_up(tmp_path, "mmce", seed) for seed in (0, 1, 2)]
    for run, right in zip(runs, (0.109, 0.111, None)):
        run.results["train_accuracy"] = right
    row = committed.Row("cifar10", "resnet50", 30)
    text = disagreements.at_chance(row, {"mmce": runs}, "CIFAR-10")
    assert text.startswith(
        "**Never left chance, CIFAR-10:** MMCE on seed 0, with 11 % of the training data right"
    )
    assert disagreements.at_chance(row, {"mmce": runs[1:]}, "CIFAR-10") == ""
