"""The parts of a run: data as batches, network, optimizer and calibration heads, in one process or several."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from doublehead import data
from doublehead.calibrated import Calibrated
from doublehead.calibration_data import unpack
from doublehead.data.batches import Batches
from doublehead.data.splits import Samples, stratified_draw
from doublehead.double_head import DoubleHead
from doublehead.guard import Guard
from doublehead.losses import LOSSES
from doublehead.models import MODELS, build
from doublehead.models.text import weights_folder
from doublehead.network import Reader
from doublehead.shift_guard import StageTap, layers_to_read
from doublehead.system import did_you_mean
from doublehead.torch_tools import from_every_process, get_random, n_processes, rank, set_random
from doublehead.training.config import ADAPTIVE, Config, corruptions_of

EVAL_BATCH = 500
OWN_DATA = ("arrays:", "folder:", "table:")  # how the names of one's own data begin


class Inputs:
    """The data of a run as batches for this process; the data set is read unless `splits` is given."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        splits: data.Splits | None,
        root: str | os.PathLike[str] | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if config.batch_size % world_size:
            raise ValueError(
                f"batch_size must be a multiple of the {world_size} processes, got {config.batch_size}"
            )
        splits = data.load(config.data, root) if splits is None else splits
        train, calib = _some(splits.train, config.n_train), _some(splits.calib, config.n_calib)
        splits = replace(splits, train=train, calib=calib, test=_some(splits.test, config.n_test))
        self.config, self.device, self.splits = config, device, splits
        self.rank, self.world_size = rank, world_size
        self.model_options: dict[str, Any] = {}  # what the network needs to know about the data
        self.memory_format = torch.preserve_format
        self.normalise: data.Normalise | None = None  # of images
        self.words: tuple[str, ...] = ()  # of a vocabulary made from the data
        self._learning: dict[str, Any] = {}  # further options of the batches that the network learns from
        self._by_phrase = False  # whether it learns each phrase of a tree as a text of its own
        self._batches = self._form()
        for name in {config.calib_augment, *config.augment_of.values(), *config.guards}:
            self.perturbation(name)  # raises where this data cannot be perturbed
        self.train = self._part(splits.train, config.batch_size, train=True, seed=config.seed)
        self._test = self._part(splits.test, EVAL_BATCH)  # kept: words take long to look up

    def make_calib(self) -> Batches:
        """Batches for training heads, shuffled; each group of heads takes its own."""
        size = min(self.config.calib_batch_size, len(self.splits.calib))
        return self._part(self.splits.calib, size, train=True, seed=self.config.seed + 1)

    def make_eval(self, samples: Samples) -> Batches:
        """This process's part of the samples, in order."""
        return self._test if samples is self.splits.test else self._part(samples, EVAL_BATCH)

    def whole(
        self, samples: Samples, batch_size: int = EVAL_BATCH, train: bool = False, seed: int = 0
    ) -> Batches:
        """All of the samples, in every process."""
        how: dict[str, Any] = {"batch_size": batch_size, "device": self.device, "train": train, "seed": seed}
        if train and samples is self.splits.train:
            how |= self._learning
            samples = samples.phrases() if self._by_phrase else samples  # type: ignore[union-attr]
        return self._batches(samples, **how)

    def _part(self, samples: Samples, batch_size: int, train: bool = False, seed: int = 0) -> Batches:
        share = max(1, batch_size // self.world_size) if train else batch_size
        batches = self.whole(samples, share, train, seed)
        return batches.shard(self.rank, self.world_size) if self.world_size > 1 else batches

    @property
    def coloured(self) -> bool:
        """Whether the inputs are images with three channels."""
        return self.normalise is not None and len(self.normalise.mean) == 3

    def perturbation(self, name: str, share: float = 0.5) -> Callable[[Tensor], Tensor] | None:
        """The paper's g of that name, for a share of each batch."""
        if not name:
            return None
        if self.normalise is None:
            raise ValueError(f"calib_augment is for images, {self.config.data} holds words: leave it empty")
        if name == "noise":
            return data.GaussianNoise(share=share, normalise=self.normalise)
        if name == "shifts":  # a guard, which sees perturbed batches whole, learns from each as from a shift
            return data.Shifts(share, self.normalise, together=share == 1)
        return data.Broad(share, self.normalise, max_sigma=0.15 if name == "noise+broad" else 0.0)

    def _form(self) -> Callable[..., Batches]:
        """How this kind of data becomes batches."""
        config, kind = self.config, type(self.splits.train)
        words = {data.Texts: ("words", "word pieces"), data.Trees: ("words", "trees", "word pieces")}
        can_be_read, reads = words.get(kind, ("images",)), "words"
        if config.model in MODELS:
            reads = MODELS[config.model].reads
            if reads not in can_be_read:
                raise ValueError(
                    f"model must read {' or '.join(can_be_read)} for {config.data}, "
                    f"got {config.model}, which reads {reads}"
                )
        if kind in words:
            return self._of_words(reads)
        self.memory_format = torch.channels_last
        return self._of_images() if kind is data.Images else self._of_files()

    def _of_images(self) -> Callable[..., Batches]:
        assert isinstance(self.splits.train, data.Images)
        self.normalise, how = data.Normalise.of(self.splits.train.images), self.config.augment
        height, width, n_channels = self.splits.train.images.shape[1:]
        self.model_options = {"input": (n_channels, height, width)}
        crop = None if how == "none" else data.CropFlip(padding=4, flip=how == "crop-flip")
        self._learning = {"augment": crop}
        return partial(data.DeviceBatches, normalise=self.normalise, channels_last=True)

    def _of_files(self) -> Callable[..., Batches]:
        self.normalise, size = data.DATASETS["imagenet"].normalise, self.config.image_size
        self.model_options = {"input": (3, size, size)}
        self._learning = {"augment": self.config.augment != "none"}
        usual: dict[str, Any] = {"size": size, "normalise": self.normalise, "workers": self.config.workers}
        return partial(data.FileBatches, augment=False, **usual)

    def _of_words(self, reads: str) -> Callable[..., Batches]:
        """Texts and trees: rows of one vocabulary, whose vectors the network gets unless it has its own."""
        config = self.config
        for given, what in (
            (config.mixup, "mixup is"),
            (config.views, "views are"),
            (config.guards, "guards, and so the method guarded, are"),
        ):
            if given:
                raise ValueError(f"{what} for images, {config.data} holds words")
        vocabulary: Any
        if reads == "word pieces":
            folder = weights_folder(config.model_options.get("weights", "package"))
            vocabulary = data.WordPieces(folder / "tokenizer.json")
        else:
            vocabulary, self.model_options["vectors"] = word_vectors(config, self.splits)
            self.words = vocabulary.words
        if reads == "trees":
            self._learning = {"nodes": "all" if config.phrases else "root"}
            return partial(data.TreeBatches, vocabulary=vocabulary)
        self._by_phrase = config.phrases and isinstance(self.splits.train, data.Trees)  # as Kim (2014) does
        self._learning = {"crop": config.augment != "none"}
        return partial(data.TextBatches, vocabulary=vocabulary, max_length=config.max_words)


def _some(samples: Samples, n: int | None) -> Samples:
    """At most `n` of the samples, each class in its share: files may be sorted by class."""
    if n is None or n >= len(samples):
        return samples
    return samples.take(np.sort(stratified_draw(samples.labels, n)))


def word_vectors(config: Config, splits: data.Splits) -> tuple[data.Vocabulary, Tensor]:
    """The words of the data and their vectors, (V, D)."""
    kind, _, size = config.embeddings.partition(":")
    if kind != "random":
        return data.embed(splits, "package" if config.embeddings == "glove" else config.embeddings)
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"embeddings must be glove, a file or random:SIZE, got {config.embeddings!r}")
    vocabulary = data.Vocabulary.of(splits.train)
    generator = torch.Generator().manual_seed(config.seed)
    # 0.4 is about the deviation of GloVe's entries; row 0 is padding
    vectors = 0.4 * torch.randn(len(vocabulary), int(size), generator=generator)
    vectors[0] = 0
    return vocabulary, vectors


