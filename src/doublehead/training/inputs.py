"""From a config to batches: which data, on which device, in what form the network wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    Splits,
    TextBatches,
    Texts,
    TreeBatches,
    Trees,
    Vocabulary,
    embed,
    load,
)
from doublehead.data.epochs import Batches
from doublehead.data.splits import Samples
from doublehead.models import MODELS
from doublehead.training.config import Config

EVAL_BATCH = 500


@dataclass
class Inputs:
    """The batches of a run and what the network has to know of them."""

    splits: Splits
    train: Batches
    calib: Callable[
        [], Batches
    ]  # for training heads, shuffled; each group of heads has its own place in them
    calib_for_auto: Batches  # the part of it that `auto` does not hold back
    held_back: Batches
    make_eval: Callable[[Samples], Batches]
    perturbation: Callable[[str], Callable[[Any], Any] | None]  # by name: the paper's g
    model_options: dict[str, Any] = field(default_factory=dict)
    memory_format: torch.memory_format = torch.preserve_format
    normalise: Normalise | None = None

    @property
    def n_classes(self) -> int:
        """K, the number of classes."""
        return self.splits.n_classes


def load_inputs(
    config: Config,
    device: torch.device,
    splits: Splits | None,
    root: str | None,
    rank: int = 0,
    world_size: int = 1,
) -> Inputs:
    """Read the data set (unless `splits` is given) and make its batches for this process."""
    if splits is None:
        splits = load(config.data, root)
    if config.n_train or config.n_calib or config.n_test:
        asked = (config.n_train, config.n_calib, config.n_test)
        splits = splits.first(*(n or size for n, size in zip(asked, splits.sizes)))
    kinds = {Images: _image_maker, ImageFiles: _file_maker, Texts: _word_maker, Trees: _word_maker}
    make = kinds[type(splits.train)](config, device, splits)
    order = np.random.RandomState(config.seed).permutation(len(splits.calib))
    n_held = round(config.hold_back * len(order))

    def sharded(samples: Samples, batch_size: int, train: bool, seed: int) -> Batches:
        share = max(1, batch_size // world_size) if train else batch_size
        batches = make.batches(samples, share, train, seed)
        return batches.shard(rank, world_size) if world_size > 1 else batches

    k = config.calib_batch_size
    return Inputs(
        splits=splits,
        train=sharded(splits.train, config.batch_size, True, config.seed),
        calib=lambda: sharded(splits.calib, min(k, len(order)), True, config.seed + 1),
        calib_for_auto=sharded(
            splits.calib.take(np.sort(order[n_held:])), min(k, len(order) - n_held), True, config.seed + 1
        ),
        held_back=sharded(splits.calib.take(np.sort(order[:n_held])), EVAL_BATCH, False, 0),
        make_eval=lambda samples: sharded(samples, EVAL_BATCH, False, 0),
        perturbation=make.perturbation,
        model_options=make.model_options,
        memory_format=make.memory_format,
        normalise=make.normalise,
    )


@dataclass
class Maker:
    """How one kind of data becomes batches: (samples, batch_size, train, seed) -> Batches."""

    batches: Callable[[Samples, int, bool, int], Batches]
    perturbation: Callable[[str], Callable[[Any], Any] | None]
    model_options: dict[str, Any] = field(default_factory=dict)
    memory_format: torch.memory_format = torch.preserve_format
    normalise: Normalise | None = None


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
    """Texts and trees: rows of one vocabulary, whose vectors the network gets."""
    assert isinstance(splits.train, (Texts, Trees))

    def no_perturbation(name: str) -> None:
        if name:
            raise ValueError(f"calib_augment is for images, {config.data} holds words: leave it empty")

    if config.embeddings.startswith("random:"):
        vocabulary = Vocabulary.of(splits.train)
        generator = torch.Generator().manual_seed(config.seed)
        vectors = 0.4 * torch.randn(len(vocabulary), int(config.embeddings[7:]), generator=generator)
    else:
        found = embed(splits, "package" if config.embeddings == "glove" else config.embeddings)
        vocabulary, vectors = found.vocabulary, found.vectors
    reads_trees = config.model in MODELS and MODELS[config.model].reads == "trees"

    def batches(samples: Samples, batch_size: int, train: bool, seed: int) -> Batches:
        assert isinstance(samples, (Texts, Trees))
        if reads_trees:
            assert isinstance(samples, Trees)
            nodes: Literal["root", "all"] = "all" if samples is splits.train and train else "root"
            return TreeBatches(samples, vocabulary, batch_size, device, train=train, nodes=nodes, seed=seed)
        return TextBatches(
            samples, vocabulary, batch_size, device, train=train, max_length=config.max_words, seed=seed
        )

    return Maker(batches, no_perturbation, {"vectors": vectors})


def _perturbation(normalise: Normalise | None, name: str) -> Callable[[Tensor], Tensor] | None:
    """The g of that name for images that were normalised like this."""
    if not name:
        return None
    if name == "noise":
        return GaussianNoise(normalise=normalise)
    return Broad(normalise=normalise, max_sigma=0.15 if name == "noise+broad" else 0.0)
