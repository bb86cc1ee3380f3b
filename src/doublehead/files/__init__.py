"""Predictions in CSV, Parquet and numpy files: read in chunks, summarised on one machine or many, written back."""

from doublehead.files.formats import NoRows, TableError
from doublehead.files.reading import PredictionTable, read_predictions

__all__ = ["NoRows", "PredictionTable", "TableError", "read_predictions"]
