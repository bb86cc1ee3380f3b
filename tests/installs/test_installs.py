"""The wheel and the source distribution, installed as a user would: `make test-installs`.

Each set of extras gets an environment of its own. All of them start as copies of one that holds torch and numpy.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from test_layout import USE

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
ENVIRON |= {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "120"}
CORE = "bins predictions metrics calibration_head double_head files layout"

HELP = """
from doublehead import cli
groups = {cli.app: [], cli.data_app: ["data"]}
names = [[*groups[group], f.__name__.strip("_")] for group, own in cli.COMMANDS.items() for f in own]
names.append(["data"])
for name in [[], *names]:
    print("##", *name)
    cli.app([*name, "--help"], standalone_mode=False)
"""


class Environment:
    """A virtual environment and the commands in it, which run in the folder `work`."""

    def __init__(self, path: Path, work: Path) -> None:
        self.bin, self.work = path / ("Scripts" if os.name == "nt" else "bin"), work

    def run(self, program: str, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / program), *map(str, arguments)]
        how = {"cwd": self.work, "env": ENVIRON, "capture_output": True, "text": True, "timeout": 500}
        done = subprocess.run(command, check=False, **how)
        assert done.returncode == code, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def install(self, *what: str) -> None:
        pip = ("python", "-m", "pip", "install", "-q", "--no-compile")
        self.run(*pip, "-c", ROOT / "constraints.txt", *what)

    def doublehead(self, *arguments: str | Path) -> str:
        return self.run("doublehead", *arguments).stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the source distribution and of the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", out, ROOT]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the unpacked source distribution."""
    (archive,) = built.glob("*.tar.gz")
    out = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as files:
        files.extractall(out)
    (root,) = out.iterdir()
    return root


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with two files of overconfident predictions."""
    path = tmp_path_factory.mktemp("work")
    draw = random.Random(0)
    for name in ("val", "test"):
        lines = ["label,logit_0,logit_1,logit_2"]
        for _ in range(300):
            label = draw.randrange(3)
            scores = [draw.gauss(0, 4) + (3 if k == label else 0) for k in range(3)]
            lines.append(f"{label},{','.join(map(repr, scores))}")
        (path / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, work: Path) -> Path:
    """An environment with torch and numpy."""
    path = tmp_path_factory.mktemp("environments") / "base"
    venv.create(path, with_pip=True, symlinks=os.name != "nt")
    made = Environment(path, work)
    made.install("torch", "numpy")
    made.run("python", "-c", "import torch")  # compiles to bytecode what all copies need
    return path


def environment(base: Path, work: Path, wheel: Path, extra: str) -> Environment:
    """A new environment with the wheel and one extra; "" for none."""
    path = base.parent / (extra or "bare")
    shutil.copytree(base, path, symlinks=True, copy_function=os.link)  # hard links: quick and small
    made = Environment(path, work)
    made.install(f"{wheel}[{extra}]" if extra else str(wheel))
    made.run("python", "-m", "pip", "check")
    return made


def check_help(made: Environment) -> None:
    """Every command says how to use it."""
    out = made.run("python", "-c", HELP).stdout
    pages = out.split("## ")[1:]
    assert len(pages) >= 12
    for page in pages:
        name, _, text = page.partition("\n")
        assert "Usage:" in text, name
        assert "--help" in text, name


def check_audit(made: Environment) -> None:
    """A file of predictions is judged and repaired."""
    before = json.loads(made.doublehead("evaluate", "test.csv", "--logits", "--json"))
    files = ("--fit", "val.csv", "--apply", "test.csv", "-o", "repaired.csv")
    made.doublehead("calibrate", *files, "--logits", "--force")
    after = json.loads(made.doublehead("evaluate", "repaired.csv", "--probs", "--json"))
    assert after["n"] == before["n"]
    assert after["metrics"]["nll"]["value"] < before["metrics"]["nll"]["value"]


def check_report(made: Environment) -> None:
    made.doublehead("report", "test.csv", "--logits", "-o", "page.html")
    page = made.work / "page.html"
    assert "</html>" in page.read_text(encoding="utf-8")
    page.unlink()


def test_bare(base: Path, work: Path, wheel: Path) -> None:
    made = environment(base, work, wheel, "")
    made.run("python", "-c", f"import doublehead, torch\n{USE}")
    for command in (["doublehead"], ["python", "-m", "doublehead", "--help"]):
        done = made.run(*command, code=2)
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "pip install 'doublehead[cli]'" in done.stderr


def test_cli(base: Path, work: Path, wheel: Path) -> None:
    made = environment(base, work, wheel, "cli")
    check_help(made)
    assert made.run("python", "-m", "doublehead", "data", "list").stdout == made.doublehead("data", "list")
    for command in (["evaluate", "test.csv", "--logits"], ["report", "test.csv", "--logits"], ["demo"]):
        assert made.run("doublehead", *command, code=2).stderr.count("pip install 'doublehead[") == 1, command


@pytest.mark.parametrize(("extra", "check"), [("audit", check_audit), ("report", check_report)])
def test_one_extra(extra: str, check: Any, base: Path, work: Path, wheel: Path) -> None:
    made = environment(base, work, wheel, extra)
    check_help(made)
    check(made)


def test_all_and_the_tests_of_the_source(base: Path, work: Path, wheel: Path, unpacked: Path) -> None:
    made = environment(base, work, wheel, "all")
    check_help(made)
    check_audit(made)
    check_report(made)
    small = ["epochs=1", "n_train=256", "n_calib=256", "n_test=256"]
    settings = [part for setting in small for part in ("--set", setting)]
    trained = made.doublehead("train", "--data", "fashion", "--accelerator", "cpu", *settings, "--json")
    rows = json.loads(trained)  # the network, the same after a temperature, the staged head
    assert len(rows) == 3
    assert all(0 <= row["ece"] <= 1 for row in rows)
    made.install("pytest")
    core = [f"tests/test_{name}.py" for name in CORE.split()]
    Environment(base.parent / "all", unpacked).run("python", "-m", "pytest", "-q", *core)


def test_what_is_distributed(wheel: Path, unpacked: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"doublehead"}
    assert {"doublehead/py.typed", "doublehead/__main__.py"} <= set(names)
    for name in ("tests/conftest.py", "examples", "docs/index.md", "LICENSE", "constraints.txt"):
        assert (unpacked / name).exists(), name
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    sizes = {path.relative_to(unpacked): path.stat().st_size for path in files}
    big = {str(path) for path, size in sizes.items() if size > 500_000}
    assert big == {str(Path("src/doublehead/data/assets/fashion_mnist_subset.npz"))}
    assert not any("results" in path.parts for path in sizes)
