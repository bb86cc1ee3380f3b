"""What the tests share."""

import random
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Make each warning one that the main process of xdist can read without importing the package of its class."""
    if warning_message.category.__module__ != "builtins":
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        warning_message.category, warning_message.message = UserWarning, UserWarning(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run files and their tests in random order, from another seed"
    parser.addoption("--shuffle", type=int, metavar="SEED", help=told)


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


@pytest.fixture(scope="session")
def resnet110(shared: Path) -> dict[str, Any]:
    """Predictions of a published network on CIFAR-10, for calibration ("val") and for testing ("test")."""
    import numpy as np

    from doublehead import Predictions

    with np.load(shared / "data/logits/resnet110_c10.npz") as arrays:
        splits = ("val", "test")
        return {name: Predictions(arrays[f"{name}_logits"], arrays[f"{name}_labels"]) for name in splits}


@pytest.fixture(scope="session")
def treebank(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the Stanford Sentiment Treebank's three files."""
    folder = tmp_path_factory.mktemp("treebank")
    with tarfile.open(shared / "data/sst/trees.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def few_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the stages of a head as for many samples, without a fit for each fold: for tests of something else."""
    monkeypatch.setattr("doublehead.calibrators.head.MAX_REFITTED", 0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests that fork: a child waits for ever for OpenMP's second thread where its parent has used one."""
    from doublehead import torch_tools  # not at the top: the main process of xdist reads this file

    with torch_tools.one_thread():
        yield


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The same random numbers for each test: those of --shuffle, or of seed 0."""
    import torch  # not at the top: the main process of xdist reads this file

    torch.manual_seed(request.config.getoption("--shuffle") or 0)
