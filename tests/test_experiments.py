"""The experiments: the paper's numbers as copied, results as read, tables as printed, committed pages up to date."""

from __future__ import annotations

import doctest
import json
import math
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import Predictions, Summary, metrics
from doublehead.training.config import RECIPES
from doublehead.training.evaluation import binned
from doublehead.training.methods import PAPER
from doublehead.training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
pytest.importorskip("matplotlib")

import committed  # noqa: E402
import disagreements  # noqa: E402
import ensemble  # noqa: E402
import figures  # noqa: E402
import findings  # noqa: E402
import headline  # noqa: E402
import last_layer  # noqa: E402
import make  # noqa: E402
import other_networks  # noqa: E402
import pages  # noqa: E402
import paper  # noqa: E402
import record_bins  # noqa: E402
import report  # noqa: E402
import rows as recipes  # noqa: E402
import run as run_script  # noqa: E402
import seen  # noqa: E402
import shift  # noqa: E402
import tables  # noqa: E402

# Made-up results -------------------------------------------------------------------------------------------------


def numbers_of(
    ece: float, low: float = 0.004, high: float = 0.009, accuracy: float = 0.9
) -> dict[str, float]:
    return {"accuracy": accuracy, "ece": ece, "ece_floor": 0.006, "ece_floor_low": low, "ece_floor_high": high,
            "ece_all": 2 * ece, "nll": 0.3, "brier": 0.14, "mean_entropy": 0.2}  # fmt: skip


def output_of(ece: float, after: float = 0.01, **options: float) -> dict[str, Any]:
    return {"before": numbers_of(ece, **options), "after": numbers_of(after, **options), "temperature": 1.5,
            "after_grid": numbers_of(0.012, **options), "grid_temperature": 1.6}  # fmt: skip


def made_up(tmp_path: Path, loss: str = "cross_entropy", seed: int = 0, **outputs: Any) -> committed.Run:
    config = {"data": "cifar10", "model": "resnet50", "loss": loss, "loss_options": {}, "mixup": 0.0,
              "epochs": 30, "seed": seed}  # fmt: skip
    shifted = {
        name: {output: {"ece": 0.1 * (i + 1), "accuracy": 0.5, "auroc": 0.7} for i, output in enumerate(
            (*outputs.get("shifted", ()), ))}
        for name in shift.sets_of(shift.FAMILIES)
    }  # fmt: skip
    outputs.pop("shifted", None)
    results = {
        "config": config,
        "environment": {
            "device": "a CPU",
            "commit": "abcdef123",
            "torch": "2",
            "time": "2026-01-01T00:00:00Z",
        },
        "outputs": {
            "main": output_of(0.03),
            **{name.replace("_", "-"): one for name, one in outputs.items()},
        },
        "shift": shifted if shifted["contrast:1"] else {},
        "selection": None,
        "train_seconds": 60.0,
        "sizes": [45_000, 5_000, 10_000],
    }
    folder = tmp_path / f"cifar10-{loss}-s{seed}"
    committed.write_small(results, folder / "results.json")
    return committed.Run.read(folder)


def test_seeds_are_gathered_into_mean_and_spread(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, seed=2, auto=output_of(0.02)), made_up(tmp_path, seed=1)]
    runs.append(made_up(tmp_path, "brier"))
    rows = committed.rows_of(committed.read_runs(tmp_path))
    (row,) = rows
    assert row == ("cifar10", "resnet50", 30)
    assert [run.seed for run in rows[row]["cross-entropy"]] == [1, 2]
    assert committed.numbers(rows[row]["cross-entropy"], "main", "ece") == (0.03, 0.0, 2)
    assert committed.numbers(rows[row]["cross-entropy"], "auto", "ece").n == 1  # one seed has it
    assert committed.numbers(rows[row]["cross-entropy"], "nothing", "ece") is None
    assert math.isnan(committed.spread([0.5]).sd)
    assert rows[row]["brier"][0].method == "brier"


def test_an_ece_is_shown_with_its_band_and_bold_only_where_it_is_not_above_it(tmp_path: Path) -> None:
    run = made_up(tmp_path, auto=output_of(0.0085), other=output_of(0.0095))
    assert tables.ece_cell([run], "auto") == "**0.85** (0.40 to 0.90)"
    assert tables.ece_cell([run], "other") == "0.95 (0.40 to 0.90)"
    assert tables.ece_cell([run], "missing") == "not run"
    second = made_up(tmp_path, seed=1, auto=output_of(0.0105))
    assert tables.ece_cell([run, second], "auto") == "0.95 ± 0.14 (0.40 to 0.90)"


