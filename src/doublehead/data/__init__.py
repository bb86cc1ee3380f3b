"""One table of data sets -> Splits(train, calib, test); readers, corruptions, on-device batches, text."""

from doublehead.data.fashion import fashion_subset
from doublehead.data.splits import ImageFiles, Images, Splits, Texts, Trees

__all__ = ["ImageFiles", "Images", "Splits", "Texts", "Trees", "fashion_subset"]