# --- the run


@dataclass
class Run:
    """A run in progress."""

    config: Config
    net: nn.Module
    forward: Callable[..., Any]  # the network as training calls it: compiled, or inside DDP
    loss: Callable[..., Tensor]  # per example; a module where it is updated from the calibration data
    inputs: Inputs
    optimizer: torch.optim.Optimizer
    reader: Reader  # of `net`
    companions: dict[str, DoubleHead]  # by group of heads; "auto" trains the second opinion
    fabric: Any
    auto: Calibrated | None = None  # fitted when training is over, as are the guards around it
    guards: dict[str, Guard] = field(default_factory=dict)  # by output
    stages: StageTap | None = None  # what the guards read
    others: dict[str, Batches] = field(default_factory=dict)  # data sets that `shift` names
    epoch: int = 0
    seconds: float = 0.0  # spent in training steps
    rows: list[dict[str, Any]] = field(default_factory=list)  # the metrics of each epoch
    gradients: list[Tensor] = field(default_factory=list)  # one per epoch: (steps, H)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on; call it in every process."""
        companions = {name: companion.state_dict() for name, companion in self.companions.items()}
        randomness = {name: state["randomness"] for name, state in companions.items()}
        return {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "rows": self.rows,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": self.inputs.train.state_dict(),
            "loss": self.loss.state_dict() if isinstance(self.loss, nn.Module) else {},
            "companions": companions,
            "gradients": self.gradients,
            "randomness": from_every_process({"": get_random(self.fabric.device), **randomness}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.epoch, self.seconds, self.rows = state["epoch"], state["seconds"], state["rows"]
        self.gradients = state["gradients"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.inputs.train.load_state_dict(state["train"])
        if isinstance(self.loss, nn.Module):
            self.loss.load_state_dict(state["loss"])
        # There may have been another number of processes.
        own = state["randomness"][rank() % len(state["randomness"])]
        for name, companion in self.companions.items():
            # All processes are at the same place of the data; only random numbers are their own.
            companion.load_state_dict({**state["companions"][name], "randomness": own[name], "rank": rank()})
        set_random(own[""], self.fabric.device)


def set_up(
    config: Config, fabric: Any, splits: data.Splits | None, root: str | os.PathLike[str] | None
) -> Run:
    """Data, network, optimizer and heads, all from the config's seed."""
    inputs = Inputs(config, fabric.device, splits, root, fabric.global_rank, fabric.world_size)
    others = _others(config, inputs, root)
    torch.manual_seed(config.seed)
    net = build(config.model, inputs.splits.n_classes, **{**inputs.model_options, **config.model_options})
    net = net.to(fabric.device).to(memory_format=inputs.memory_format)  # type: ignore[call-overload]
    if config.guards:
        layers_to_read(net)  # raises where a guard would have nothing to read
    optimizer = _optimizer(config, net)
    first = next(iter(inputs.whole(inputs.splits.calib)))
    reader = Reader.of(net, unpack(first, fabric.device))
    fast = _compiled(config, net)
    forward = fast
    if fabric.world_size > 1:
        forward = _compiled(config, fabric.strategy.setup_module(net))
    groups = config.head_groups() | ({"auto": ["auto"]} if config.auto else {})
    companions = {
        group: _companion(config, names, fast, inputs, optimizer) for group, names in groups.items()
    }
    # Dropout: the same whatever was built above, other masks in each process.
    torch.manual_seed(config.seed + 2 + 1000 * fabric.global_rank)
    loss: Callable[..., Tensor]
    if config.loss in ADAPTIVE:
        loss = ADAPTIVE[config.loss](**config.loss_options).to(fabric.device)  # type: ignore[arg-type]
    else:
        loss = partial(LOSSES[config.loss], **config.loss_options)
    return Run(config, net, forward, loss, inputs, optimizer, reader, companions, fabric, others=others)


def _companion(
    config: Config, names: list[str], network: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer
) -> DoubleHead:
    """The heads of one group; all of them have the same perturbation and period."""
    batches = inputs.make_calib()
    start = batches.state_dict()
    companion = DoubleHead(
        network,
        batches,
        follow=optimizer,
        heads=None if names == ["auto"] else [config.heads[name] for name in names],
        every=config.every_of.get(names[0], config.every),
        augment=inputs.perturbation(config.augment_of.get(names[0], config.calib_augment)),
        weight_decay=config.calib_weight_decay,
        clip=config.calib_clip,
        seed=config.seed + 1,
    )
    batches.load_state_dict(start)  # it has looked at the first batch
    return companion


def _optimizer(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    usual: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    parameters = [p for p in net.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, **usual, fused=True)
    if config.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, **usual)
    nesterov = config.momentum > 0
    return torch.optim.SGD(parameters, **usual, momentum=config.momentum, nesterov=nesterov, fused=True)


def _compiled(config: Config, net: nn.Module) -> nn.Module:
    if not config.compile:
        return net
    on_cuda = next(net.parameters()).device.type == "cuda"
    mode = "reduce-overhead" if on_cuda and n_processes() == 1 else "default"  # CUDA graphs
    return torch.compile(net, mode=mode)  # type: ignore[return-value]


def _others(config: Config, inputs: Inputs, root: str | os.PathLike[str] | None) -> dict[str, Batches]:
    """The data sets among `shift`, read before training so that a missing one is noticed."""
    made: dict[str, Batches] = {}
    for asked in config.shift:
        if not (corruptions_of(asked) or asked in data.DATASETS or asked.startswith(OWN_DATA)):
            hint = did_you_mean(asked.partition(":")[0], ["cifar10c", *data.FAMILIES, *data.DATASETS])
            wanted = "corruptions, such as gaussian_noise:5 or cifar10c, or a data set"
            raise ValueError(f"shift must name {wanted}, got {asked!r}{hint}")
        if not corruptions_of(asked):
            made[asked] = inputs.make_eval(
                data.load(asked).test if ":" in asked else data.load_test(asked, root)
            )
        elif inputs.normalise is None:
            raise ValueError(f"shift must name a data set for words, got {asked!r}, which is for images")
        elif asked.startswith("saturate") and not inputs.coloured:
            raise ValueError(f"shift must be one for grey images, got {asked!r}, which is for coloured ones")
    return made
