"""From a config to batches: which data, on which device, in what form the network wants them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from doublehead.data import (
    DATASETS,
    Broad,
    CropFlip,
    DeviceBatches,
    FileBatches,
    GaussianNoise,
    ImageFiles,
    Images,
    Normalise,
    Shifts,
    Splits,
    TextBatches,
    Texts,
    TreeBatches,
    Trees,
    Vocabulary,
    WordPieces,
    embed,
    load,
)
from doublehead.data.batches import Batches
from doublehead.data.splits import Samples, stratified_draw
from doublehead.models import MODELS
from doublehead.models.text import weights_folder
from doublehead.training.config import LEFT_OUT, Config

EVAL_BATCH = 500


@dataclass
class Maker:
    """How one kind of data becomes batches, and what the network has to know of it."""

    batches: Callable[[Samples, int, bool, int], Batches]  # (samples, batch_size, train, seed)
    perturbation: Callable[..., Callable[[Any], Any] | None]  # (name, share of a batch): the paper's g
    model_options: dict[str, Any] = field(default_factory=dict)
    memory_format: torch.memory_format = torch.preserve_format
    normalise: Normalise | None = None

    @property
    def coloured(self) -> bool:
        """Whether the inputs are images with three channels."""
        return self.normalise is not None and len(self.normalise.mean) == 3


@dataclass(kw_only=True)
class Inputs(Maker):
    """The batches of a run."""

    splits: Splits
    train: Batches
    make_calib: Callable[[], Batches]  # for training heads, shuffled; each group of heads takes its own
    make_eval: Callable[[Samples], Batches]  # this process's part, in order

    @property
    def n_classes(self) -> int:
        """K, the number of classes."""
        return self.splits.n_classes

    def whole(self, samples: Samples) -> Batches:
        """All of the samples in order, in every process."""
        return self.batches(samples, EVAL_BATCH, False, 0)


def load_inputs(
    config: Config,
    device: torch.device,
    splits: Splits | None,
    root: str | os.PathLike[str] | None,
    rank: int = 0,
    world_size: int = 1,
) -> Inputs:
    """Read the data set (unless `splits` is given) and make its batches for this process."""
    splits = _cut(config, load(config.data, root) if splits is None else splits)
    make = _maker(config, device, splits)
    if config.batch_size % world_size:
        raise ValueError(
            f"batch_size must be a multiple of the {world_size} processes, got {config.batch_size}"
        )

    def sharded(samples: Samples, batch_size: int, train: bool, seed: int) -> Batches:
        share = max(1, batch_size // world_size) if train else batch_size
        batches = make.batches(samples, share, train, seed)
        return batches.shard(rank, world_size) if world_size > 1 else batches

    test = splits.test
    test_batches = sharded(test, EVAL_BATCH, False, 0)  # kept: words take long to look up
    calib_batch = min(config.calib_batch_size, len(splits.calib))
    return Inputs(
        **vars(make),
        splits=splits,
        train=sharded(splits.train, config.batch_size, True, config.seed),
        make_calib=lambda: sharded(splits.calib, calib_batch, True, config.seed + 1),
        make_eval=lambda samples: test_batches if samples is test else sharded(samples, EVAL_BATCH, False, 0),
    )


def _cut(config: Config, splits: Splits) -> Splits:
    """The splits with as many samples as the config asks for."""
    return replace(
        splits,
        train=_some(splits.train, config.n_train),
        calib=_some(splits.calib, config.n_calib),
        test=_some(splits.test, config.n_test),
    )


def _some(samples: Samples, n: int | None) -> Samples:
    """At most `n` of the samples, each class in its share: files may be sorted by class."""
    if n is None or n >= len(samples):
        return samples
    return samples.take(np.sort(stratified_draw(samples.labels, n)))


def _maker(config: Config, device: torch.device, splits: Splits) -> Maker:
    kinds = {Images: _image_maker, ImageFiles: _file_maker, Texts: _word_maker, Trees: _word_maker}
    kind = type(splits.train)
    can_be_read = {Texts: ("words", "pieces"), Trees: ("words", "trees", "pieces")}.get(kind, ("images",))
    if config.model in MODELS and MODELS[config.model].reads not in can_be_read:
        raise ValueError(
            f"model must read {' or '.join(can_be_read)} for {config.data}, "
            f"got {config.model}, which reads {MODELS[config.model].reads}"
        )
    made = kinds[kind](config, device, splits)
    for name in {config.calib_augment, *config.augment_of.values(), *config.guards}:
        made.perturbation(name)  # raises where this data cannot be perturbed
    return made


def _image_maker(config: Config, device: torch.device, splits: Splits) -> Maker:
    assert isinstance(splits.train, Images)
    normalise = Normalise.of(splits.train.images)
    height, width, n_channels = splits.train.images.shape[1:]
    crop = CropFlip(padding=4, flip=config.augment == "crop-flip")

    def batches(samples: Samples, batch_size: int, train: bool, seed: int) -> Batches:
        assert isinstance(samples, Images)
        return DeviceBatches(
            samples.images,
            samples.labels,
            batch_size,
            device,
            train=train,
            # calibration images are not augmented this way
            augment=crop if samples is splits.train and train and config.augment != "none" else None,
            normalise=normalise,
            channels_last=True,
            seed=seed,
        )

    options = {"input": f"{height}x{width}x{n_channels}"}
    return Maker(batches, partial(_perturbation, normalise), options, torch.channels_last, normalise)


def _file_maker(config: Config, device: torch.device, splits: Splits) -> Maker:
    normalise = DATASETS["imagenet"].normalise
    size = config.image_size

    def batches(samples: Samples, batch_size: int, train: bool, seed: int) -> Batches:
        assert isinstance(samples, ImageFiles)
        augment = samples is splits.train and train and config.augment != "none"
        return FileBatches(
            samples,
            batch_size,
            device,
            train=train,
            augment=augment,
            size=size,
            normalise=normalise,
            workers=config.workers,
            seed=seed,
        )

    return Maker(
        batches,
        partial(_perturbation, normalise),
        {"input": f"{size}x{size}x3"},
        torch.channels_last,
        normalise,
    )


def _word_maker(config: Config, device: torch.device, splits: Splits) -> Maker:
    """Texts and trees: rows of one vocabulary, whose vectors the network gets unless it has its own."""
    assert isinstance(splits.train, (Texts, Trees))
    reads = MODELS[config.model].reads if config.model in MODELS else "words"
    if config.mixup:
        raise ValueError(f"mixup is for images, {config.data} holds words")
    if config.views:
        raise ValueError(f"views are for images, {config.data} holds words")
    if config.guards:
        raise ValueError(f"guards, and so the method guarded, are for images: {config.data} holds words")

    def no_perturbation(name: str, share: float = 0.5) -> None:
        if name:
            raise ValueError(f"calib_augment is for images, {config.data} holds words: leave it empty")

    vocabulary: Vocabulary | WordPieces
    if reads == "pieces":
        vocabulary = WordPieces(
            weights_folder(config.model_options.get("weights", "package")) / "tokenizer.json"
        )
        options = {}
    else:
        vocabulary, vectors = word_vectors(config, splits)
        options = {"vectors": vectors}

    def batches(samples: Samples, batch_size: int, train: bool, seed: int) -> Batches:
        assert isinstance(samples, (Texts, Trees))
        learns = samples is splits.train and train
        by_phrase = learns and config.phrases
        if reads == "trees":
            assert isinstance(samples, Trees)
            assert isinstance(vocabulary, Vocabulary)
            nodes: Literal["root", "all"] = "all" if by_phrase else "root"
            return TreeBatches(samples, vocabulary, batch_size, device, train=train, nodes=nodes, seed=seed)
        return TextBatches(
            samples.phrases() if by_phrase and isinstance(samples, Trees) else samples,  # as Kim (2014) does
            vocabulary,
            batch_size,
            device,
            train=train,
            max_length=config.max_words,
            crop=learns and config.augment != "none",
            seed=seed,
        )

    return Maker(batches, no_perturbation, options)


def word_vectors(config: Config, splits: Splits) -> tuple[Vocabulary, Tensor]:
    """The words of the data and their vectors, (V, D)."""
    kind, _, size = config.embeddings.partition(":")
    if kind != "random":
        return embed(splits, "package" if config.embeddings == "glove" else config.embeddings)
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"embeddings must be glove, a file or random:SIZE, got {config.embeddings!r}")
    assert isinstance(splits.train, (Texts, Trees))
    vocabulary = Vocabulary.of(splits.train)
    generator = torch.Generator().manual_seed(config.seed)
    # 0.4 is about the deviation of GloVe's entries; row 0 is padding
    vectors = 0.4 * torch.randn(len(vocabulary), int(size), generator=generator)
    vectors[0] = 0
    return vocabulary, vectors


def _perturbation(
    normalise: Normalise | None, name: str, share: float = 0.5
) -> Callable[[Tensor], Tensor] | None:
    """The g of that name for images that were normalised like this."""
    kind, _, left_out = name.partition("-")
    if not name:
        return None
    if name == "noise":
        return GaussianNoise(share=share, normalise=normalise)
    if kind == "shifts":  # a guard, which sees perturbed batches whole, learns from each as from a shift
        return Shifts(share, normalise, LEFT_OUT.get(left_out, ()), together=share == 1)
    return Broad(share, normalise, max_sigma=0.15 if name == "noise+broad" else 0.0)
