"""All of `make results` on a scratch folder: more seeds, fewer heads, rows of cross entropy alone; what pages quote."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from doublehead import HeadBank
from doublehead.data import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

import auto_choice  # noqa: E402
import committed  # noqa: E402
import figures  # noqa: E402
import findings  # noqa: E402
import guard_search  # noqa: E402
import guards  # noqa: E402
import headline  # noqa: E402
import make  # noqa: E402
import pages  # noqa: E402
import shift  # noqa: E402
import tables  # noqa: E402
import withdrawal  # noqa: E402

RESNET = "cifar10-resnet50-cross_entropy-e30-s0"
HUNDRED = "cifar100-resnet50-cross_entropy-e30-s0"
TEXT = "sst-binary-gp_cnn-cross_entropy-e50-s0"
PERTURBED = "both@noise+broad-1"
BAND = {"ece_floor_low": 0.003, "ece_floor_high": 0.009}
FEW = ("main", "annealing-double-head", "mlp-1", "mlp-1.2", "auto")  # what later seeds have of seed 0's heads


def only(kept: dict[str, Any], heads: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of some outputs, before and after temperature scaling."""
    return {name: one for name, one in kept.items() if name.removesuffix("+T") in heads}


def copy(
    results: Path,
    source: str,
    name: str,
    heads: tuple[str, ...] | None = None,
    shifted: bool = True,
    **config: Any,
) -> Path:
    """A committed run under another name, seed or network, with some of its heads and none of its other files."""
    run = json.loads((committed.RESULTS / source / "results.json").read_text())
    run["config"] |= config
    if heads is not None:
        run["outputs"] = only(run["outputs"], heads)
        run["shift"] = {one: only(of, heads) for one, of in run["shift"].items()}
    run["shift"] = run["shift"] if shifted else {}
    run["selection"] = run["selection"] if "auto" in run["outputs"] else None
    committed.write_small(run, results / name / "results.json")
    return results / name / "results.json"


def change(file: Path, output: str, when: str = "before", **numbers: float) -> None:
    """Other numbers in a results file."""
    results = json.loads(file.read_text())
    results["outputs"][output][when] |= numbers
    file.write_text(json.dumps(results))


def made_of(results: Path, kind: str, source: str, name: str) -> None:
    """What ensemble.py and last_layer.py leave."""
    file = copy(results, source, name, ("main",), shifted=False)
    file.write_text(json.dumps({**json.loads(file.read_text()), "kind": kind, "train_seconds": None}))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeds 0 to 3 of CIFAR-10 with ever fewer heads, rivals, and rows with little in them."""
    folder = tmp_path_factory.mktemp("results")
    for name in (
        RESNET,
        HUNDRED,
        *(f"cifar10-resnet50-{loss}-e30-s0" for loss in ("mmce", "brier", "focal")),
    ):
        shutil.copytree(committed.RESULTS / name, folder / name)
    for seed, ece in ((0, 0.02), (1, 0.03), (2, 0.04), (3, 0.03)):
        heads = FEW if seed < 3 else ("main",)
        file = folder / RESNET / "results.json"
        if seed:
            file = copy(folder, RESNET, f"cifar10-s{seed}", heads, shifted=seed < 3, seed=seed)
        change(file, "main", ece=ece, accuracy=0.91, nll=0.25, **BAND)
        if seed < 3:
            change(file, "auto", ece=ece / 4, accuracy=0.912, nll=0.2, **BAND)
            change(file, "auto", "after", ece=0.3, nll=3.0)  # which nothing shows
            change(file, "annealing-double-head", accuracy=0.9)
    change(folder / RESNET / "results.json", PERTURBED, ece=0.017, **BAND)
    # another seed of CIFAR-100, with one perturbed head and a sweep that seed 0 does not have
    copy(folder, HUNDRED, "cifar100-s1", ("main", PERTURBED, "mlp-1", "mlp-1.2"), seed=1)
    for loss in ("brier", "mmce"):
        copy(folder, "cifar10-resnet50-brier-e30-s0", f"cifar100-{loss}", data="cifar100", loss=loss)
    copy(folder, "cifar10-resnet50-brier-e30-s0", "mixup", loss="cross_entropy", mixup=0.2)
    copy(folder, "cifar10-resnet50-brier-e30-s0", "densenet-mmce", loss="mmce", model="densenet121", epochs=5)
    made_of(folder, "ensemble-4", RESNET, "cifar10-ensemble-4")
    made_of(folder, "last-layer", RESNET, "cifar10-last_layer")
    # rows with only cross entropy; the same network for two lengths; a network that the paper does not have
    copy(folder, RESNET, "wide", ("main",), shifted=False, model="wide_resnet28_10", epochs=5)
    copy(folder, RESNET, "wide-long", ("main", "auto"), model="wide_resnet28_10", epochs=10)
    copy(folder, RESNET, "resnet152", (*FEW, PERTURBED), model="resnet152", epochs=5)
    file = copy(folder, TEXT, "newsgroups", data="20newsgroups-bydate")
    change(file, "main", accuracy=0.41)
    copy(folder, TEXT, "sst-fine", ("main",), data="sst-fine", model="tree_lstm")
    return folder


@pytest.fixture(scope="module")
def made(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pages after `make` has gone over them."""
    root = tmp_path_factory.mktemp("root")
    for name in pages.PAGES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as empty axes or means of nothing
        said = make.make(results, root, dpi=20)
    assert re.match(r"20 runs, 14 tables, \d+ figures", said)
    return root


