"""Constants of a module, set for a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def constants(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these constants of a module are other ones.

    >>> import math
    >>> with constants(math, {"tau": 6.0}):
    ...     math.tau
    6.0
    >>> round(math.tau, 3)
    6.283
    """
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
