"""Errors a person can act on: one sentence, no traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from doublehead.tables.files import TableError


class UserError(Exception):
    """What went wrong, in one sentence for the person at the keyboard."""


@contextmanager
def told_to_user() -> Iterator[None]:
    """Turn errors that are about files, places and missing packages into a `UserError`; others are bugs and pass."""
    try:
        yield
    except (TableError, ConnectionError) as error:
        raise UserError(str(error)) from error
    except ImportError as error:
        if "pip install 'doublehead[" not in str(error):
            raise
        raise UserError(str(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{place}{error.strerror or error}") from error
