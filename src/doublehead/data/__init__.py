"""One table of data sets -> Splits(train, calib, test); readers, corruptions, on-device batches, text."""

from doublehead.data.batches import CropFlip, DeviceBatches
from doublehead.data.catalog import DATASETS, load, load_test
from doublehead.data.corruptions import FAMILIES, corrupt, corrupt_images, read_cifar10c
from doublehead.data.fashion import fashion_subset
from doublehead.data.files import FileBatches
from doublehead.data.glove import Embedding, embed
from doublehead.data.manage import check, convert, get, list_datasets
from doublehead.data.normalise import Normalise
from doublehead.data.perturb import Broad, GaussianNoise, Perturb, Shifts
from doublehead.data.splits import ImageFiles, Images, Splits, Texts, Trees, check_disjoint, count_duplicates
from doublehead.data.text import TextBatches, TreeBatches, Vocabulary, tokenize
from doublehead.data.trees import Tree, TreeBatch

__all__ = [
    "DATASETS",
    "FAMILIES",
    "Broad",
    "CropFlip",
    "DeviceBatches",
    "Embedding",
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
    "check",
    "check_disjoint",
    "convert",
    "corrupt",
    "corrupt_images",
    "count_duplicates",
    "embed",
    "fashion_subset",
    "get",
    "list_datasets",
    "load",
    "load_test",
    "read_cifar10c",
    "tokenize",
]
