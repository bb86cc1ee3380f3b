"""Predictions in files: CSV, Parquet and numpy in, numbers and repaired files out, streamed, on one machine or many."""

from doublehead.tables.files import NoRows, TableError
from doublehead.tables.reading import PredictionTable, read_predictions
from doublehead.tables.tally import Tallies, Tally, tally_table

__all__ = ["NoRows", "PredictionTable", "TableError", "Tallies", "Tally", "read_predictions", "tally_table"]
