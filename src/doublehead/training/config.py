"""What a run is: one frozen dataclass, and the paper's settings as recipes of differences."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from doublehead.adafocal import AdaFocal
from doublehead.data.corruptions import FAMILIES
from doublehead.head_bank import HeadSpec
from doublehead.losses import LOSSES

# Families of corruption to leave out of "shifts" in turn, so that each can be looked at by something that has not
# seen it: one of each kind at a time, or a whole kind.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "1": ("gaussian_noise", "gaussian_blur", "contrast", "jpeg_compression"),
    "2": ("shot_noise", "defocus_blur", "brightness", "pixelate"),
    "3": ("impulse_noise", "speckle_noise", "motion_blur", "saturate", "elastic_transform"),
    "noises": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blurs": ("gaussian_blur", "defocus_blur", "motion_blur"),
    "colours": ("contrast", "brightness", "saturate"),
    "digital": ("jpeg_compression", "pixelate", "elastic_transform"),
}
ADAPTIVE = {"adafocal": AdaFocal}  # losses that follow the calibration data from epoch to epoch
PERTURBATIONS = ("", "noise", "broad", "noise+broad", "shifts", *(f"shifts-{name}" for name in LEFT_OUT))
RESERVED = ("main", "auto", "guarded")  # outputs that are not heads of `heads`: no head may be called so
BOUNDS = {  # the least value of a setting
    "epochs": 1, "batch_size": 1, "every": 1, "calib_batch_size": 1, "max_words": 1, "image_size": 1,
    "evaluate_every": 1, "n_train": 1, "n_calib": 1, "n_test": 1, "seed": 0, "workers": 0, "mixup": 0,
    "momentum": 0, "weight_decay": 0, "calib_weight_decay": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes. Two equal configs give the same run."""

    data: str = "cifar10"
    model: str = "resnet50"
    loss: str = "cross_entropy"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    mixup: float = 0.0  # alpha of mixup; 0 switches it off
    # Heads, trained beside the network on all calibration data.
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)
    auto: bool = (
        False  # also train the bank behind beta0="auto"; choose from it on held-back calibration data
    )
    guards: tuple[str, ...] = ()  # perturbations, each the teacher of a ShiftGuard that is put round `auto`
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
    every_of: Mapping[str, int] = field(default_factory=dict)  # heads (or "auto") that have another k
    calib_batch_size: int = 128
    calib_lr: float = 1.0  # of all heads, relative to lr; follows the same schedule
    calib_weight_decay: float = 5e-5
    calib_clip: float = 1.0  # the 2-norm to which a head's gradient is clipped
    calib_augment: str = ""  # the paper's g, for distribution shift: noise, broad, noise+broad, shifts
    augment_of: Mapping[str, str] = field(default_factory=dict)  # heads (or "auto") that have another g
    embeddings: str = "glove"  # of text networks: "glove", a file glove.6B.50d.txt, or "random:50"
    max_words: int = 400  # longer texts are cut
    image_size: int = 224  # of images read from files
    workers: int = field(default=0, compare=False)  # processes that read image files; changes no number
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    compile: bool = False
    deterministic: bool = False  # torch's deterministic algorithms: the same bits again on the same GPU
    n_train: int | None = None  # use only so many samples of a split: for a quick try, not for numbers
    n_calib: int | None = None
    n_test: int | None = None
    evaluate_every: int = 1  # epochs between two lines of test metrics
    predict_train: bool = True  # also keep the predictions of the train split
    record_gradients: bool = False
    shift: tuple[str, ...] = ()  # "gaussian_noise:5", "cifar10c", or another data set's name

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Config).items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        for name, least in BOUNDS.items():
            value = getattr(self, name)
            _check(value is None or value >= least, name, f"at least {least}", value)
        for name in ("lr", "calib_lr", "calib_clip"):
            _check(getattr(self, name) > 0, name, "positive", getattr(self, name))
        _check(self.lr < math.inf, "lr", "finite", self.lr)
        _check(0 < self.hold_back < 1, "hold_back", "between 0 and 1", self.hold_back)
        losses = [*LOSSES, *ADAPTIVE]
        _check(self.loss in losses, "loss", f"one of {', '.join(losses)}", self.loss)
        if self.loss in ADAPTIVE:
            known = [*inspect.signature(ADAPTIVE[self.loss]).parameters]
        else:
            known = [*inspect.signature(LOSSES[self.loss]).parameters][2:]  # after logits and labels
        unknown = set(self.loss_options) - set(known)
        _check(not unknown, "loss_options", f"among {known} for {self.loss}", dict(self.loss_options))
        self._check_heads()
        for shifted in self.shift:
            family, colon, severity = shifted.partition(":")
            fine = family not in FAMILIES or not colon or severity in ("1", "2", "3", "4", "5")
            _check(fine, "shift", "of a severity from 1 to 5", shifted)

    def _check_heads(self) -> None:
        reserved = sorted(name for name in self.heads if name.split("@")[0] in RESERVED)
        _check(not reserved, "heads", f"named otherwise than {' and '.join(RESERVED)}", reserved)
        odd = [name for name in self.heads if not re.fullmatch(r"[\w@+.-]+", name)]
        _check(not odd, "heads", "named by letters, digits and @+.-, as their files are", odd)
        for setting in ("augment_of", "every_of"):
            strange = sorted(set(getattr(self, setting)) - {*self.heads, "auto"})
            _check(not strange, setting, "about heads of this run", strange)
        for name, every in self.every_of.items():
            _check(every >= 1, f"every_of[{name!r}]", "at least 1", every)
        for name in (self.calib_augment, *self.augment_of.values()):
            _check(name in PERTURBATIONS, "calib_augment", f"one of {PERTURBATIONS}", name)
        for name in self.guards:
            _check(name in PERTURBATIONS[1:], "guards", f"among {PERTURBATIONS[1:]}", name)
        _check(
            self.auto or not self.guards, "guards", "empty without auto, whose output they guard", self.guards
        )

    def riders(self) -> dict[str, list[str]]:
        """Heads by perturbation and period, each group one bank; "auto" is a group of its own."""
        groups: dict[str, list[str]] = {}
        for name in self.heads:
            g, every = self.augment_of.get(name, self.calib_augment), self.every_of.get(name, self.every)
            group = "-".join(["heads", *([g] if g else []), *([f"k{every}"] if every != self.every else [])])
            groups.setdefault(group, []).append(name)
        return groups | ({"auto": ["auto"]} if self.auto else {})

    def head_groups(self) -> dict[str, list[str]]:
        """The groups of `riders` whose heads each answer for themselves."""
        return {group: names for group, names in self.riders().items() if group != "auto"}

    def guarded(self) -> dict[str, str]:
        """The outputs of `guards` and the perturbation that taught each: "guarded", "guarded@noise+broad" ..."""
        return {"guarded" if name == "shifts" else f"guarded@{name}": name for name in self.guards}

    @property
    def name(self) -> str:
        """What the run is, in a few words."""
        method = self.loss + "".join(f"-{key}{value:g}" for key, value in sorted(self.loss_options.items()))
        method += f"-mixup{self.mixup:g}" if self.mixup else ""
        return _plain(f"{self.data}-{self.model}-{method}-e{self.epochs}-s{self.seed}")

    @property
    def folder_name(self) -> str:
        """The name and a few digits that differ wherever another setting does: one folder for each config."""
        usual = Config()  # only what differs counts: a setting that a later version adds renames no folder
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        settings = {name: value for name, value in settings.items() if value != getattr(usual, name)}
        settings["heads"] = {name: asdict(spec) for name, spec in self.heads.items()}
        text = json.dumps(settings, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"

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


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as the annotation wants it (a whole number where a float is wanted becomes one), or an error."""
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        _check(value in choices, name, f"one of {', '.join(choices)}", value)
    elif kind is float:
        _check(isinstance(value, (int, float)) and not isinstance(value, bool), name, "a number", value)
        _check(not math.isnan(value), name, "a number", value)
        return float(value)
    elif kind is int or NoneType in choices:
        whole = isinstance(value, int) and not isinstance(value, bool)
        _check(whole or (value is None and NoneType in choices), name, "a whole number", value)
    elif kind is bool:
        _check(isinstance(value, bool), name, "true or false", value)
    elif kind is str:
        _check(isinstance(value, str), name, "text", value)
    elif get_origin(kind) is tuple:
        return tuple(_typed(name, part, choices[0]) for part in value)
    elif choices[1] is not HeadSpec:
        _check(isinstance(value, Mapping), name, "a table of names and values", value)
        return {key: _typed(f"{name}[{key!r}]", part, choices[1]) for key, part in value.items()}
    return value


def _check(fine: bool, name: str, want: str, got: object) -> None:
    if not fine:
        raise ValueError(f"{name} must be {want}, got {got!r}")


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _plain(text: str) -> str:
    """A name for a folder: paths of the user's own data and networks bring other characters."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


IMAGES = Config()  # CIFAR-10/100, SVHN: the paper's setting, for cross entropy and the double head
STEPS = replace(IMAGES, epochs=350, schedule="steps")  # ... and for MMCE, Brier and focal loss
IMAGENET = replace(IMAGES, data="imagenet", epochs=100, batch_size=256, lr=0.01, predict_train=False)
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
