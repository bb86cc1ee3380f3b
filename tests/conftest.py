"""What the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data that stands beside the project's checkout."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not (path / "data").is_dir():
        pytest.skip("needs the real data kept beside the checkout (../shared/data)")
    return path


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
