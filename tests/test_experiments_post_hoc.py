"""The comparison of calibrators on the logits of trained networks."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import Predictions, metrics
from doublehead.calibrators import CALIBRATORS, Temperature

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
pytest.importorskip("matplotlib")

import committed
import post_hoc

ROOT = Path(__file__).resolve().parents[1]


def overconfident(n: int, seed: int) -> Predictions:
    """Logits that say three times what they know."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 4, generator=draw)
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    return Predictions(3 * logits, labels)


def test_no_sample_has_a_say_in_its_own_calibration() -> None:
    calib = overconfident(100, 0)
    before = post_hoc.cross_fitted(CALIBRATORS["histogram"](), calib)
    row = 17
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    place = int((order == row).nonzero())
    labels = calib.labels.clone()
    labels[row] = (labels[row] + 1) % 4
    after = post_hoc.cross_fitted(CALIBRATORS["histogram"](), Predictions(calib.logits, labels))
    assert before.labels.tolist() == calib.labels[order].tolist()
    same = (before.logits == after.logits).all(1)
    fold = slice(20 * (place // 20), 20 * (place // 20) + 20)
    assert bool(same[fold].all())
    assert not bool(same.all())


def test_a_run_folder_and_a_file_give_the_numbers_of_the_calibrator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calib, test = overconfident(300, 1), overconfident(500, 2)
    (tmp_path / "run" / "predictions").mkdir(parents=True)
    calib.save(tmp_path / "run/predictions/calib-main.npz")
    test.save(tmp_path / "run/predictions/test-main.npz")
    parts = {"val": calib, "test": test}
    arrays = {f"{name}_logits": part.logits.numpy() for name, part in parts.items()}
    arrays |= {f"{name}_labels": part.labels.numpy()[:, None] for name, part in parts.items()}
    np.savez(tmp_path / "published.npz", **arrays)
    for name, source in (("ours", "run"), ("theirs", "published.npz")):
        command = [
            "x",
            name,
            str(tmp_path / source),
            "--calibrators",
            "none",  # temperature comes along: all are compared with it
            "--results",
            str(tmp_path),
        ]
        monkeypatch.setattr(sys, "argv", command)
        post_hoc.main()
    assert "temperature" in capsys.readouterr().out
    found = json.loads((tmp_path / post_hoc.NAME).read_text())
    scaled = Temperature().fit(calib).calibrate(test)
    for network in ("ours", "theirs"):
        none, temperature = found[network]["numbers"]
        assert none["nll"] == pytest.approx(float(metrics.nll(test)), rel=1e-5)
        assert temperature["nll"] == pytest.approx(float(metrics.nll(scaled)), rel=1e-5)
        assert temperature["ece"] == pytest.approx(float(metrics.ece(scaled)), rel=1e-5)
        assert (found[network]["calib"], found[network]["test"]) == (300, 500)
        assert {"commit", "torch", "device"} <= set(found[network]["environment"])


def test_a_file_without_test_data_is_split_inside_each_class(tmp_path: Path) -> None:
    labels = np.arange(40).repeat(5)
    np.savez(tmp_path / "one.npz", logits=np.random.default_rng(0).normal(size=(200, 40)), labels=labels)
    found = list(post_hoc.pairs(tmp_path / "one.npz"))
    assert len(found) == post_hoc.SPLITS
    for calib, test in found:
        assert len(calib) == len(test) == 100
        assert set(calib.labels.bincount().tolist()) == {2, 3}


def test_the_table_marks_what_is_better_and_what_is_inside(tmp_path: Path) -> None:
    def numbers(name: str, cv_nll: float, nll: float, ece: float) -> dict[str, object]:
        return {"calibrator": name, "cv_nll": cv_nll, "cv_ece": 0.01, "nll": nll, "ece": ece, "low": 0.004,
                "high": 0.009, "brier": 0.2, "accuracy": 0.9}  # fmt: skip

    one = [numbers("temperature", 0.3, 0.31, 0.01), numbers("spline", 0.29, 0.32, 0.008)]
    found = {"A": {"calib": 5000, "test": 10000, "numbers": [*one, numbers("spline", 0.27, 0.32, 0.008)]}}
    (tmp_path / post_hoc.NAME).write_text(json.dumps(found))
    table = post_hoc.post_hoc_table(tmp_path)
    assert table is not None
    assert table.lines == [
        ["A", "temperature", "0.3000", "1.00", "0.3100", "1.00 (0.40 to 0.90)", "0.2000", "90.00"],
        ["", "spline", "*0.2800*", "1.00", "0.3200", "**0.80** (0.40 to 0.90)", "0.2000", "90.00"],
    ]
    assert post_hoc.post_hoc_text(tmp_path) == (
        "Cross-fitted on calibration data, below the scalar temperature's NLL: spline on 1 of 1 networks. "
        "ECE on test data not above the band: spline on 1 of 1."
    )
    assert post_hoc.post_hoc_table(tmp_path / "nothing") is None


def test_the_guides_table_of_published_networks(tmp_path: Path) -> None:
    def numbers(**nlls: float) -> dict[str, Any]:
        return {"numbers": [{"calibrator": name, "nll": nll, "ece": nll / 10} for name, nll in nlls.items()]}

    first, second = post_hoc.PUBLISHED
    found = {
        second: numbers(none=0.5, spline=0.4),
        "ours": numbers(none=9.0),
        first: numbers(none=0.3, head=0.2),
    }
    (tmp_path / post_hoc.NAME).write_text(json.dumps(found))
    table = post_hoc.two_networks(tmp_path)
    assert table.head == ["", "CIFAR-10: NLL", "CIFAR-10: ECE", "ImageNet: NLL", "ImageNet: ECE"]
    assert table.lines == [
        ["none", "0.3000", "3.00", "0.5000", "5.00"],
        ["head", "**0.2000**", "2.00", "-", "-"],
        ["spline", "-", "-", "**0.4000**", "4.00"],
    ]
    assert post_hoc.two_networks(tmp_path / "nothing").lines == [["not run"]]


def test_calibrators_beside_a_peers(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    assert post_hoc.beside_peers(file).lines == [["not run"]]
    numbers = [{"method": name, "nll": nll, "ece": 0.01} for name, nll in
               (("head", 0.2), ("head", 0.4), ("sms", 0.5), ("sms", 0.25))]  # fmt: skip
    file.write_text(json.dumps({"a network": {"numbers": numbers}, "another": {"numbers": numbers[1:3]}}))
    table = post_hoc.beside_peers(file)
    assert table.head == ["NLL / ECE", "head", "sms"]
    assert table.lines[0] == ["a network", "**0.3000** / 1.00", "0.3750 / 1.00"]
    assert table.lines[1] == ["another", "**0.4000** / 1.00", "0.5000 / 1.00"]


def test_what_is_said_of_probmetrics_was_measured() -> None:
    readme, guide = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/calibrators.md")
    )
    ours = json.loads((committed.RESULTS / post_hoc.NAME).read_text())
    lead, behind_sms, lowest = [], {}, 0
    for network, one in json.loads(post_hoc.PEERS_FILE.read_text()).items():
        nlls: dict[str, float] = {}
        for name in {run["method"] for run in one["numbers"]}:
            nlls[name] = statistics.fmean(run["nll"] for run in one["numbers"] if run["method"] == name)
        same = [run["nll"] for run in ours[network]["numbers"] if run["calibrator"] == "head"]
        assert nlls["head"] == pytest.approx(statistics.fmean(same), rel=1e-4)
        assert nlls["temperature"] == pytest.approx(nlls["probmetrics temp-scaling"], abs=2e-5)
        best = min(nll for name, nll in nlls.items() if name.startswith("probmetrics"))
        lead.append(100 * (1 - nlls["head"] / best))
        behind_sms[network] = 100 * (1 - nlls["probmetrics sms"] / nlls["head"])
        lowest += nlls["head"] == min(nlls.values())
    assert (len(lead), lowest, sum(one > 0 for one in lead)) == (13, 7, 7)
    assert f"lower on seven networks of thirteen, by up to {max(lead):.1f} %" in readme
    behind = {name: -one for name, one in zip(behind_sms, lead) if one < 0}
    on_texts = [one for name, one in behind.items() if name.startswith(("SST", "20 News"))]
    on_images = [one for name, one in behind.items() if not name.startswith(("SST", "20 News"))]
    assert (len(on_images), len(on_texts)) == (3, 3)
    said = f"higher on three of images, by up to {max(on_images):.1f} %, and all three of texts, by up to"
    assert f"{said} {max(on_texts):.1f} %." in readme
    assert f"lowest NLL on seven networks of thirteen, by up to {max(lead):.1f} % of the best" in guide
    assert sum(one < 0 for one in behind_sms.values()) == 8  # "is below `sms` on eight"
    texts = sorted(one for name, one in behind_sms.items() if name.startswith(("SST", "20 News")))
    assert len(texts) == 3
    assert f"by {texts[0]:.1f} to {texts[-1]:.1f} %, and a little on two image networks" in guide


def test_the_committed_numbers_fit_the_committed_runs_and_what_is_said_of_them() -> None:
    networks = json.loads((committed.RESULTS / post_hoc.NAME).read_text())
    runs = {run.name: run for run in committed.read_runs()}
    seen = set()
    for network in networks.values():
        scalar = [one for one in network["numbers"] if one["calibrator"] == "temperature"]
        for name, one in zip(network["sources"], scalar):
            if name in runs and runs[name].has(committed.FITTED):
                seen.add(runs[name].row)
                for key, near in {"ece": 0.02, "nll": 1e-4, "brier": 1e-4, "accuracy": 1e-9}.items():
                    assert one[key] == pytest.approx(runs[name].number("main+T", key), rel=near)
    assert len(seen) >= 8

    def mean(calibrator: str, key: str, network: str = "CIFAR-10, ResNet-50") -> float:
        return statistics.fmean(
            one[key] for one in networks[network]["numbers"] if one["calibrator"] == calibrator
        )

    readme, guide = (
        " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/which-method.md")
    )
    with_head = [
        name for name, one in networks.items() if "head" in {run["calibrator"] for run in one["numbers"]}
    ]
    assert len(with_head) == len(networks) == 13
    gains = [mean("temperature", "nll", name) - mean("head", "nll", name) for name in with_head]
    *others, least, none, nor = sorted(gains, reverse=True)
    assert [none, nor] == pytest.approx([0, 0], abs=5e-6)  # "the same on two"
    assert f"eleven networks of thirteen, by {least:.4f} to {others[0]:.4f}, and the same on two" in guide
    share = max(gain / mean("temperature", "nll", name) for gain, name in zip(gains, with_head))
    assert f"by up to {100 * share:.1f} %, and equal on two; its ECE was not above" in readme
    assert "above a perfect model's band on ten" in readme
    assert sum(mean("head", "ece", name) <= mean("head", "high", name) for name in with_head) == 10
    lower = [mean("gaussian_process", "nll", name) < mean("temperature", "nll", name) for name in networks]
    assert (lower.count(True), len(lower)) == (12, 13)  # "on twelve networks of thirteen"

    published = "CIFAR-10, ResNet-110 (published logits)"
    for name in ("gaussian_process", "spline"):
        assert mean(name, "ece") <= mean(name, "high")
        assert round(mean(name, "nll"), 4) <= round(mean("temperature", "nll"), 4)
        assert (
            mean(name, "high", published)
            < mean(name, "ece", published)
            < mean("temperature", "ece", published)
        )