def test_table_1_puts_the_papers_numbers_beside_ours_and_states_gaps(tmp_path: Path) -> None:
    made_up(tmp_path, annealing_double_head=output_of(0.005))
    table = tables.table1(committed.rows_of(committed.read_runs(tmp_path)))
    lines = {line[1]: line for line in table.lines}
    assert lines["Cross entropy"][2:] == [
        "30; 1", "90.00", "3.00 (0.40 to 0.90)", "1.00 (0.40 to 0.90)", "1.50", "1.20 (1.60)", "*4.28*", "*2.17 (1.8)*",
    ]  # fmt: skip
    assert lines["MMCE"][2:] == ["not run"] * 4 + ["", "", "*3.18*", "*2.08 (1.4)*"]
    assert lines["Annealing double head, beta0 1.2"][4:6] == [
        "**0.50** (0.40 to 0.90)",
        "",
    ]  # a head is not scaled again
    assert lines["Double head, no annealing"][4] == "not run"
    assert "Auto head (ours)" not in lines
    assert "| CIFAR-100, ResNet-50 | *10.48, 6.32 (1.2)* |" in table.page()
    record = table.records[0]
    assert (record["ece_before"], record["paper_before"], record["seeds"]) == ("0.03", 4.28, 1)
    assert table.csv().splitlines()[0].startswith("data,model,method,epochs,seeds,accuracy_before,ece_before")


def test_table_3_reads_heads_by_their_period(tmp_path: Path) -> None:
    outputs = {"annealing_double_head": output_of(0.01), "annealing_double_head_k20": output_of(0.02)}
    made_up(tmp_path, **outputs)
    speed = tmp_path / "speed.json"
    speed.write_text(json.dumps({"head_adds_percent": {"ours, head every 10": 5.0}}))
    table = tables.table3(committed.rows_of(committed.read_runs(tmp_path)), speed)
    assert table.lines[0] == ["10", "5.00", "1.00 (0.40 to 0.90)", "not run", "*8.86*", "*0.97*"]
    assert table.lines[1][:3] == ["20", "not run", "2.00 (0.40 to 0.90)"]
    assert [line[2] for line in table.lines[2:]] == ["not run"] * 4


def test_shift_is_averaged_over_families_and_severities(tmp_path: Path) -> None:
    head = "both@noise+broad-1"
    run = made_up(tmp_path, **{head: output_of(0.02)}, shifted=("main", "main+T", head))
    assert committed.mean_shift([run], "main+T", shift.sets_of(shift.FAMILIES)).mean == pytest.approx(0.2)
    assert committed.mean_shift([run], "nothing", shift.sets_of(shift.FAMILIES)) is None
    run.results["shift"]["gaussian_noise:1"][head]["ece"] = 1.3  # one of 65 sets, 1.0 more
    assert committed.mean_shift([run], head, shift.sets_of(shift.FAMILIES)).mean == pytest.approx(
        0.3 + 1 / 65
    )
    found = shift.shift_summary([run])  # without the family that perturbed heads saw
    assert found["heads"] == [pytest.approx(0.3)]
    assert (found["temperature"], found["inside"]) == (pytest.approx(0.2), 0)
    assert shift.perturbed_heads([run])[0].title == "Perturbed temperature head on both, beta0 1.0"
    assert (len(shift.UNSEEN), len(shift.NOT_NOISE)) == (12, 9)
    assert "gaussian_noise" not in shift.UNSEEN


def test_targets_say_what_was_missed(tmp_path: Path) -> None:
    made_up(tmp_path, auto=output_of(0.02, after=0.001, accuracy=0.8985))
    rows = committed.rows_of(committed.read_runs(tmp_path))
    lines = headline.targets(rows).lines
    assert [line[-1] for line in lines] == ["**no**", "**no**", "yes", "yes"]
    assert lines[0][2] == "89.85 against 90.00"
    assert lines[1][2] == "2.00, band up to 0.90"  # as it is; no temperature is put after it
    made_up(tmp_path, seed=1, auto=output_of(0.002, after=0.02))
    made_up(tmp_path, seed=2)  # has no such head
    lines = headline.targets(committed.rows_of(committed.read_runs(tmp_path))).lines
    assert [line[3] for line in lines] == ["1 of 2", "1 of 2", "2 of 2", "2 of 2"]
    assert [line[-1] for line in lines] == [
        "yes",
        "**no**",
        "yes",
        "yes",
    ]  # 89.925 against 90; (2 + 0.2) / 2 = 1.1


