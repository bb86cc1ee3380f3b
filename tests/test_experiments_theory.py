"""What is published about the theorems agrees with the functions."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from doublehead.theory import Theorem2, theorem2

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return json.loads((ROOT / "docs/results/theory.json").read_text())


def test_what_the_results_file_holds_of_both_theorems(published: dict[str, Any]) -> None:
    first, second = published["theorem1"], published["theorem2"]
    for kind in ("random", "real"):
        assert first[kind]["violated"] == 0
        assert first[kind]["appendix_violated"] > 0
    for kind in ("confidences_from_a_half", "confidences_from_zero"):
        assert second[kind]["violated_shannon"] > 0.1 * second[kind]["n"]
        assert second[kind]["violated_literal"] == second[kind]["violated_brier"] == 0


def test_the_results_file_agrees_with_the_functions(published: dict[str, Any]) -> None:
    example = published["theorem2"]["counterexample"]
    for name, value in zip(Theorem2._fields, theorem2(example["confidence"], example["correct"])):
        assert example[name] == pytest.approx(float(value), abs=1e-6)
    assert {"seed", "commit", "torch", "device", "time"} <= set(published["certificate"])


def test_the_pictures_are_drawn_from_the_results_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    pytest.importorskip("pandas")
    monkeypatch.syspath_prepend(ROOT / "experiments")
    script = importlib.import_module("theory")
    script.draw(tmp_path)
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 20_000
    t = script.random_distributions(500, 0.5, torch.Generator().manual_seed(0))
    assert 0.5 < (~t.holds_shannon).double().mean() < 0.9
