"""Data sets as train, calib and test splits; batches on a device; text; corruptions and perturbations."""

from doublehead.data.batches import CropFlip, DeviceBatches, FileBatches, Normalise
from doublehead.data.catalog import (
    DATASETS,
    check,
    fashion_subset,
    get,
    load,
    load_test,
)
from doublehead.data.corruptions import FAMILIES, corrupt, read_cifar10c
from doublehead.data.perturb import Broad, GaussianNoise, Perturb, Shifts
from doublehead.data.splits import ImageFiles, Images, Splits, Texts, Trees, count_duplicates, split_off
from doublehead.data.text import TextBatches, TreeBatches, Vocabulary, WordPieces, embed, tokenize
from doublehead.data.trees import Tree, TreeBatch

__all__ = [
    "DATASETS",
    "FAMILIES",
    "Broad",
    "CropFlip",
    "DeviceBatches",
    "FileBatches",
    "GaussianNoise",
    "ImageFiles",
    "Images",
    "Normalise",
    "Perturb",
    "Shifts",
    "Splits",
    "TextBatches",
    "Texts",
    "Tree",
    "TreeBatch",
    "TreeBatches",
    "Trees",
    "Vocabulary",
    "WordPieces",
    "check",
    "corrupt",
    "count_duplicates",
    "embed",
    "fashion_subset",
    "get",
    "load",
    "load_test",
    "read_cifar10c",
    "split_off",
    "tokenize",
]