def lines_of(text: str, words: str) -> list[list[str]]:
    """The cells of every table line that has these words in it."""
    return [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|") and words in line
    ]


def test_all_of_make_runs_on_seeds_and_heads_that_are_missing(made: Path) -> None:
    drawn = {file.stem for file in (made / "docs/results/figures").glob("*.png")}
    # no run need have heads of several periods, or a curve
    assert set(figures.FIGURES) - {"period", "reliability-auto"} <= drawn
    for name in (
        *pages.PAGES,
        *(f"docs/results/{file.name}" for file in (made / "docs/results").glob("*.md")),
    ):
        assert not re.search(r"\bnan\b|None|(?<!math\.)\binf\b", (made / name).read_text()), name


def test_means_and_spreads_over_seeds_are_those_worked_by_hand(made: Path) -> None:
    readme = (made / "README.md").read_text()
    # cross entropy 2, 3, 4 and 3 %: mean 3, deviation sqrt((1 + 0 + 1 + 0) / 3) = 0.816; the same accuracy four times
    (line,) = lines_of(readme, "**CIFAR-10, ResNet-50, 30 epochs, 4 seeds**: cross entropy")
    assert line[1] == "91.00 ± 0.00"
    assert line[2] == "3.00 ± 0.82 (0.30 to 0.90)"
    assert line[3] == "0.2500 ± 0.0000"
    # auto 0.5, 0.75, 1 %: mean 0.75, deviation 0.25, not above the band; the fourth seed has no such head
    (line,) = lines_of(readme, "| auto head (3 seeds) |")
    assert line[2] == "**0.75 ± 0.25** (0.30 to 0.90)"
    table1 = (made / "docs/results/table1.md").read_text()
    assert [line[2] for line in lines_of(table1, "| CIFAR-10, ResNet-50 | Auto head")] == ["30; 3"]
    assert lines_of(table1, "| CIFAR-10, ResNet-50 | Cross entropy")[0][4] == "3.00 ± 0.82 (0.30 to 0.90)"
    guide = (made / "docs/which-method.md").read_text()
    assert "| finding | CIFAR-10 (30 epochs, 4 seeds) | CIFAR-100 (30 epochs, 2 seeds) |" in guide
    (line,) = lines_of(guide, "the head chosen from the bank")
    assert line[1] == "**0.75 ± 0.25** (0.30 to 0.90), 3 seeds; 0.2000 ± 0.0000"
    assert lines_of(guide, "clean images: ECE")[0][1] == "1.70 (0.30 to 0.90), 1 seed"


def test_the_csv_file_has_the_deviation(made: Path) -> None:
    head, *lines = (made / "docs/results/table1.csv").read_text().splitlines()
    cells = dict(zip(head.split(","), lines[0].split(",")))
    assert (cells["data"], cells["method"], cells["seeds"]) == ("cifar10", "cross-entropy", "4")
    assert float(cells["ece_before"]) == pytest.approx(0.03)
    assert float(cells["ece_before_sd"]) == pytest.approx(
        statistics.stdev([0.02, 0.03, 0.04, 0.03]), rel=5e-3
    )


