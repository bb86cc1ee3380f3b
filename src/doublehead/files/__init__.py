"""Predictions in files of many formats: read in chunks, summarised on one machine or many, written back."""

from doublehead.files.reading import PredictionTable, read_predictions
from doublehead.files.sources import NoRows, TableError

__all__ = ["NoRows", "PredictionTable", "TableError", "read_predictions"]
