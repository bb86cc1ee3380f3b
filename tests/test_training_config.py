"""What a run is asked for: settings that are checked, kept, named and dealt out to runs."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from doublehead import HeadSpec
from doublehead.training.config import BETAS, METHODS, RECIPES, Config, learning_rate, runs_for


@pytest.mark.parametrize("config", [*RECIPES.values(), *(m.apply(Config()) for m in METHODS.values())])
def test_json_and_back(config: Config) -> None:
    again = Config.from_json(config.to_json())
    assert again == config
    assert again.folder_name == config.folder_name


def test_json_keeps_tuples_numbers_and_heads() -> None:
    heads = {"a": HeadSpec(reads=("statistics", "features"), hidden=7, lr=0.3)}
    config = Config(
        heads=heads, augment_of={"a": "noise"}, every_of={"a": 70}, auto=True, guards=("shifts", "noise+broad"),
        shift=("gaussian_noise:2", "svhn"), milestones=(1 / 3,), calib_clip=float("inf"),
        loss="focal", loss_options={"gamma": 2}, model_options={"depth": 16, "dropout": 0.3},
    )  # fmt: skip
    again = Config.from_json(config.to_json())
    assert again == config
    assert again.heads["a"].reads == ("statistics", "features")
    assert isinstance(again.loss_options["gamma"], float)
    with pytest.raises(ValueError, match=r"not known here: \['speed'\]"):
        Config.from_json(json.dumps({**json.loads(config.to_json()), "speed": 3}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
        ({"epochs": True}, "epochs must be a whole number, got True"),
        ({"n_train": 0}, "n_train must be at least 1, got 0"),
        ({"lr": 0}, "lr must be positive, got 0.0"),
        ({"lr": float("nan")}, "lr must be a number, got nan"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"compile": 1}, "compile must be true or false, got 1"),
        ({"model": 50}, "model must be text, got 50"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adam, adagrad, got 'lion'"),
        ({"precision": "16"}, "precision must be one of 32-true, bf16-mixed, got '16'"),
        ({"warmup": 1.0}, "warmup must be a share of the run, 0 or more and below 1, got 1.0"),
        ({"loss": "hinge"}, "loss must be one of cross_entropy, .* got 'hinge'"),
        ({"loss": "focal", "loss_options": {"gama": 1}}, r"loss_options must be among \['gamma'\] for focal"),
        ({"model_options": [1]}, "model_options must be a table of names and values"),
        ({"loss_options": [1]}, "loss_options must be a table of names and values"),
        ({"calib_augment": "fog"}, "calib_augment must be one of .* got 'fog'"),
        ({"auto": True, "guards": ("fog",)}, "guards must be one of .*shifts, got 'fog'"),
        ({"auto": True, "guards": ("shifts", "")}, "guards must be one of .* got ''"),
        ({"guards": ("shifts",)}, r"guards must be empty without auto, .* got \('shifts',\)"),
        ({"heads": {"guarded@x": HeadSpec()}}, r"heads must be named otherwise than .* got \['guarded@x'\]"),
        ({"augment_of": {"nobody": "noise"}}, r"must be about heads of this run, got \['nobody'\]"),
        ({"every_of": {"auto": 0}}, r"every_of\['auto'\] must be at least 1, got 0"),
        ({"heads": {"main": HeadSpec()}}, r"than main and auto and opinion and guarded, got \['main'\]"),
        ({"heads": {"../up": HeadSpec()}}, r"heads must be named by letters, .* got \['../up'\]"),
        ({"shift": ("gaussian_noise:9",)}, "shift must be of a severity from 1 to 5, got 'gaussian_noise:9'"),
        ({"shift": ("contrast:12",)}, "shift must be of a severity from 1 to 5, got 'contrast:12'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**settings)


def test_each_setting_has_its_own_folder() -> None:
    base = Config()
    changes = [{"lr": 0.05}, {"n_train": 500}, {"shift": ("svhn",)}, {"auto": True}]
    changes += [{"heads": {"a": spec}} for spec in (HeadSpec(), HeadSpec(beta0=1.1))]
    changes += [{"auto": True, "guards": (guard,)} for guard in ("shifts", "broad")]
    others = [replace(base, **change) for change in changes]
    names = {config.folder_name for config in (base, *others)}
    assert len(names) == len(others) + 1
    assert len({config.name for config in (base, *others)}) == 1
    assert replace(base, workers=8).folder_name == base.folder_name
    assert replace(base, workers=8) == base  # as many processes as you like read the files


def test_names_are_names_of_folders() -> None:
    config = Config(data="table:/home/me/my reviews.csv", model="package.module:factory", loss="focal")
    assert config.name == "table-home-me-my-reviews.csv-package.module-factory-focal-e80-s0"
    assert re.fullmatch(r"[\w.+-]+-[0-9a-f]{6}", config.folder_name)
    assert replace(config, loss_options={"gamma": 2.0}).name.endswith("-focal-gamma2-e80-s0")


def test_heads_of_one_perturbation_and_period_form_a_group() -> None:
    heads, augment_of = {name: HeadSpec() for name in "abcd"}, {"b": "noise", "c": "noise"}
    config = Config(heads=heads, augment_of=augment_of, every_of={"c": 70}, auto=True)
    groups = {"heads": ["a", "d"], "heads-noise": ["b"], "heads-noise-k70": ["c"]}
    assert config.head_groups() == groups


def test_cosine_and_steps_by_hand() -> None:
    cosine = Config(lr=0.2, warmup=0.0)
    assert [round(learning_rate(cosine, at), 6) for at in (0, 1 / 3, 0.5, 1)] == [0.2, 0.15, 0.1, 0.0]
    steps = Config(lr=0.1, schedule="steps", warmup=0.0)  # 350 epochs: down at 150 and 250
    rates = [learning_rate(steps, epoch / 350) for epoch in (0, 149, 150, 249, 250, 349)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert learning_rate(Config(schedule="constant", lr=0.3), 0.9) == 0.3
    warm = Config(schedule="constant", lr=0.3, warmup=0.2)
    assert [learning_rate(warm, at) for at in (0, 0.05, 0.2, 0.5)] == pytest.approx([0, 0.075, 0.3, 0.3])


def test_methods_with_one_loss_share_a_run() -> None:
    names = ["brier", "cross-entropy", "auto", "mixup", "double-head", "sweep", "focal"]
    runs = runs_for(Config(epochs=5), names)
    groups = [["brier"], ["cross-entropy", "auto", "double-head", "sweep"], ["mixup"], ["focal"]]
    assert [group for _, group in runs] == groups
    brier, cross_entropy, mixup, focal = (config for config, _ in runs)
    assert (brier.loss, focal.loss, mixup.mixup) == ("brier", "focal", 0.2)
    assert len(cross_entropy.heads) == 1 + 2 * len(BETAS)
    assert cross_entropy.auto
    assert not brier.heads
    assert not brier.auto
    assert {config.epochs for config, _ in runs} == {5}


def test_guards_of_methods_and_config_join() -> None:
    config = METHODS["guarded"].apply(Config(auto=True, guards=("noise", "shifts")))
    assert config.guards == ("noise", "shifts")
    ((config, names),) = runs_for(Config(), ["cross-entropy", "auto", "guarded", "double-head"])
    assert names == ["cross-entropy", "auto", "guarded", "double-head"]
    assert config.guards == ("shifts",)
    assert METHODS["auto"].apply(config).guards == ("shifts",)
