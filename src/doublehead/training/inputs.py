"""From a config to batches: which data, on which device, in what form the network wants them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from doublehead import data
from doublehead.data.batches import Batches
from doublehead.data.splits import Samples, stratified_draw
from doublehead.models import MODELS
from doublehead.models.text import weights_folder
from doublehead.training.config import LEFT_OUT, Config

EVAL_BATCH = 500


class Form(NamedTuple):
    """How one kind of data becomes batches, and what the network needs to know about it."""

    batches: Callable[
        ..., Batches
    ]  # (samples, whether the network learns from them, **options of all batches)
    model_options: dict[str, Any]
    memory_format: torch.memory_format = torch.preserve_format
    normalise: data.Normalise | None = None  # of images


class Inputs:
    """The data of a run as batches for this process."""

    def __init__(
        self, config: Config, device: torch.device, splits: data.Splits, rank: int = 0, world_size: int = 1
    ) -> None:
        if config.batch_size % world_size:
            raise ValueError(
                f"batch_size must be a multiple of the {world_size} processes, got {config.batch_size}"
            )
        self.config, self.device, self.splits = config, device, splits
        self.rank, self.world_size = rank, world_size
        self.n_classes = splits.n_classes
        self._batches, self.model_options, self.memory_format, self.normalise = _form(config, splits)
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
        learns = train and samples is self.splits.train
        how = {"batch_size": batch_size, "device": self.device, "train": train, "seed": seed}
        return self._batches(samples, learns, **how)

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
        kind, _, left_out = name.partition("-")
        if kind == "shifts":  # a guard, which sees perturbed batches whole, learns from each as from a shift
            return data.Shifts(share, self.normalise, LEFT_OUT.get(left_out, ()), together=share == 1)
        return data.Broad(share, self.normalise, max_sigma=0.15 if name == "noise+broad" else 0.0)


def load_inputs(
    config: Config,
    device: torch.device,
    splits: data.Splits | None,
    root: str | os.PathLike[str] | None,
    rank: int = 0,
    world_size: int = 1,
) -> Inputs:
    """Read the data set (unless `splits` is given) and make its batches for this process."""
    splits = data.load(config.data, root) if splits is None else splits
    train, calib = _some(splits.train, config.n_train), _some(splits.calib, config.n_calib)
    splits = replace(splits, train=train, calib=calib, test=_some(splits.test, config.n_test))
    return Inputs(config, device, splits, rank, world_size)


def _some(samples: Samples, n: int | None) -> Samples:
    """At most `n` of the samples, each class in its share: files may be sorted by class."""
    if n is None or n >= len(samples):
        return samples
    return samples.take(np.sort(stratified_draw(samples.labels, n)))


def _form(config: Config, splits: data.Splits) -> Form:
    kind = type(splits.train)
    can_be_read = {data.Texts: ("words", "pieces"), data.Trees: ("words", "trees", "pieces")}.get(
        kind, ("images",)
    )
    if config.model in MODELS and MODELS[config.model].reads not in can_be_read:
        raise ValueError(
            f"model must read {' or '.join(can_be_read)} for {config.data}, "
            f"got {config.model}, which reads {MODELS[config.model].reads}"
        )
    return {data.Images: _images, data.ImageFiles: _image_files}.get(kind, _words)(config, splits)


def _images(config: Config, splits: data.Splits) -> Form:
    assert isinstance(splits.train, data.Images)
    normalise = data.Normalise.of(splits.train.images)
    height, width, n_channels = splits.train.images.shape[1:]
    crop = None if config.augment == "none" else data.CropFlip(padding=4, flip=config.augment == "crop-flip")

    def batches(samples: data.Images, learns: bool, **how: Any) -> Batches:
        how |= {"augment": crop if learns else None, "normalise": normalise, "channels_last": True}
        return data.DeviceBatches(samples.images, samples.labels, **how)

    return Form(batches, {"input": f"{height}x{width}x{n_channels}"}, torch.channels_last, normalise)


def _image_files(config: Config, splits: data.Splits) -> Form:
    size, normalise = config.image_size, data.DATASETS["imagenet"].normalise

    def batches(samples: data.ImageFiles, learns: bool, **how: Any) -> Batches:
        how |= {"augment": learns and config.augment != "none", "size": size, "normalise": normalise}
        return data.FileBatches(samples, workers=config.workers, **how)

    return Form(batches, {"input": f"{size}x{size}x3"}, torch.channels_last, normalise)


def _words(config: Config, splits: data.Splits) -> Form:
    """Texts and trees: rows of one vocabulary, whose vectors the network gets unless it has its own."""
    for given, what in (
        (config.mixup, "mixup is"),
        (config.views, "views are"),
        (config.guards, "guards, and so the method guarded, are"),
    ):
        if given:
            raise ValueError(f"{what} for images, {config.data} holds words")
    reads = MODELS[config.model].reads if config.model in MODELS else "words"
    vocabulary: Any
    options = {}
    if reads == "pieces":
        folder = weights_folder(config.model_options.get("weights", "package"))
        vocabulary = data.WordPieces(folder / "tokenizer.json")
    else:
        vocabulary, options["vectors"] = word_vectors(config, splits)

    def batches(samples: Any, learns: bool, **how: Any) -> Batches:
        by_phrase = learns and config.phrases
        if reads == "trees":
            return data.TreeBatches(samples, vocabulary, nodes="all" if by_phrase else "root", **how)
        if by_phrase and isinstance(samples, data.Trees):
            samples = samples.phrases()  # as Kim (2014) does
        crop = learns and config.augment != "none"
        return data.TextBatches(samples, vocabulary, max_length=config.max_words, crop=crop, **how)

    return Form(batches, options)


def word_vectors(config: Config, splits: data.Splits) -> tuple[data.Vocabulary, Tensor]:
    """The words of the data and their vectors, (V, D)."""
    kind, _, size = config.embeddings.partition(":")
    if kind != "random":
        return data.embed(splits, "package" if config.embeddings == "glove" else config.embeddings)
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"embeddings must be glove, a file or random:SIZE, got {config.embeddings!r}")
    assert isinstance(splits.train, (data.Texts, data.Trees))
    vocabulary = data.Vocabulary.of(splits.train)
    generator = torch.Generator().manual_seed(config.seed)
    # 0.4 is about the deviation of GloVe's entries; row 0 is padding
    vectors = 0.4 * torch.randn(len(vocabulary), int(size), generator=generator)
    vectors[0] = 0
    return vocabulary, vectors
