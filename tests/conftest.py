"""What the tests share."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from doublehead.system import require


def pytest_configure(config: pytest.Config) -> None:
    """Let the main process of xdist import the classes of the workers' warnings: Lightning's import torchvision."""
    if not hasattr(config, "workerinput"):
        with suppress(ImportError):
            require("torchvision", extra="train")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run files and their tests in random order, from another seed",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, then the tests of each: fixtures of a module are still made once."""
    seed = config.getoption("--shuffle")
    if seed is not None:
        draw = random.Random(seed)  # the same in each process of xdist
        files = sorted({item.path for item in items})
        draw.shuffle(files)
        draw.shuffle(items)
        items.sort(key=lambda item: files.index(item.path))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data that stands beside the project's checkout."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not (path / "data").is_dir():
        pytest.skip("needs the real data kept beside the checkout (../shared/data)")
    return path


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The same random numbers for each test: those of --shuffle, or of seed 0."""
    torch.manual_seed(request.config.getoption("--shuffle") or 0)