def test_rows_of_little_say_what_is_missing(made: Path) -> None:
    readme = (made / "README.md").read_text()
    (line,) = lines_of(readme, "| CIFAR-10, Wide ResNet 28-10, 5 epochs, 1 seed |")
    assert line[4:] == ["not run"] * 3
    (line,) = lines_of(readme, "20 Newsgroups by date, GP CNN, 50 epochs, 1 seed")
    assert line[1] == "41.00"
    assert lines_of(readme, "Deep ensemble of 4 + temperature")
    assert lines_of(readme, "Last-layer retraining (TST) + temperature")
    assert lines_of(readme, "range over MMCE, Brier, Focal, Mixup (1 seed)")
    report = (made / "docs/results/index.md").read_text()
    assert "- SST fine, TreeLSTM: MMCE, Brier, Focal" in report
    assert "- CIFAR-10, DenseNet-121: Cross entropy, Brier, Focal" in report
    assert "| CIFAR-10, Wide ResNet 28-10, 10 epochs, seed 0 |" in report  # told from the one of 5
    assert (
        "SST fine, TreeLSTM: MMCE, Brier, Focal, MMCE as published, FLSD-53, AdaFocal, Label smoothing, Last"
        in report
    )


def test_comparisons_are_made_on_the_seeds_that_have_both(results: Path) -> None:
    """The fourth seed has no head; its main head must not count against the heads of the others."""
    file = results / "cifar10-s3/results.json"
    before = file.read_text()
    try:
        change(file, "main", accuracy=0.5, nll=9.0, ece=0.4)
        rows = committed.rows_of(committed.read_runs(results))
        row = tables.reference(rows)[0]
        assert headline.targets({row: rows[row]}).lines[0][2] == "91.20 ± 0.00 against 91.00 ± 0.00"
        assert "less accuracy than the network in 3 of 3 runs: -1.00" in findings.paper_head({row: rows[row]})
    finally:
        file.write_text(before)


def test_columns_of_all_rows_are_the_same(results: Path) -> None:
    rows = committed.rows_of(committed.read_runs(results))
    table = shift.family_table(rows)
    assert {len(line) for line in table.lines} == {len(table.head)}
    cell = table.head.index("Perturbed temperature head on both, beta0 1.0")
    of = {line[0]: line[cell] for line in table.lines if line[1] == "contrast"}
    assert set(of) == {"CIFAR-10, ResNet-50", "CIFAR-100, ResNet-50", "CIFAR-10, ResNet-152",
                       "CIFAR-10, Wide ResNet 28-10, 10 epochs"}  # fmt: skip
    assert of["CIFAR-10, ResNet-50"].endswith(", 1 seed")
    assert of["CIFAR-10, Wide ResNet 28-10, 10 epochs"] == "not run"
    assert "±" in of["CIFAR-100, ResNet-50"]


def test_a_sweep_is_drawn_on_networks_that_have_all_of_it(results: Path) -> None:
    rows = committed.rows_of(committed.read_runs(results))
    betas, runs = figures.sweep(tables.reference(rows)[1]["cross-entropy"])
    assert (len(betas), [run.seed for run in runs]) == (10, [0])
    assert figures.sweep([]) == ([], [])


# The withdrawn run ------------------------------------------------------------------------------------------------


def test_the_withdrawn_run_is_told_of_with_its_numbers() -> None:
    """Written out from the files by eye: the paper's head scored 0.76 and 1.42, and all 18 temperature heads died."""
    rows = committed.rows_of(committed.read_runs())
    text = withdrawal.first_run(rows)
    assert "18 of 18 per-sample temperature heads died" in text
    assert "ECE 0.76 with annealing (not above the band of a perfect model) and 1.42 without, against" in text
    second = committed.Run.read(committed.RESULTS / RESNET)
    now = [f"{100 * second.number(head, 'ece'):.2f}" for head in ("annealing-double-head", "double-head")]
    assert f"against {now[0]} and {now[1]} in the run in the tables" in text
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    report = (make.OUTPUT / "index.md").read_text(encoding="utf-8")
    assert text in report
    assert text.partition(" (`experiments")[0] in readme
    assert withdrawal.first_run({}) == ""


