"""Trials of guard settings: who learns from what, numbers worked by hand, and a small real run from end to end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from training_helpers import run, small

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import guard_search  # noqa: E402
import guard_sights  # noqa: E402
import guard_trials  # noqa: E402

from doublehead import shift_guard  # noqa: E402
from doublehead.data import FAMILIES, Normalise  # noqa: E402
from doublehead.shift_guard import Guard, Sights  # noqa: E402
from doublehead.training.config import LEFT_OUT  # noqa: E402
from doublehead.training.inputs import load_inputs  # noqa: E402
from doublehead.training.run_folder import RunFolder  # noqa: E402

QUICK = {**guard_trials.TRYING, "steps": 60}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def sights(n: int, strangeness: float, right: float) -> Sights:
    """Two classes, always 0.9 sure (logits 0 and log 9), right in a share of the cases; four kinds of strangeness."""
    labels = torch.zeros(n, dtype=torch.long)
    labels[round(right * n) :] = 1
    logits = torch.tensor([math.log(9), 0.0]).repeat(n, 1)
    return Sights(strangeness + 0.1 * torch.randn(n, 4), logits, labels)


@pytest.fixture
def seen() -> guard_sights.Seen:
    """Clean images right in 90 %, as sure as they should be; corrupted ones look strange and are right in half."""
    parts = {"fit": sights(300, 0, 0.9), "settle": sights(300, 0, 0.9), "held": sights(200, 0, 0.9)}
    for family in FAMILIES:
        parts[f"taught:{family}"] = sights(40, 2, 0.5)
        parts |= {f"{family}:{severity}": sights(100, 2, 0.5) for severity in (1, 3, 5)}
    about = {"network": "made up", "layers": ["a", "b"], "settings": guard_sights.LOOKING,
             "environment": {"device": "none"}}  # fmt: skip
    return guard_sights.Seen(parts, about)


def poisoned(seen: guard_sights.Seen, names: Sequence[str]) -> guard_sights.Seen:
    """With nan in place of all stages and logits of some parts, which no fit takes."""
    bad = {name: Sights(*(math.nan * part for part in seen.sights[name][:2]), seen.sights[name].labels)
           for name in names}  # fmt: skip
    return seen._replace(sights={**seen.sights, **bad})


def same(one: Guard, other: Guard) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


# Who learns from what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", LEFT_OUT)
def test_what_is_left_out_or_held_back_is_never_learned_from(fold: str, seen: guard_sights.Seen) -> None:
    held_back = [name for name in seen.sights if name not in ("fit", "settle") and "taught" not in name]
    assert len(held_back) == 1 + 3 * 13
    left_out = [f"taught:{family}" for family in LEFT_OUT[fold]]
    guard = guard_trials.fitted(seen, LEFT_OUT[fold], QUICK)
    assert same(guard, guard_trials.fitted(poisoned(seen, held_back + left_out), LEFT_OUT[fold], QUICK))
    for name in {f"taught:{family}" for family in FAMILIES} - set(left_out):  # all the others are
        with pytest.raises(ValueError, match=r"finite|nan"):
            guard_trials.fitted(poisoned(seen, [name]), LEFT_OUT[fold], QUICK)


def test_a_guard_on_measured_strangeness_is_the_librarys_own(seen: guard_sights.Seen) -> None:
    """The same to the last bit as a Guard that gets the stages."""
    stages = [torch.randn(300, 6), 1.5 * torch.randn(520, 6) + 1]
    clean = seen.sights["fit"]._replace(stages=stages[0])
    taught = [seen.sights[f"taught:{family}"] for family in FAMILIES]
    perturbed = Sights(stages[1], *(torch.cat(parts) for parts in list(zip(*taught))[1:]))
    guard = Guard([2, 4])
    guard.fit(clean, perturbed, steps=60)
    guard.settle(clean)
    fit, measured = Guard([2, 4])._measure(clean, perturbed)
    parts = {"fit": fit, "settle": guard_sights._strange(guard, clean), "taught:contrast": measured}
    ours = guard_trials.fitted(guard_sights.Seen(parts, {}), (), QUICK)
    assert 0 < guard.threshold < math.inf
    assert guard.scale != 1
    assert (ours.threshold, ours.scale) == (guard.threshold, guard.scale)
    factors = guard(stages[1])
    assert factors.min() < 0.9
    assert torch.equal(ours(guard.strangeness(stages[1])), factors)


# Numbers -----------------------------------------------------------------------------------------------------------


def test_a_trial_finds_what_there_is_to_find(seen: guard_sights.Seen) -> None:
    """0.9 sure and right in half: ECE 0.4 without a guard, next to none with one; clean images stay as they are."""
    scalar = guard_trials.temperature_scaling(seen)
    assert scalar["clean_ece"] == pytest.approx(0, abs=1e-4)
    assert scalar["clean_nll"] == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1), abs=1e-4)
    assert scalar["family_ece"] == scalar["kind_ece"] == pytest.approx(0.4, abs=1e-4)
    found = guard_trials.trial(seen, {**guard_trials.TRYING, "steps": 300})
    assert max(found["family_ece"], found["kind_ece"]) < 0.1
    assert found["clean_nll"] == pytest.approx(scalar["clean_nll"], abs=0.01)


def test_a_trial_takes_each_mean_over_what_its_guards_left_out(
    seen: guard_sights.Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards put in by hand: without a part of the families logits stay as they are, without a kind they become 0."""

    def by_hand(seen: guard_sights.Seen, left_out: Sequence[str], settings: Any) -> Guard:
        guard = guard_trials.Measured([1] * 4)
        guard.scale.fill_(float(left_out in [LEFT_OUT[part] for part in "123"]))
        return guard

    monkeypatch.setattr(guard_trials, "fitted", by_hand)
    for severity in (1, 3, 5):
        seen.sights[f"contrast:{severity}"] = sights(
            100, 2, 0.77
        )  # ECE 0.13, elsewhere 0.4; of logits 0: 0.27 and 0
    found = guard_trials.trial(seen, QUICK)
    assert found["family_ece"] == pytest.approx((0.13 + 12 * 0.4) / 13, abs=1e-6)
    assert found["kind_ece"] == pytest.approx(0.27 / 13, abs=1e-6)
    assert found["clean_ece"] == pytest.approx((3 * 0 + 4 * 0.4) / 7, abs=1e-6)  # right in 90 %
    nll = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert found["clean_nll"] == pytest.approx((3 * nll + 4 * math.log(2)) / 7, abs=1e-6)


