"""What a run is: one frozen dataclass, its learning rate; recipes and methods as differences."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from doublehead.calibration_head import PAPER, HeadSpec
from doublehead.data.corruptions import FAMILIES
from doublehead.losses import LOSSES, AdaFocal
from doublehead.system import did_you_mean

ADAPTIVE = {"adafocal": AdaFocal}  # losses that are updated from the calibration data after each epoch
Perturbation = Literal["noise", "broad", "noise+broad", "shifts"]
BATCH = ("logits", "labels")  # what a loss gets besides its options
RESERVED = ("main", "auto", "opinion", "guarded")  # outputs that are not in `heads`
BOUNDS = {  # smallest allowed values
    "epochs": 1, "batch_size": 1, "every": 1, "calib_batch_size": 1, "max_words": 1, "image_size": 1,
    "evaluate_every": 1, "n_train": 1, "n_calib": 1, "n_test": 1, "seed": 0, "workers": 0, "mixup": 0,
    "momentum": 0, "weight_decay": 0, "calib_weight_decay": 0,
}  # fmt: skip
PLAIN = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}  # kinds of settings


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes. Two equal configs give the same run."""

    data: str = "cifar10"
    model: str = "resnet50"
    model_options: Mapping[str, Any] = field(default_factory=dict)  #: options of `doublehead.models.build`
    loss: str = "cross_entropy"
    loss_options: Mapping[str, float] = field(default_factory=dict)
    mixup: float = 0.0  #: alpha of mixup; 0 switches it off
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)  #: trained beside the network, each an output
    auto: bool = False  #: also train a second opinion and fit the staged head with it: output "auto"
    views: tuple[Literal["flip"], ...] = ()  #: other views of an image that "auto" averages over
    guards: tuple[Perturbation, ...] = ()  #: for each a ShiftGuard around "auto" is fitted at the end
    epochs: int = 80
    batch_size: int = 256
    optimizer: Literal["sgd", "adam", "adagrad"] = "sgd"
    lr: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    warmup: float = 0.1  #: share of the run in which the rate rises linearly from 0
    milestones: tuple[float, ...] = (150 / 350, 250 / 350)  #: of `schedule="steps"`, as shares of the run
    #: Augmentation of the training images; with "none" long texts are cut at their end.
    augment: Literal["crop-flip", "crop", "none"] = "crop-flip"
    every: int = 10  #: network steps per calibration step: the paper's k
    every_of: Mapping[str, int] = field(default_factory=dict)  #: another k for some heads (or "auto")
    calib_batch_size: int = 128
    calib_weight_decay: float = 5e-5
    calib_clip: float = 1.0  #: the 2-norm to which a head's gradient is clipped
    calib_augment: Literal["", Perturbation] = ""  #: perturbation of calibration batches: the paper's g
    #: Another g for some heads (or "auto").
    augment_of: Mapping[str, Literal["", Perturbation]] = field(default_factory=dict)
    phrases: bool = True  #: of trees: learn every labelled phrase, or whole sentences alone
    embeddings: str = "glove"  #: of text networks: "glove", a file glove.6B.50d.txt, or "random:50"
    max_words: int = 400  #: longer texts are cut, in training at a random place
    image_size: int = 224  #: of images read from files
    workers: int = field(default=0, compare=False)  #: processes that read image files; changes no number
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    compile: bool = False
    deterministic: bool = False  #: torch's deterministic algorithms: the same bits again on the same GPU
    n_train: int | None = None  #: use only this many samples of a split, for quick trials
    n_calib: int | None = None
    n_test: int | None = None
    evaluate_every: int = 1  #: epochs between two lines of test metrics
    predict_train: bool = True  #: also keep the predictions of the train split
    record_gradients: bool = False
    shift: tuple[str, ...] = ()  #: "gaussian_noise:5", "cifar10c", or another data set's name

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Config).items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        for name, least in BOUNDS.items():
            value = getattr(self, name)
            _check(value is None or value >= least, name, f"at least {least}", value)
        for name in ("lr", "calib_clip"):
            _check(getattr(self, name) > 0, name, "positive", getattr(self, name))
        _check(self.lr < math.inf, "lr", "finite", self.lr)
        _check(0 <= self.warmup < 1, "warmup", "a share of the run, 0 or more and below 1", self.warmup)
        losses: dict[str, Any] = {**LOSSES, **ADAPTIVE}
        _check(self.loss in losses, "loss", f"one of {', '.join(losses)}", self.loss)
        known = [name for name in inspect.signature(losses[self.loss]).parameters if name not in BATCH]
        unknown = set(self.loss_options) - set(known)
        _check(not unknown, "loss_options", f"among {known} for {self.loss}", dict(self.loss_options))
        reserved = sorted(name for name in self.heads if name.split("@")[0] in RESERVED)
        _check(not reserved, "heads", f"named otherwise than {' and '.join(RESERVED)}", reserved)
        odd = [name for name in self.heads if not re.fullmatch(r"[\w@+.-]+", name)]
        _check(not odd, "heads", "named by letters, digits and @+.-, as their files are", odd)
        for setting in ("augment_of", "every_of"):
            strange = sorted(set(getattr(self, setting)) - {*self.heads, "auto"})
            _check(not strange, setting, "about heads of this run", strange)
        for name, every in self.every_of.items():
            _check(every >= 1, f"every_of[{name!r}]", "at least 1", every)
        for setting in ("views", "guards"):
            value = getattr(self, setting)
            _check(self.auto or not value, setting, "empty without auto, whose output they change", value)
        for shifted in self.shift:
            levels = {level for _, level in corruptions_of(shifted)}
            _check(levels <= set("12345"), "shift", "of a severity from 1 to 5", shifted)

    def differing(self, other: Config) -> list[str]:
        """The names of the settings in which two configs differ, of those that change numbers."""
        return [f.name for f in fields(self) if f.compare and getattr(self, f.name) != getattr(other, f.name)]

    def head_groups(self) -> dict[str, list[str]]:
        """The named heads by perturbation and period; the heads of a group are trained together."""
        groups: dict[str, list[str]] = {}
        for name in self.heads:
            g, every = self.augment_of.get(name, self.calib_augment), self.every_of.get(name, self.every)
            group = "-".join(["heads", *([g] if g else []), *([f"k{every}"] if every != self.every else [])])
            groups.setdefault(group, []).append(name)
        return groups

    def guarded(self) -> dict[str, str]:
        """The outputs of `guards` and the perturbation of each: "guarded" for shifts, `"guarded@noise+broad"`, ..."""
        return {"guarded" if name == "shifts" else f"guarded@{name}": name for name in self.guards}

    @property
    def name(self) -> str:
        """Data, model, loss, epochs and seed."""
        method = self.loss + "".join(f"-{key}{value:g}" for key, value in sorted(self.loss_options.items()))
        method += f"-mixup{self.mixup:g}" if self.mixup else ""
        name = f"{self.data}-{self.model}-{method}-e{self.epochs}-s{self.seed}"
        # A name for a folder: paths of the user's own data and networks bring other characters.
        return re.sub(r"[^\w.+-]+", "-", name).strip("-")

    @property
    def folder_name(self) -> str:
        """The name and a hash of all settings: one folder for each config."""
        # Only what differs counts, so a new setting renames no folder.
        settings = {name: getattr(self, name) for name in self.differing(Config())}
        settings["heads"] = {name: asdict(spec) for name, spec in self.heads.items()}
        text = json.dumps(settings, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    def to_json(self) -> str:
        """One setting per line."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The config that `to_json` wrote; an unknown setting is an error."""
        values: dict[str, Any] = json.loads(text)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"config has settings that are not known here: {sorted(unknown)}")
        values["heads"] = {name: HeadSpec(**spec) for name, spec in values.get("heads", {}).items()}
        return cls(**values)


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as the annotation wants it (a whole number where a float is wanted becomes one), or an error."""
    choices = get_args(kind)
    if NoneType in choices:  # int | None
        return None if value is None else _typed(name, value, int)
    if get_origin(kind) is Literal:
        _check(value in choices, name, f"one of {', '.join(filter(None, choices))}", value)
    elif get_origin(kind) is tuple:
        return tuple(_typed(name, part, choices[0]) for part in value)
    elif get_origin(kind) is Mapping:
        _check(isinstance(value, Mapping), name, "a table of names and values", value)
        return {key: _typed(f"{name}[{key!r}]", part, choices[1]) for key, part in value.items()}
    elif kind in PLAIN:
        fine = isinstance(value, (int, float) if kind is float else kind)
        odd = isinstance(value, bool) and kind is not bool  # a bool is an int to Python
        odd |= isinstance(value, float) and math.isnan(value)
        _check(fine and not odd, name, PLAIN[kind], value)
        return kind(value)
    return value


def _check(fine: bool, name: str, want: str, got: object) -> None:
    if not fine:
        raise ValueError(f"{name} must be {want}, got {got!r}")


def corruptions_of(shifted: str) -> list[tuple[str, str]]:
    """The corruptions that an entry of `shift` names, with their severities; none where it names a data set.

    >>> corruptions_of("contrast:2"), corruptions_of("contrast"), corruptions_of("svhn")
    ([('contrast', '2')], [('contrast', '5')], [])
    """
    if shifted == "cifar10c":
        return [(family, level) for family in FAMILIES for level in "12345"]
    family, colon, severity = shifted.partition(":")
    return [(family, severity if colon else "5")] if family in FAMILIES else []


def learning_rate(config: Config, progress: float) -> float:
    """The network's learning rate when `progress` of the run (0..1) is over.

    >>> config = Config(lr=0.1, schedule="steps", milestones=(0.5, 0.75), warmup=0.2)
    >>> [round(learning_rate(config, at), 4) for at in (0.0, 0.1, 0.2, 0.5, 0.8)]
    [0.0, 0.05, 0.1, 0.01, 0.001]
    """
    rate = config.lr
    if config.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "steps":
        rate *= 0.1 ** sum(progress >= at for at in config.milestones)
    return rate * min(1.0, progress / config.warmup) if config.warmup else rate


IMAGES = Config()
# Of cross entropy and the double head.
PAPER_IMAGES = replace(IMAGES, epochs=200, batch_size=128, lr=0.1, warmup=0.0)
PAPER_STEPS = replace(PAPER_IMAGES, epochs=350, schedule="steps")  # MMCE, Brier and focal loss
IMAGENET = replace(IMAGES, data="imagenet", epochs=100, lr=0.01, warmup=0.0, predict_train=False)
TUNED = {"tune_vectors": True, "dropout": 0.5}
TEXT = Config(
    data="20newsgroups",
    model="gp_cnn",
    model_options={**TUNED, "word_dropout": 0.5},
    epochs=25,
    batch_size=64,
    calib_batch_size=64,
    optimizer="adam",
    lr=1e-3,
    weight_decay=0.0,
    warmup=0.0,
)
RECIPES: dict[str, Config] = {
    **{
        f"{data}{suffix}": replace(recipe, data=data, augment="crop" if data == "svhn" else "crop-flip")
        for data in ("cifar10", "cifar100", "svhn")  # no flips for digits
        for suffix, recipe in (("", IMAGES), ("-paper", PAPER_IMAGES), ("-paper-steps", PAPER_STEPS))
    },
    "imagenet": IMAGENET,
    "20newsgroups": TEXT,
    "20newsgroups-bydate": replace(TEXT, data="20newsgroups-bydate"),
    "sst-binary": replace(TEXT, data="sst-binary", epochs=5, model_options=TUNED | {"word_dropout": 0.3}),
    "sst-fine": replace(
        TEXT,
        data="sst-fine",
        model="tree_lstm",
        model_options={"word_dropout": 0.1},
        epochs=6,
        batch_size=25,
        optimizer="adagrad",
        lr=0.05,
        weight_decay=1e-4,
    ),
    "fashion": replace(
        PAPER_IMAGES, data="fashion", model="small_cnn", epochs=15, augment="none", every=4, warmup=0.1
    ),
}


# --- methods: a loss for the network, heads trained beside it, or both

SAMPLE = HeadSpec(kind="temperature", reads="features", lr=0.01, beta0=1.2)
BETAS = (0.1, 0.6, 0.8, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0)  # of a sweep over beta0


@dataclass(frozen=True)
class Method:
    """What to train, and the output that is the method's: "main", a head's name, "auto" or "guarded"."""

    title: str
    loss: str = "cross_entropy"  # with its own options, so none of the config stays
    mixup: float = 0.0
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)
    auto: bool = False
    guards: tuple[Perturbation, ...] = ()
    output: str = "main"

    def apply(self, config: Config) -> Config:
        """The config with this method in it; heads and guards that are there already stay."""
        return replace(
            config,
            loss=self.loss,
            loss_options={},
            mixup=self.mixup,
            heads={**config.heads, **self.heads},
            auto=config.auto or self.auto,
            guards=tuple(dict.fromkeys((*config.guards, *self.guards))),
        )


def _head(title: str, name: str, spec: HeadSpec) -> Method:
    return Method(title, heads={name: spec}, output=name)


METHODS: dict[str, Method] = {
    "cross-entropy": Method("Cross entropy"),
    "label-smoothing": Method("Label smoothing", "label_smoothing"),
    "brier": Method("Brier", "brier"),
    "focal": Method("Focal", "focal"),
    "flsd-53": Method("FLSD-53", "flsd53"),
    "adafocal": Method("AdaFocal", "adafocal"),
    "mmce": Method("MMCE", "mmce"),
    "mmce-published": Method("MMCE as published", "mmce_published"),
    "entropy-penalty": Method("Entropy penalty", "entropy_penalty"),
    "soft-ece": Method("Soft-binned ECE", "soft_ece"),
    "avuc": Method("AvUC", "avuc"),
    "mse": Method("Squared error on logits", "mse_logits"),
    "mixup": Method("Mixup", mixup=0.2),
    "double-head": _head("Double head", "double-head", replace(PAPER, beta0=1.0)),
    "annealing-double-head": _head("Annealing double head", "annealing-double-head", PAPER),
    "sample-temperature": _head("Sample temperature head", "sample-temperature", SAMPLE),
    "auto": Method("Staged head, second opinion", auto=True, output="auto"),
    "guarded": Method("Staged head, shift guard", auto=True, guards=("shifts",), output="guarded"),
    "sweep": Method(
        "Sweep over beta0",
        heads={
            f"{name}-{beta0:g}": replace(spec, beta0=beta0)
            for name, spec in (("mlp", PAPER), ("temperature", SAMPLE))
            for beta0 in BETAS
        },
    ),
}


def method(name: str) -> Method:
    """The method called `name`, or an error that lists all of them.

    >>> method("brier").loss
    'brier'
    """
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}{hint}")
    return METHODS[name]


def runs_for(config: Config, names: Sequence[str]) -> list[tuple[Config, list[str]]]:
    """The fewest training runs that have the outputs of all these methods: methods with one loss share a run.

    >>> [names for _, names in runs_for(Config(), ["cross-entropy", "brier", "double-head"])]
    [['cross-entropy', 'double-head'], ['brier']]
    """
    groups: dict[tuple[str, float], list[str]] = {}
    for name in names:
        asked = method(name)
        groups.setdefault((asked.loss, asked.mixup), []).append(name)
    runs = []
    for group in groups.values():
        made = config
        for name in group:
            made = method(name).apply(made)
        runs.append((made, group))
    return runs
