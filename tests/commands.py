"""The command line, called within the process of a test."""

from pathlib import Path
from typing import Any

import pytest

testing = pytest.importorskip("typer.testing")
from doublehead.cli import app  # noqa: E402


def call(*words: str | Path, code: int = 0) -> Any:
    """What `doublehead WORDS` gives, once it ended with this exit code."""
    result = testing.CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result