def test_a_head_fitted_after_training_is_an_output_of_the_run_it_was_fitted_to(tmp_path: Path) -> None:
    made_up(tmp_path, auto=output_of(0.02))
    made_up(tmp_path, seed=1, auto=output_of(0.02))
    names = sorted(run.name for run in committed.read_runs(tmp_path))
    assert not any(run.has(committed.FITTED) for run in committed.read_runs(tmp_path))
    one = {"accuracy": 0.9, "low": 0.004, "high": 0.009, "nll": 0.31, "brier": 0.13}
    found = {"ours": {"sources": ["elsewhere", names[1]], "numbers": [
        {"calibrator": "temperature", "ece": 0.5, **one}, {"calibrator": "temperature", "ece": 0.6, **one},
        {"calibrator": "head", "ece": 0.7, **one}, {"calibrator": "head", "ece": 0.008, **one},
    ]}}  # fmt: skip
    (tmp_path / "post_hoc.json").write_text(json.dumps(found))
    runs = committed.read_runs(tmp_path)
    assert [run.has(committed.FITTED) for run in runs] == [False, True]
    assert runs[1].number(committed.FITTED, "ece") == 0.008
    rows = committed.rows_of(runs)
    line = next(line for line in headline.headline(rows).lines if line[1].startswith("Head fitted after"))
    assert line[1].endswith("(1 seed)")
    assert line[3] == "**0.80** (0.40 to 0.90)"
    assert line[-1] == f'`python experiments/post_hoc.py "CIFAR-10, ResNet-50" runs/{names[1]}`'
    told = findings.fitted(rows)
    assert (
        "on the 1 runs whose logits were kept: its NLL is lower than temperature scaling's in 0 of 1" in told
    )
    assert "higher in 1 of 1 (the difference: 0.0100), its ECE lower in 1 of 1" in told  # 0.008 against 0.01
    assert "in 1 of 1. Beside the auto head its NLL is lower in 0 of 1 and higher in 1 of 1 (0.0100)" in told
    assert findings.fitted({}) == ""
    lines = [line for line in headline.targets(rows).lines if line[1].startswith("fitted: ")]
    assert [line[-1] for line in lines] == ["yes", "yes", "**no**", "yes"]  # 0.31 against 0.30
    assert lines[2][2:4] == ["0.3100 against 0.3000", "0 of 1"]


def test_the_headline_names_a_command_for_each_of_our_lines(tmp_path: Path) -> None:
    made_up(tmp_path, auto=output_of(0.005))
    made_up(tmp_path, "mmce")
    lines = headline.headline(committed.rows_of(committed.read_runs(tmp_path)), tmp_path / "none.json").lines
    assert [line[1] for line in lines] == [
        "Cross entropy", "Cross entropy + temperature scaling", "Auto head (ours)", "MMCE + temperature",
        "*paper: cross entropy + temperature*", "*paper: annealing double head*",
    ]  # fmt: skip
    assert all(line[-1].startswith("`python experiments/run.py cifar10 resnet50") for line in lines[:4])
    assert lines[3][-1].endswith("--epochs 30 --methods mmce --accelerator cpu`")  # as its certificate says


def test_a_last_layer_of_another_seed_names_its_command(tmp_path: Path) -> None:
    for seed in (0, 1):
        made_up(tmp_path, seed=seed)
    run = made_up(tmp_path, "last_layer", seed=3)
    committed.write_small({**run.results, "kind": "last-layer"}, run.path / "results.json")
    rows = committed.rows_of(committed.read_runs(tmp_path))
    lines = headline.headline(rows, tmp_path / "none.json").lines
    (line,) = [line for line in lines if line[1] == "Last-layer retraining (TST) + temperature (1 seed)"]
    assert line[-1] == "`python experiments/last_layer.py cifar10 resnet50 --epochs 30 --seeds 3`"
    wanted = "CIFAR-10, ResNet-50, of 3 seeds, missing: 1 for cross-entropy; 2 for last-layer. One seed has no spread."
    assert wanted in report.gaps(rows)


