"""What a run is: one frozen dataclass, and the paper's settings as recipes of differences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from doublehead.head_bank import HeadSpec

PERTURBATIONS = ("", "noise", "broad", "noise+broad")


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes. Two equal configs give the same run."""

    data: str = "cifar10"
    model: str = "resnet50"
    loss: str = "cross_entropy"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    mixup: float = 0.0  # alpha of mixup; 0 switches it off
    heads: Mapping[str, HeadSpec] = field(
        default_factory=dict
    )  # trained beside the network on all calibration data
    auto: bool = (
        False  # also train the bank behind beta0="auto" and choose from it on held-back calibration data
    )
    hold_back: float = 0.2  # the share of the calibration data that `auto` holds back
    epochs: int = 200
    batch_size: int = 128
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    milestones: tuple[float, ...] = (150 / 350, 250 / 350)  # of `schedule="steps"`, as shares of the run
    augment: Literal["crop-flip", "crop", "none"] = "crop-flip"  # of the training images
    every: int = 10  # network steps per calibration step: the paper's k
    calib_batch_size: int = 128
    calib_lr: float = 1.0  # of all heads, relative to lr; follows the same schedule
    calib_weight_decay: float = 5e-5
    calib_clip: float = 1.0  # the 2-norm to which a head's gradient is clipped
    calib_augment: str = ""  # the paper's g, for distribution shift: noise, broad or noise+broad
    augment_of: Mapping[str, str] = field(
        default_factory=dict
    )  # heads (by name, or "auto") that have another g
    embeddings: str = "glove"  # of text networks: "glove" or "random:50"
    max_words: int = 400  # longer texts are cut
    image_size: int = 224  # of images read from files
    workers: int = 0  # processes that read image files
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    compile: bool = False
    n_train: int | None = None  # use only the first samples of a split: for a quick try, not for numbers
    n_calib: int | None = None
    n_test: int | None = None
    evaluate_every: int = 1  # epochs between two lines of metrics
    record_gradients: bool = False
    shift: tuple[str, ...] = ()  # "gaussian_noise:5", "cifar10c", or another data set's name

    def __post_init__(self) -> None:
        _check(self.epochs >= 1, "epochs", "at least 1", self.epochs)
        _check(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        _check(self.every >= 1, "every", "at least 1", self.every)
        _check(self.lr > 0, "lr", "positive", self.lr)
        _check(0 < self.hold_back < 1, "hold_back", "between 0 and 1", self.hold_back)
        _check(
            self.precision in ("32-true", "bf16-mixed"), "precision", "32-true or bf16-mixed", self.precision
        )
        _check(
            self.schedule in ("cosine", "steps", "constant"),
            "schedule",
            "cosine, steps or constant",
            self.schedule,
        )
        _check(self.optimizer in ("sgd", "adam"), "optimizer", "sgd or adam", self.optimizer)
        for name in (self.calib_augment, *self.augment_of.values()):
            _check(name in PERTURBATIONS, "calib_augment", f"one of {PERTURBATIONS}", name)
        reserved = {"main", "auto", "ensemble"} & set(self.heads)
        _check(not reserved, "heads", "named otherwise than main, auto and ensemble", sorted(reserved))

    def riders(self) -> dict[str, list[str]]:
        """Heads by the perturbation they are trained with, each group one bank; "auto" is a group of its own."""
        groups: dict[str, list[str]] = {}
        for name in self.heads:
            g = self.augment_of.get(name, self.calib_augment)
            groups.setdefault(f"heads-{g}" if g else "heads", []).append(name)
        return groups | ({"auto": ["auto"]} if self.auto else {})

    @property
    def name(self) -> str:
        """A folder name that says what the run is."""
        model = self.model.replace("/", "-").replace(":", "-")
        method = self.loss + "".join(f"-{key}{value:g}" for key, value in sorted(self.loss_options.items()))
        method += f"-mixup{self.mixup:g}" if self.mixup else ""
        return f"{self.data}-{model}-{method}-e{self.epochs}-s{self.seed}"

    def to_json(self) -> str:
        """One setting a line."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Config:
        """What `to_json` wrote; a setting this version does not know is refused."""
        values: dict[str, Any] = json.loads(text)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"config has settings that are not known here: {sorted(unknown)}")
        values["heads"] = {name: HeadSpec(**_tuples(spec)) for name, spec in values.get("heads", {}).items()}
        return cls(**_tuples(values))


def _check(fine: bool, name: str, want: str, got: object) -> None:
    if not fine:
        raise ValueError(f"{name} must be {want}, got {got!r}")


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


IMAGES = Config()  # CIFAR-10/100, SVHN: the paper's setting, for cross entropy and the double head
STEPS = replace(IMAGES, epochs=350, schedule="steps")  # ... and for MMCE, Brier and focal loss
IMAGENET = replace(IMAGES, data="imagenet", epochs=100, batch_size=256, lr=0.01)
TEXT = Config(
    data="20newsgroups",
    model="gp_cnn",
    epochs=50,
    batch_size=64,
    calib_batch_size=64,
    optimizer="adam",
    lr=1e-3,
    weight_decay=0.0,
    calib_lr=30.0,  # the heads learn by SGD: 0.03
)
RECIPES: dict[str, Config] = {
    "cifar10": IMAGES,
    "cifar100": replace(IMAGES, data="cifar100"),
    "svhn": replace(IMAGES, data="svhn", augment="crop"),  # a mirrored digit is no digit
    "imagenet": IMAGENET,
    "20newsgroups": TEXT,
    "20newsgroups-bydate": replace(TEXT, data="20newsgroups-bydate"),
    "sst-binary": replace(TEXT, data="sst-binary"),
    "sst-fine": replace(TEXT, data="sst-fine", model="tree_lstm", batch_size=25, lr=1e-3, weight_decay=1e-4),
    "fashion": replace(IMAGES, data="fashion", model="small_cnn", epochs=15, augment="none", every=4),
}
