"""What is published about the theorems agrees with the functions."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
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


def test_numbers_and_pictures_are_made_from_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    pytest.importorskip("pandas")
    monkeypatch.syspath_prepend(ROOT / "experiments")
    script = importlib.import_module("theory")
    monkeypatch.setattr(script, "N_VECTORS", 20)
    logits = 4 * torch.randn(2000, 10)
    labels = torch.multinomial(logits.softmax(1), 1)
    np.savez(tmp_path / "some.npz", test_logits=logits.numpy(), test_labels=labels.numpy())
    script.write(tmp_path / "some.npz", tmp_path)
    assert min((tmp_path / f"theorem{number}.png").stat().st_size for number in (1, 2)) > 20_000
    found = json.loads((tmp_path / "theory.json").read_text())
    assert found["theorem1"]["random"]["violated"] == found["theorem1"]["real"]["violated"] == 0
    assert found["theorem1"]["real"]["appendix_violated"] > 0
    random = found["theorem2"]["confidences_from_a_half"]
    assert 0.5 < random["violated_shannon"] / script.N_RANDOM < 0.9
    assert random["negative_right_side"] > random["violated_literal"] == random["violated_brier"] == 0