def test_settings_hold_for_a_trial_and_no_longer(seen: guard_sights.Seen) -> None:
    before = vars(shift_guard).copy()
    with guard_sights.settled(guard_trials.read_setting("hidden=4,margin=2,cost=0.5")):
        assert (shift_guard.HIDDEN, shift_guard.MARGIN, shift_guard.COST) == (4, 2.0, 0.5)
        guard = guard_trials.fitted(seen, (), QUICK)
        assert guard.first.weight.shape == (4, 4)
    with pytest.raises(ValueError, match="keep must lie in 0..1"):
        guard_trials.trial(seen, guard_trials.read_setting("keep=2,hidden=4"))
    assert vars(shift_guard) == before
    plain, doubled = (guard_trials.trial(seen, {**QUICK, "margin": margin}) for margin in (0.0, 2.0))
    assert plain["family_ece"] == pytest.approx(0.4, abs=1e-3)  # no humility is shown
    assert doubled["family_ece"] < 0.3


# Entries -----------------------------------------------------------------------------------------------------------


def test_entries_are_worded_like_those_that_are_there(
    seen: guard_sights.Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = dict.fromkeys(("clean_ece", "clean_nll", "family_ece", "kind_ece"), 0.123456789)
    monkeypatch.setattr(guard_trials, "trial", lambda seen, settings: numbers)
    seen.about["layers"] = list("abcdefghi")
    chosen, *_ = (one for one in guard_search.read_search() if one.get("chosen"))
    made = guard_trials.entry(seen, guard_trials.read_setting("keep=0.9"))
    assert {key: made[key] for key in ("reads", "form", "keep")} == {
        key: chosen[key] for key in ("reads", "form", "keep")
    }
    assert (made["chosen"], made["clean_ece"], made["n_images"]) == (True, 0.123457, 200)
    assert set(made) - set(guard_search.OPTIONAL) == set(guard_search.KEYS)
    other = guard_trials.entry(seen, guard_trials.read_setting("margin=1,hidden=128,steps=3000,cost=0"))
    assert other["form"] == "all from twice the threshold on, then a temperature"
    assert other["note"] == "128 hidden units; 3,000 steps; cost of humility 0"
    seen.about["settings"] = {**guard_sights.LOOKING, "shrink": 0.1, "n_layers": 6}
    other = guard_trials.entry(seen, guard_trials.read_setting("keep=0.9"))
    assert other["note"] == "covariance shrunk by 0.1"  # as the record has it
    assert not any("chosen" in one for one in (other, guard_trials.entry(seen, None)))
    assert guard_trials.entry(seen, None)["form"] == "temperature scaling"


def test_a_trial_made_again_takes_its_own_place_alone(tmp_path: Path) -> None:
    tried = guard_search.read_search()[:3]
    again = {**tried[1], "clean_ece": 0.5}
    noted = {**tried[1], "note": "otherwise"}
    guard_search.keep_search([*tried, again, noted], tmp_path)
    assert guard_search.read_search(tmp_path) == [tried[0], again, tried[2], noted]


@pytest.mark.parametrize(
    ("text", "message"), [("kept=1", "must set some of keep, margin.*got kept"), ("keep=all", "numbers")]
)
def test_settings_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(guard_trials.argparse.ArgumentTypeError, match=message):
        guard_trials.read_setting(text)


# Looking -----------------------------------------------------------------------------------------------------------


def test_each_image_is_corrupted_by_the_family_that_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Shifts paints the number of the one family that it may use."""

    def painter(share: float, normalise: Normalise, leave_out: Sequence[str]) -> Any:
        (family,) = set(FAMILIES) - set(leave_out)
        assert share == 1
        return lambda images: torch.full_like(images, FAMILIES.index(family))

    monkeypatch.setattr(guard_sights, "Shifts", painter)
    dealt: list[Tensor] = []
    images = torch.full((30, 3, 4, 4), -1.0)
    painted = guard_sights.deal(FAMILIES, Normalise.of(np.zeros((1, 4, 4, 3), np.uint8)), dealt, images)
    assert torch.equal(painted[:, 0, 0, 0].long(), dealt[0])
    assert dealt[0].bincount().tolist().count(2) == 9  # 30 images, 13 families: 2 or 3 each
    assert (images == -1).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    run(small(model="tiny_networks:norm_mlp", n_train=240, n_calib=200, n_test=100), path, splits=None)
    return path


@pytest.mark.parametrize("device", DEVICES)
def test_what_look_keeps(folder: Path, device: str, tmp_path: Path) -> None:
    settings = {**guard_sights.LOOKING, "views": 2, "channels": 16}
    seen = guard_sights.look(RunFolder(folder), "small", torch.device(device), None, settings)
    assert shift_guard.CHANNELS == 128
    grey = [family for family in FAMILIES if family != "saturate"]
    assert len(seen.sights) == 3 + 12 + 3 * 12
    sizes = {part: len(seen.sights[part].labels) for part in ("fit", "settle", "held", "contrast:5")}
    assert sizes == {"fit": 140, "settle": 140, "held": 60, "contrast:5": 60}
    assert sum(len(seen.sights[f"taught:{family}"].labels) for family in grey) == 2 * 140
    near, far = (seen.sights[part].stages.cpu() for part in ("settle", "fit"))
    assert (near < far)[:, 0].all()  # a row is nearer to what it is part of; one place alone has no deviation
    assert near.shape == (140, 2)  # means and deviations of one layer
    assert seen.sights["impulse_noise:5"].stages.mean() > seen.sights["held"].stages.mean() + 0.1
    seen.save(tmp_path / "sights.npz")
    again = guard_sights.Seen.load(tmp_path / "sights.npz")
    assert again.about == seen.about
    assert again.sights.keys() == seen.sights.keys()
    for name, one in again.sights.items():
        assert all(torch.equal(mine, theirs.cpu()) for mine, theirs in zip(one, seen.sights[name])), name


def test_no_image_is_in_both_parts(folder: Path) -> None:
    inputs = load_inputs(RunFolder(folder).config, torch.device("cpu"), None, None)
    learn, held = (
        [image.numpy().tobytes() for images, _ in part for image in images]
        for part in guard_sights.divided(inputs, 0)
    )
    everything = [
        image.numpy().tobytes() for images, _ in inputs.whole(inputs.splits.calib) for image in images
    ]
    assert sorted(learn + held) == sorted(everything)
    assert not set(learn) & set(held)
    assert held != [
        image.numpy().tobytes() for images, _ in guard_sights.divided(inputs, 1)[1] for image in images
    ]


@pytest.mark.slow
def test_from_a_run_to_the_table(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "sights.npz")
    monkeypatch.setattr(
        sys, "argv", ["", "look", str(folder), "--output", file, "--network", "F", "--views", "1"]
    )
    guard_trials.main()
    setting = ["--setting", "steps=20", "--setting", "steps=20,keep=0.5"]
    monkeypatch.setattr(sys, "argv", ["", "try", file, *setting, "--results", str(tmp_path)])
    for _ in range(2):  # the same again: nothing is added
        guard_trials.main()
    tried = guard_search.read_search(tmp_path)
    note = "corrupted copies to learn from: 1; 20 steps"
    assert {one["network"] for one in tried} == {"F"}
    assert [(one["keep"], one.get("note")) for one in tried] == [(None, None), (0.9, note), (0.5, note)]
    assert all(
        0 < one[key] < 3 for one in tried for key in ("clean_ece", "clean_nll", "family_ece", "kind_ece")
    )
    assert json.loads((tmp_path / guard_search.NAME).read_text()) == tried
    assert len(guard_search.search_table(tried).lines) == 3


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must be the folder of a finished run"):
        guard_sights.look(RunFolder(tmp_path), "none", torch.device("cpu"), None, guard_sights.LOOKING)