def test_networks_that_differ_are_not_called_the_same(tmp_path: Path) -> None:
    first = committed.Run(tmp_path, json.loads(withdrawal.FILE.read_text()))
    assert "same in both" in withdrawal.same_network(first, first)
    assert "same in both" in withdrawal.same_network(first, committed.Run.read(committed.RESULTS / RESNET))
    other = committed.Run(tmp_path, json.loads(withdrawal.FILE.read_text()))
    other.results["outputs"]["main"]["before"]["nll"] += 1e-6
    assert withdrawal.same_network(first, other) == ""


# Blocks ----------------------------------------------------------------------------------------------------------


def test_only_blocks_are_written_anew() -> None:
    text = (
        "top\n<!-- results: a -->\nold | 1.0\n<!-- end -->\nmiddle\n<!-- results: b -->\n<!-- end -->\nend\n"
    )
    made = pages.filled(text, {"a": "new", "b": "| x |\n"})
    assert made == (
        "top\n<!-- results: a -->\n\nnew\n\n<!-- end -->\nmiddle\n"
        "<!-- results: b -->\n\n| x |\n\n<!-- end -->\nend\n"
    )
    assert pages.filled(made, {"a": "new", "b": "| x |\n"}) == made
    with pytest.raises(KeyError, match="a"):
        pages.filled(text, {"b": ""})


def test_every_marker_of_a_page_is_a_block() -> None:
    for name in pages.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(pages.BLOCK.findall(text)) == text.count("<!-- results:") == text.count("<!-- end -->") > 0


def test_nothing_run_is_said_to_be_not_run(tmp_path: Path) -> None:
    made = pages.blocks({}, tmp_path)
    assert made["other-rows"] == "No other rows have been run."
    assert made["guide-findings"].count("not run") == 3
    assert "has not been measured" in made["fit-head"]