def test_a_report_of_little_says_so(tmp_path: Path) -> None:
    made_up(tmp_path, auto=output_of(0.005))
    runs = committed.read_runs(tmp_path)
    rows = committed.rows_of(runs)
    text = report.page(rows, runs, make.all_tables(rows), drawn=["ece-floor"])
    assert "1 training runs on a CPU, 1 minutes of training" in text
    assert "CIFAR-10, ResNet-50: MMCE, Brier, Focal," in text
    assert "figures/ece-floor.png" in text
    assert "figures/beta.png" not in text
    assert not re.search(r"[{}]", text)


def test_the_order_of_gradients_is_reported_as_it_is(tmp_path: Path) -> None:
    run = made_up(tmp_path)
    for last, said in (
        (0.3, "unlike in the paper"),
        (0.9, "as the paper says. It also says that the difference fades"),
    ):
        norms = np.stack(
            [np.array([0.4, 0.4, 0.4, 0.5, 0.5, last]), np.array([0.7, 0.6, 0.6, 0.51, 0.5, 0.5])], -1
        )
        np.savez(
            run.path / "gradients.npz", norms=np.stack([norms] * 30), heads=np.array(["mlp-0.6", "mlp-1.5"])
        )
        fresh = committed.Run.read(run.path)
        assert said in disagreements.gradients({"cross-entropy": [fresh]})
        assert len(figures.gradient_sample([fresh], 0.6, 0)) == 21  # the last 70 % of 30 epochs


# Bins ------------------------------------------------------------------------------------------------------------


def some_predictions(n: int = 400) -> Predictions:
    logits = 2 * torch.randn(n, 4)
    return Predictions(logits, torch.where(torch.rand(n) < 0.6, logits.argmax(1), torch.randint(4, (n,))))


def test_recorded_bins_give_back_the_ece_to_six_digits() -> None:
    p = some_predictions()
    read = committed.bins_of(json.loads(json.dumps(committed.small(binned(p)))))
    assert float(read.ece()) == pytest.approx(float(metrics.ece(p)), abs=5e-6)
    assert int(read.counts.sum()) == 400
    assert int(read.correct_sums.sum()) == int(p.correct.sum())


def test_bins_of_other_predictions_are_refused(tmp_path: Path) -> None:
    p, folder = some_predictions(), tmp_path / "predictions"
    folder.mkdir()
    p.save(folder / "test-main.npz")
    numbers = {"before": Summary.of(p).values, "after": Summary.of(Predictions(p.logits / 1.5, p.labels)).values,
               "temperature": 1.5}  # fmt: skip
    run = made_up(tmp_path, main=numbers)
    made = record_bins.bins_from(run, folder)
    (run.path / "bins.json").write_text(json.dumps(made))
    assert float(run.bins("main", "after").ece()) == pytest.approx(numbers["after"]["ece"], abs=5e-6)
    assert run.bins("auto") is None
    some_predictions().save(folder / "test-main.npz")
    with pytest.raises(SystemExit, match="main, before: ECE"):
        record_bins.bins_from(run, folder)


# Recipes and runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [key[0] for key in paper.TABLE_1] + ["20newsgroups-bydate"])
def test_every_row_of_the_paper_has_recipes(data: str) -> None:
    for seed in (0, 1):
        runs = recipes.row(data, seed=seed)
        assert {"cross-entropy", "mmce", "brier", "focal", "label-smoothing", "flsd-53"} <= set(runs)
        assert len({config.name for config in runs.values()}) == len(runs)
        assert {config.seed for config in runs.values()} == {seed}
        assert len({config.epochs for config in runs.values()}) == 1
        for name, config in runs.items():
            assert committed.method_of(json.loads(config.to_json())) == name


def test_heads_of_one_run_have_their_own_periods_and_perturbations() -> None:
    config = recipes.row("cifar10", "resnet50")["cross-entropy"]
    groups = config.riders()
    assert set(groups) == {
        "heads",
        "heads-noise+broad",
        "auto",
        *(f"heads-k{k}" for k in (20, 30, 40, 50, 70)),
    }
    assert groups["heads-k70"] == ["annealing-double-head-k70", "temperature-1.2-k70"]
    assert set(groups["heads-noise+broad"]) == set(recipes.PERTURBED)
    assert (config.epochs, config.auto, config.shift) == (30, True, ("cifar10c", "svhn"))
    assert recipes.row("cifar10", "resnet101")["cross-entropy"].every_of == {}
    assert recipes.row("cifar100", "resnet50", epochs=200)["mmce"].epochs == 200


