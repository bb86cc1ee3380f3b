"""The choice by cross-validation, and fitted calibrators kept in files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from doublehead.calibrators import (
    CALIBRATORS,
    HistogramBinning,
    NotConverged,
    Temperature,
    choose,
    load,
    save,
    temperature,
)
from doublehead.calibrators.choose import _fold_of
from doublehead.predictions import Predictions


def overconfident(n: int = 400, k: int = 3, seed: int = 0) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return Predictions(3 * logits, labels)


def test_the_right_calibrator_wins_and_is_fitted_on_everything() -> None:
    p = overconfident()
    choice = choose(p, ["none", "temperature", "histogram", "beta"])
    assert choice.method == "temperature"
    assert isinstance(choice.calibrator, Temperature)
    assert torch.equal(choice.calibrator.temperature_, Temperature().fit(p).temperature_)
    assert choice.scores[0].method == "temperature"
    assert [score.nll for score in choice.scores] == sorted(score.nll for score in choice.scores)


def test_scores_agree_with_a_loop() -> None:
    p = overconfident(n=50)
    choice = choose(p, ["none", "temperature"], folds=5, seed=3)
    fold_of = _fold_of(50, 5, 3)
    losses = torch.empty(50, dtype=torch.float64)
    for i in range(50):
        others = fold_of != fold_of[i]
        t = Temperature().fit(Predictions(p.logits[others], p.labels[others])).temperature_
        losses[i] = cross_entropy(p.logits[i : i + 1] / t, p.labels[i : i + 1])
    first, second = choice.scores
    assert first.nll == pytest.approx(float(losses.mean()), rel=1e-9)
    assert (first.behind, first.behind_error) == (0, 0)
    plain = cross_entropy(p.logits, p.labels, reduction="none")
    assert second.behind == pytest.approx(float((plain - losses).mean()), rel=1e-9)
    assert second.behind_error == pytest.approx(float((plain - losses).std() / math.sqrt(50)), rel=1e-9)


def test_folds_are_balanced_and_depend_on_the_seed_alone() -> None:
    counts = _fold_of(52, 5, 0).bincount()
    assert sorted(counts.tolist()) == [10, 10, 10, 11, 11]
    assert torch.equal(_fold_of(52, 5, 0), _fold_of(52, 5, 0))
    assert not torch.equal(_fold_of(52, 5, 0), _fold_of(52, 5, 1))


def test_all_methods_that_suit_are_tried_by_default() -> None:
    names = {score.method for score in choose(overconfident(n=60), folds=2).scores}
    assert names == set(CALIBRATORS) - {"temperature_grid", "platt"}
    assert "platt" in {score.method for score in choose(overconfident(n=40, k=2), folds=2).scores}
    many = {score.method for score in choose(overconfident(n=30, k=101), folds=2).scores}
    assert "temperature" in many
    assert not many & {"matrix", "dirichlet", "beta", "bbq"}


def test_calibrators_with_parameters_race_under_their_own_names() -> None:
    p = overconfident()
    choice = choose(p, {"coarse": HistogramBinning(n_bins=1), "fine": HistogramBinning(n_bins=12)})
    assert choice.method == "fine"
    assert choice.calibrator.get_params()["n_bins"] == 12


def test_what_cannot_be_fitted_is_listed_with_its_reason() -> None:
    choice = choose(overconfident(), ["platt", "temperature"])
    last = choice.scores[-1]
    assert last.method == "platt"
    assert math.isnan(last.nll)
    assert "Platt needs predictions of 2 classes, got 3 classes" in last.note
    with pytest.raises(ValueError, match="none of the methods could be fitted: platt: Platt needs"):
        choose(overconfident(), ["platt"])


def test_unfinished_fits_are_noted_without_a_warning(monkeypatch, recwarn) -> None:
    p = overconfident()
    honest = Predictions(p.logits / 3, p.labels)
    monkeypatch.setattr(temperature, "MAX_PASSES", 1)
    choice = choose(honest, ["none", "temperature"])
    assert choice.method == "none"
    assert choice.scores[1].note == "did not converge in 5 of 5 folds"
    assert not [w for w in recwarn.list if issubclass(w.category, NotConverged)]


def test_the_reason_is_one_sentence() -> None:
    why = choose(overconfident(), ["none", "temperature"]).why()
    assert why.startswith("temperature has the lowest cross-validated NLL, ")
    assert "; next is none, " in why
    assert "next" not in choose(overconfident(), ["temperature"]).why()


@pytest.mark.parametrize("folds", [1, 401])
def test_a_wrong_number_of_folds_is_refused(folds: int) -> None:
    with pytest.raises(ValueError, match=rf"folds must lie in 2..400, the number of samples, got {folds}"):
        choose(overconfident(), folds=folds)


def test_unknown_and_missing_methods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method must be one of \['bbq', .* got 'temperatur'"):
        choose(overconfident(), ["temperatur"])
    with pytest.raises(ValueError, match="methods must name at least one calibrator, got none"):
        choose(overconfident(), [])


# Files


def test_saved_files_hold_no_code_and_say_what_they_are(tmp_path) -> None:
    path = save(HistogramBinning(n_bins=3).fit(overconfident()), tmp_path / "h.safetensors")
    about = json.loads((tmp_path / "h.json").read_text())
    assert about["method"] == "histogram"
    assert about["params"] == {"n_bins": 3, "kind": "top", "scheme": "mass", "smoothing": 1.0}
    assert path.read_bytes()[8:9] == b"{"  # a safetensors header


def test_files_of_two_calibrators_are_not_taken_for_one(tmp_path) -> None:
    a = save(Temperature().fit(overconfident()), tmp_path / "a.safetensors")
    b = save(Temperature().fit(overconfident(seed=1)), tmp_path / "b.safetensors")
    a.write_bytes(b.read_bytes())
    with pytest.raises(ValueError, match=r"a.safetensors and a.json do not belong together: save it again"):
        load(a)


def test_foreign_files_are_refused(tmp_path) -> None:
    path = save(Temperature().fit(overconfident()), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"path must end in .safetensors, got 'a.pt'"):
        load(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"path must end in .safetensors"):
        save(Temperature().fit(overconfident()), tmp_path / "a")
    path.with_suffix(".json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="must describe a saved calibrator"):
        load(path)
    path.with_suffix(".json").write_text("not json")
    with pytest.raises(ValueError, match="is not JSON"):
        load(path)


def test_only_registered_calibrators_are_saved(tmp_path) -> None:
    class Own(Temperature):
        pass

    with pytest.raises(TypeError, match=r"calibrator must be one of \[.*\], got a Own"):
        save(Own().fit(overconfident()), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = save(Temperature().fit(overconfident()), tmp_path / "a.safetensors")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(Temperature().fit(overconfident(seed=1)), path)
    assert path.read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.json", "a.safetensors"]


def test_the_example_of_the_guide_runs(tmp_path, monkeypatch, capsys) -> None:
    guide = Path(__file__).resolve().parents[1] / "docs" / "calibrators.md"
    code = guide.read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(guide), "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert 2 < float(first) < 4
    assert "has the lowest cross-validated NLL" in second


def test_the_guide_lists_every_calibrator() -> None:
    guide = (Path(__file__).resolve().parents[1] / "docs" / "calibrators.md").read_text()
    for name, kind in CALIBRATORS.items():
        assert f"`{name}`" in guide, name
        assert f"`{kind.__name__}`" in guide, name