def test_the_demo_table_is_that_of_its_certificate() -> None:
    rows = json.loads((ROOT / "docs/images/demo.json").read_text())["rows"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in rows:
        (line,) = lines_of(readme, f"| {row['method']} | {100 * row['accuracy']:.2f} |")
        assert line[2].strip("*") == f"{100 * row['ece']:.2f}"
        assert line[2].startswith("**") == (row["ece"] <= row["ece_floor_high"])


def test_what_the_share_left_alone_buys_is_what_was_tried() -> None:
    tried = guard_search.read_search()
    networks = [one["network"] for one in tried if one["keep"] == 0.98 and "commit" in one]
    usual, more = (
        [next(one for one in tried if (one["network"], one["keep"], one.get("note", "")) == (network, keep, "")
              and "1.2" in one["form"]) for network in networks]
        for keep in (0.9, 0.98)
    )  # fmt: skip
    assert len(networks) == 3
    fell = sorted(one["clean_nll"] - other["clean_nll"] for one, other in zip(usual, more))
    before, after = (sorted(100 * one["family_ece"] for one in some) for some in (usual, more))
    page = " ".join((ROOT / "docs/shift.md").read_text().split())
    assert (
        f"the clean NLL fell by {fell[0]:.4f} to {fell[-1]:.4f}, and the mean ECE on unseen families" in page
    )
    assert f"rose from {before[0]:.1f} .. {before[-1]:.1f} to {after[0]:.1f} .. {after[-1]:.1f} %" in page


def test_verdicts_written_by_hand_are_those_of_the_committed_runs() -> None:
    """Sentences of the README and the guide that no block makes."""
    rows = committed.rows_of(committed.read_runs())
    readme, guide = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/which-method.md")
    )
    ten, hundred = (tables.reference(rows, which)[1]["cross-entropy"] for which in findings.SHOWN)  # type: ignore[index]
    family, kind = (
        [shift.share(runs, output) for runs in (ten, hundred)]
        for output in (shift.FAMILY_UNSEEN, shift.KIND_UNSEEN)
    )
    assert f"to {family[0]} of temperature scaling's on CIFAR-10 and {family[1]} on CIFAR-100**" in readme
    assert f"to {kind[0]} and {kind[1]} where its whole kind was unseen" in readme
    others = [
        rows[committed.Row(data, model, 30)]["cross-entropy"]
        for data, model in (
            ("cifar10", "resnet101"), ("cifar10", "densenet121"), ("cifar10", "wide_resnet28_10"),
            ("cifar100", "resnet101"), ("cifar100", "densenet121"), ("cifar100", "wide_resnet28_10"),
        )
    ]  # fmt: skip
    shares = [shift.share(runs, shift.FAMILY_UNSEEN) for runs in others]
    assert (
        f"to {shares[0]}, {shares[1]} and {shares[2]} on a ResNet-101, a DenseNet-121 and a Wide ResNet"
        in readme
    )
    assert (
        f"to {shares[3]}, {shares[4]} and {shares[5]} on the same three on CIFAR-100. On clean images"
        in readme
    )
    everywhere = sorted([*family, *shares])
    assert f"was {everywhere[0]} to {everywhere[-1]} of temperature scaling's on eight networks" in guide
    kinds = sorted([*kind, *(shift.share(runs, shift.KIND_UNSEEN) for runs in others)])
    assert f"on whole kinds that it never saw {kinds[0]} to {kinds[-1]};" in guide
    gains = [1 - (run.number("auto", "nll") or 1) / (run.number("main+T", "nll") or 1) for (run,) in others]
    wide, dense = (f"{100 * gains[i]:.1f} and {100 * gains[i + 3]:.1f} %" for i in (2, 1))
    assert f"the NLL by {wide}; on DenseNets the ECE falls from" in readme
    assert f"the NLL by {dense} (one seed each)" in readme
    assert f"ahead in NLL, by {wide}, with an ECE of" in guide
    assert f"on DenseNets by {dense}, with an ECE of" in guide
    eces = [
        [100 * (run.number(output, "ece") or 0) for output in ("main+T", "auto")]
        for (run,) in (others[2], others[5], others[1], others[4])
    ]
    for one, other, said in (
        (*eces[:2], "from {:.2f} to {:.2f} (CIFAR-10) and from {:.2f} to {:.2f} (CIFAR-100)"),
        (*eces[2:], "from {:.2f} to {:.2f} and from {:.2f} to {:.2f}, the NLL by"),
    ):
        assert said.format(*one, *other) in readme
        turned = [f"{ours:.2f} against {theirs:.2f}" for theirs, ours in (one, other)]
        assert f"an ECE of {' and '.join(turned)}" in guide
    worse = [
        statistics.fmean(run.number(shift.FAMILY_UNSEEN, "nll") or 0 for run in runs)
        / statistics.fmean(run.number("main+T", "nll") or 1 for run in runs)
        - 1
        for runs in (ten, hundred, *others)
    ]
    assert f"it costs ResNets up to {100 * max(worse):.1f} % of the NLL" in readme
    ahead = [one < 0 for one in worse]  # "on DenseNets and Wide ResNets, with auto under it, it is ahead by"
    assert ahead == [False, False, False, True, True, False, True, True]
    best = sorted(-100 * one for one in worse if one < 0)
    assert f"it is ahead by {best[0]:.1f} to {best[-1]:.1f} %" in readme
    runs = [run for row in rows for run in committed.having(rows[row].get("cross-entropy", []), "auto")]
    behind = [
        run.config["data"]
        for run in runs
        if (run.number("auto", "nll") or 0) > (run.number("main+T", "nll") or 0) + 1e-5
    ]
    assert behind == ["20newsgroups-bydate"]  # "never behind it in NLL but on"
    chosen = [
        run for run in runs if ((run.results["selection"] or {}).get("spec") or {}).get("kind") == "mlp"
    ]

    def accuracy(runs: Any, output: str) -> float:
        return 100 * statistics.fmean(run.number(output, "accuracy") or 0 for run in runs)

    lost = [
        accuracy(some, "main") - accuracy(some, "annealing-double-head") for some in (hundred, *others[3:])
    ]
    assert [round(min(lost)), round(max(lost))] == [2, 5]
    assert "two to five points of accuracy worse on CIFAR-100" in readme
    assert tables.auto_note(rows) == tables.AUTO_NOTE  # no row is of an earlier auto
    nlls = [
        [
            round(statistics.fmean(run.number(output, "nll") or 0 for run in runs), 4)
            for output in ("fit-head", "auto", "main+T")
        ]
        for runs in (ten, hundred, *others)
    ]
    behind_auto = [ours - auto for ours, auto, _ in nlls]
    assert [sum(one < 0 for one in behind_auto), sum(one > 0 for one in behind_auto)] == [4, 2]
    assert (
        f"lower on four networks, higher on two, by {max(behind_auto):.4f} at most, and equal on two"
        in readme
    )
    assert f"of eight and higher on two, by {max(behind_auto):.4f} at most" in guide
    assert all(ours < scalar for ours, _, scalar in nlls)  # "below temperature scaling's on all eight"
    (fine,) = [rows[row]["cross-entropy"] for row in rows if row.data == "sst-fine"]
    means = [
        statistics.fmean(run.number(output, "nll") or 0 for run in fine) for output in ("auto", "fit-head")
    ]
    assert means[0] < means[1]  # "On SST fine auto was ahead"
    assert sum(run in fine for run in chosen) == 1  # "having taken the paper's head once"
    assert len(chosen) == 2
    assert sum(run.config["data"].startswith("sst") for run in runs) == 7
    assert "chose the paper's head twice in seven runs, which lowered the NLL and raised the ECE" in guide
    for run in chosen:
        assert (run.number("auto", "nll") or 0) < (run.number("main+T", "nll") or 0)
        assert (run.number("auto", "ece") or 0) > (run.number("main+T", "ece") or 0)