def test_seeds_of_a_row_may_be_members_of_an_ensemble() -> None:
    """Later seeds have fewer heads and guards and are evaluated less often, which leaves their networks alone."""
    first, later = (
        json.loads(recipes.row("cifar10", seed=seed)["cross-entropy"].to_json()) for seed in (0, 1)
    )
    differ = {key for key in first if first[key] != later[key]}
    assert {"heads", "guards", "evaluate_every"} <= differ <= ensemble.FREE


def test_methods_are_spelled_out_or_refused() -> None:
    assert recipes.methods_of([]) == ["cross-entropy", "mmce", "brier", "focal"]
    assert recipes.methods_of(["rivals", "mixup"]) == list(recipes.RIVALS)
    with pytest.raises(ValueError, match="methods must be among cross-entropy, mmce.*got dropout"):
        recipes.methods_of(["dropout"])


def test_what_is_kept_of_a_run_is_small_and_notes_neighbours(tmp_path: Path) -> None:
    run = made_up(tmp_path / "runs").path
    (run / "metrics.jsonl").write_text('{"epoch": 0, "train_loss": 0.123456789}\n')
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/bins.json").write_text("{}")
    run_script.keep(run, tmp_path / "kept", "beside another run")
    kept = committed.Run.read(tmp_path / "kept")
    assert kept.results["environment"]["note"] == "beside another run"
    assert kept.epochs == [{"epoch": 0, "train_loss": 0.123457}]
    assert b" " not in (tmp_path / "kept/metrics.jsonl").read_bytes()
    assert not (tmp_path / "kept/bins.json").exists()
    neighbours = run_script.Neighbours(tmp_path)
    (tmp_path / ".running-999999999").touch()  # no such process
    assert not neighbours.look()
    assert not (tmp_path / ".running-999999999").exists()
    (tmp_path / ".running-1").touch()  # the first process is always there
    assert neighbours.look()
    neighbours.leave()
    assert not list(tmp_path.glob(f".running-{neighbours.file.name.rpartition('-')[2]}"))


def test_an_ensemble_is_the_mean_of_probabilities() -> None:
    members = [
        Predictions.from_probs([[0.9, 0.1], [0.2, 0.8]], [0, 1]),
        Predictions.from_probs([[0.5, 0.5], [0.6, 0.4]], [0, 1]),
    ]
    assert ensemble.mean_of(members).probs.tolist() == [pytest.approx([0.7, 0.3]), pytest.approx([0.4, 0.6])]
    other = Predictions.from_probs([[0.5, 0.5], [0.6, 0.4]], [1, 1])
    with pytest.raises(ValueError, match="members must have predicted the same samples"):
        ensemble.mean_of([members[0], other])


@pytest.mark.slow
def test_a_run_with_two_periods_its_ensemble_and_its_last_layer(tmp_path: Path) -> None:
    base = replace(
        RECIPES["fashion"], n_train=640, n_calib=100, n_test=100, epochs=1, every=2, batch_size=64,
        record_gradients=True, heads={"a": PAPER, "a-k4": PAPER}, every_of={"a-k4": 4},
    )  # fmt: skip
    asked = Namespace(
        output=tmp_path / "runs", results=tmp_path / "kept", root=None, accelerator="cpu", note=""
    )
    runs, neighbours = [replace(base, seed=seed) for seed in (0, 1)], run_script.Neighbours(tmp_path)
    results = [run_script.train_and_keep(config, asked, neighbours) for config in runs]
    folders = [RunFolder(asked.output / config.name) for config in runs]
    kept = committed.Run.read(asked.results / runs[1].name)
    assert kept.number("a-k4", "ece") == results[1]["outputs"]["a-k4"]["before"]["ece"]
    assert set(kept.gradients) == {"a", "a-k4"}
    assert "note" not in kept.results["environment"]
    assert {"main", "a", "a-k4"} == set(results[0]["outputs"])
    assert results[0]["outputs"]["a"] != results[0]["outputs"]["a-k4"]
    recorded = committed.bins_of(results[0]["outputs"]["main"]["bins"]["before"])
    assert float(recorded.ece()) == pytest.approx(results[0]["outputs"]["main"]["before"]["ece"], abs=1e-5)
    both = ensemble.ensemble([folder.path for folder in folders])
    assert (both["kind"], both["outputs"]["main"]["before"]["n"]) == ("ensemble-2", 100)
    file = folders[1].path / "results.json"
    other = json.loads(file.read_text())
    for key, value in (("heads", {}), ("lr", 9.0)):
        other["config"][key] = value
        file.write_text(json.dumps(other))
        if key == "heads":  # ride along and leave the network as it is
            assert ensemble.ensemble([folder.path for folder in folders])["outputs"] == both["outputs"]
    with pytest.raises(SystemExit, match="differ in their seed alone, these differ in lr"):
        ensemble.ensemble([folder.path for folder in folders])
    assert both["outputs"]["main"]["before"]["nll"] <= max(
        r["outputs"]["main"]["before"]["nll"] for r in results
    )
    again = last_layer.retrain(folders[0], torch.device("cpu"), None, epochs=2)
    assert (again["kind"], again["settings"]["epochs"]) == ("last-layer", 2)
    assert again["outputs"]["main"]["before"]["nll"] != results[0]["outputs"]["main"]["before"]["nll"]