def test_what_is_said_of_rivals_is_in_the_committed_runs() -> None:
    rows = committed.rows_of(committed.read_runs())
    readme, guide = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/which-method.md")
    )
    by_name = {(row.data, row.model): methods for row, methods in rows.items()}
    ten, hundred = by_name["cifar10", "resnet50"], by_name["cifar100", "resnet50"]
    fine, binary = by_name["sst-fine", "tree_lstm"], by_name["sst-binary", "gp_cnn"]
    news = by_name["20newsgroups-bydate", "gp_cnn"]

    def mean(methods: Any, method: str, output: str, key: str) -> float:
        return statistics.fmean(run.number(output, key) or 0 for run in methods[method])

    def ensemble_wins(methods: Any) -> list[bool]:
        ours = [mean(methods, "cross-entropy", "auto", key) for key in ("nll", "accuracy")]
        theirs = [mean(methods, "ensemble-4", "main+T", key) for key in ("nll", "accuracy")]
        return [theirs[0] < ours[0], theirs[1] > ours[1]]

    assert "the better NLL and accuracy on images, SST binary and 20 Newsgroups, not on SST fine" in readme
    assert [ensemble_wins(one) for one in (ten, hundred, binary, news)] == [[True, True]] * 4
    assert ensemble_wins(fine) == [False, False]
    above = [
        mean(one, "ensemble-4", "main+T", "ece") > mean(one, "ensemble-4", "main+T", "ece_floor_high")
        for one in (ten, hundred, binary, news, fine)
    ]
    assert above == [True, True, True, True, False]  # "an ECE above the band on four rows of five"
    losses = [source.method for source in pages.LOSSES]
    for methods in (fine, news):  # "MMCE with a temperature has the lowest NLL of all losses on"
        found = {one: mean(methods, one, "main+T", "nll") for one in losses if one in methods}
        assert min(found, key=found.__getitem__) == "mmce"
        assert found["mmce"] < mean(methods, "cross-entropy", "auto", "nll")
    stuck = [run for run in binary["mmce"] if run.results["train_accuracy"] < 0.55]
    assert (len(stuck), len(binary["mmce"])) == (
        2,
        3,
    )  # "on SST binary it learned nothing on two seeds of three"
    scaled = mean(ten, "cross-entropy", "main+T", "nll")
    assert all(mean(ten, one, "main+T", "nll") > scaled for one in losses if one in ten)
    scaled = mean(hundred, "cross-entropy", "main+T", "nll")
    found = {one: mean(hundred, one, "main+T", "nll") for one in losses if one in hundred}
    assert [one for one in found if found[one] < scaled] == ["label-smoothing"]
    assert f"(NLL {found['label-smoothing']:.4f} against {scaled:.4f}, means of three seeds" in readme
    raised = [
        one
        for one in losses
        if one in hundred and mean(hundred, one, "main+T", "ece") > mean(hundred, one, "main", "ece")
    ]
    assert raised == ["focal", "flsd-53", "label-smoothing"]
    assert "it raised the ECE after focal loss, FLSD-53 and label smoothing" in guide
    head = "annealing-double-head"
    points = [
        100 * (mean(one, "cross-entropy", head, "accuracy") - mean(one, "cross-entropy", "main", "accuracy"))
        for one in (fine, news)
    ]
    assert [round(one) for one in points] == [
        3,
        -2,
    ]  # "three points better on SST fine", "two on 20 Newsgroups"


def test_what_is_said_of_networks_trained_again_is_in_the_committed_runs() -> None:
    def nll(folder: str, name: str) -> float:
        results = json.loads((ROOT / "experiments" / folder / name / "results.json").read_text())
        return float(results["outputs"]["main"]["after"]["nll"])

    again = "cifar100-resnet50-cross_entropy-e30-s{}"
    apart = [abs(nll("members", again.format(s)) / nll("results", again.format(s)) - 1) for s in (0, 1)]
    said = "{:.0f} and {:.0f} %".format(*(100 * one for one in apart))
    for page in ("README.md", "experiments/report.md"):
        assert said in " ".join((ROOT / page).read_text().split())
    # "Retraining the last layer gave a higher NLL than a temperature on the same network"
    pairs = [("members", "cifar100-resnet50-{}-e30-s0"), ("members", "cifar100-resnet50-{}-e30-s1"),
             ("results", "cifar10-resnet50-{}-e30-s0"), ("members", "cifar10-resnet50-{}-e30-s3"),
             *(("results", f"20newsgroups-bydate-gp_cnn-{{}}-e50-s{seed}") for seed in range(3))]  # fmt: skip
    pairs += [("results", f"sst-fine-tree_lstm-{{}}-e30-s{seed}") for seed in range(3)]
    pairs += [(folder, f"sst-binary-gp_cnn-{{}}-e50-s{seed}") for folder, seed in (
        ("members", 0), ("results", 1), ("results", 2))]  # fmt: skip
    higher = [nll("results", name.format("last_layer")) > nll(folder, name.format("cross_entropy"))
              for folder, name in pairs]  # fmt: skip
    assert len(list((ROOT / "experiments/results").glob("*last_layer*"))) == len(pairs)
    told = f"than a temperature on the same network in {sum(higher)} runs of {len(higher)}."
    assert told in " ".join((ROOT / "README.md").read_text().split())


def test_what_is_said_of_the_default_head_is_in_the_committed_runs() -> None:
    rows = committed.rows_of(committed.read_runs())
    guide = " ".join((ROOT / "docs/which-method.md").read_text().split())
    by_kind = {kind: auto_choice._behind(rows, names) for kind, names in auto_choice.KINDS.items()}
    place = auto_choice.CANDIDATES.index(auto_choice.DEFAULT)
    means = {kind: [statistics.fmean(one) for one in zip(*runs)] for kind, runs in by_kind.items()}
    assert means["CIFAR-10"][place] < 0  # "ahead of a fitted temperature on images on average"
    assert means["CIFAR-100"][place] < 0
    assert (
        min(means["texts"]) == means["texts"][place] > 0
    )  # "a temperature is ahead of all heads on average"
    worst = [max(one) for one in zip(*(run for runs in by_kind.values() for run in runs))]
    assert min(worst) == worst[place] == max(run[place] for run in by_kind["texts"])
    runs = [run for row in rows for run in committed.having(rows[row]["cross-entropy"], "statistics-1")]
    gaps = [(run.number("statistics-1", "nll") or 0) - (run.number("main+T", "nll") or 0) for run in runs]
    told = f"in all {len(gaps)} runs that measured it, by {min(gaps):.4f} to {max(gaps):.4f}."
    assert told in guide
    assert f"{len(gaps)} of the {len(gaps)} runs that have it ({min(gaps):+.4f}" in auto_choice.as_trained(
        rows
    )
    assert auto_choice.as_trained({}) == ""
    rates = {
        kind: {run.config["lr"] * run.config["calib_lr"] for row in rows if row.data in names
               for run in rows[row]["cross-entropy"]}
        for kind, names in auto_choice.KINDS.items()
    }  # fmt: skip
    assert [*map(sorted, rates.values())] == [[0.1], [0.1], [0.03]]  # "on texts ... at 0.3 times its rates"
    learned = [0.8 * run.results["sizes"][1] for row in rows if row.data in auto_choice.KINDS["texts"]
               for run in rows[row]["cross-entropy"]]  # fmt: skip
    assert [round(min(learned), -2), round(max(learned), -2)] == [700, 900]