# What is committed -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> tuple[Any, list[committed.Run]]:
    runs = committed.read_runs()
    return committed.rows_of(runs), runs


def test_the_committed_pages_are_those_of_the_committed_results(published: Any) -> None:
    rows, runs = published
    made = make.all_tables(rows)
    for name, table in made.items():
        assert (make.OUTPUT / f"{name}.md").read_text() == make.MADE + table.page(), "run `make results`"
        if table.records:
            assert (make.OUTPUT / f"{name}.csv").read_text() == table.csv(), "run `make results`"
    drawn = sorted(file.stem for file in (make.OUTPUT / "figures").glob("*.png"))
    assert set(drawn) <= set(figures.FIGURES)
    text = report.page(rows, runs, made, drawn, brief=other_networks.read_brief())
    assert (make.OUTPUT / "index.md").read_text() == make.MADE + text
    blocks = pages.blocks(rows)
    for name in pages.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert text == pages.filled(text, blocks), f"{name} quotes other results: run `make results`"
        for block in pages.BLOCK.findall(text):
            blocks.pop(block[1], None)
    assert not blocks, "a block is made that no page shows"


def test_links_and_pictures_of_the_report_exist() -> None:
    text = (make.OUTPUT / "index.md").read_text()
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(targets) > 15
    assert [target for target in targets if not (make.OUTPUT / target).exists()] == []


def test_what_committed_results_were_made_of_is_committed(published: Any) -> None:
    for run in published[1]:
        for name in run.results.get("members", ()):
            folders = [committed.RESULTS / name, committed.HERE / "members" / name]
            assert any((folder / "results.json").exists() for folder in folders), f"{run.name}: {name}"


def test_committed_results_carry_their_certificate(published: Any) -> None:
    for run in published[1]:
        assert {"device", "commit", "torch", "time"} <= set(run.results["environment"])
        assert run.config["epochs"] >= 5  # no trial of a minute got in
        assert (run.path / "results.json").stat().st_size < 1_500_000


@pytest.mark.parametrize("name", ["ece-floor", "beta", "gradients"])
def test_figures_are_drawn_from_the_committed_results(name: str, published: Any) -> None:
    figure = figures.FIGURES[name](published[0])
    assert figure is not None
    assert all(
        ax.has_data() for ax in figure.axes if ax.axison
    )  # panels to fill the last line are switched off
    assert sum(ax.has_data() for ax in figure.axes) > 1


def test_figures_of_nothing_are_none_and_gaps_are_named(published: Any) -> None:
    assert [name for name, draw in figures.FIGURES.items() if draw({}) is not None] == []
    run = next(run for run in published[1] if run.bins("main") is not None)
    figure = figures._diagrams([("kept", run, "main"), ("lost", None, "main")])
    assert [ax.texts[0].get_text() for ax in figure.axes[1::2]] == ["not recorded"] * 3


@pytest.mark.parametrize("module", [committed, ensemble, pages, recipes, seen, shift, tables])
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0


def test_a_bare_run_is_the_configuration_of_the_members() -> None:
    options = Namespace(
        data="cifar100", model="resnet50", epochs=30, seeds=[0, 1], methods=["cross-entropy"], bare=True
    )
    for config in run_script.configs(options):
        kept = json.loads((ROOT / "experiments" / "members" / config.name / "results.json").read_text())[
            "config"
        ]
        usual = json.loads(Config().to_json())  # of settings that are newer than the file
        assert committed.small(json.loads(config.to_json())) == committed.small({**usual, **kept})
    options.bare = False
    assert all(config.heads and config.guards for config in run_script.configs(options))