def test_times_in_the_table_of_rows_are_those_of_the_committed_runs() -> None:
    rows_part = (ROOT / "experiments/README.md").read_text().partition("## What fills")[0]
    table = lines_of(rows_part, "experiments/run.py")
    for data, model in (("cifar10", "resnet50"), ("cifar100", "resnet50"), ("sst-binary", "gp_cnn"),
                        ("sst-fine", "tree_lstm"), ("20newsgroups-bydate", "gp_cnn")):  # fmt: skip
        (line,) = [line for line in table if f"run.py {data} " in line[1].replace("`", " ")
                   and (model in line[1] or "resnet" not in model)]  # fmt: skip
        (runs,) = [
            of for row, of in committed.rows_of(committed.read_runs()).items() if row[:2] == (data, model)
        ]
        others = [run for name, some in runs.items() for run in some
                  if name != "cross-entropy" and not run.results.get("kind")]  # fmt: skip
        for cell, some in ((line[2], runs["cross-entropy"]), (line[3], others)):
            minutes = sorted(run.results["train_seconds"] / 60 for run in some)
            found = [float(one) for one in re.findall(r"\d+\.\d", cell)]
            assert found == [float(f"{minutes[0]:.1f}"), float(f"{minutes[-1]:.1f}")], line


def test_what_is_said_of_guards_beside_their_rivals_is_in_the_committed_runs() -> None:
    rows = committed.rows_of(committed.read_runs())
    readme, guide = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/which-method.md")
    )
    cost, behind, clean = [], [], []
    for _, runs in guards.rows_with_guards(rows):
        nll = {
            one: statistics.fmean(run.number(one, "nll") or 0 for run in runs)
            for one in (shift.FAMILY_UNSEEN, "auto", guards.PERTURBED)
        }
        cost.append(100 * (nll[shift.FAMILY_UNSEEN] / nll["auto"] - 1))
        clean.append(nll[guards.PERTURBED] > nll[shift.FAMILY_UNSEEN])
        means = [
            committed.mean_shift(runs, one, shift.sets_of(FAMILIES))
            for one in (guards.PERTURBED, shift.FAMILY_UNSEEN)
        ]
        assert means[0] is not None
        assert means[1] is not None
        behind.append(100 * (means[0].mean - means[1].mean))
    assert f"it costs {min(cost):.1f} to {max(cost):.1f} % of the NLL of the auto head under it" in readme
    assert f"it costs {min(cost):.1f} to {max(cost):.1f} % of the NLL." in guide
    worse = [one for one in behind if one > 0]
    assert (len(behind), len(worse), all(clean)) == (8, 6, True)
    assert f"on six networks of eight, by {min(worse):.1f} to {max(worse):.1f} points" in guide


def test_autos_figure_shows_where_a_curve_goes_with_the_largest_gain() -> None:
    rows = committed.rows_of(committed.read_runs())
    bent = [run for row in rows for run in rows[row].get("cross-entropy", [])
            if (run.results.get("selection") or {}).get("bends")]  # fmt: skip
    gains = sorted(
        bent, key=lambda run: (run.number("auto", "nll") or 0) / (run.number("main+T", "nll") or 1)
    )
    figure = figures.reliability_of_auto(rows)
    assert figure is not None
    titles = [ax.get_title().replace("\n", " ") for ax in figure.axes if "auto" in ax.get_title()]
    assert titles == [f"{tables.row_title(run.row, rows)} auto" for run in gains[:2]]
    plain = {row: methods for row, methods in rows.items() if row.data.startswith("20news")}
    assert figures.reliability_of_auto(plain) is None


def test_what_select_says_of_few_samples_was_measured() -> None:
    measured = json.loads((committed.RESULTS / "held_back.json").read_text())
    found = [one for n, one in measured["excess_by_n"].items() if int(n) >= 50]
    today, first = (sorted(round(measured["draws"] * one[rule]["share_worse"]) for one in found)
                    for rule in ("today", "first"))  # fmt: skip
    worst = max(one["today"]["worst"] for one in found)
    told = " ".join((HeadBank.select.__doc__ or "").split())
    assert f"in {today[0]} to {today[-1]} of {measured['draws']} draws, by {worst:.3f} at most." in told
    assert told.endswith(f"it was {first[0]} to {first[-1]}.")
