"""The order of the modules, and an import that asks for torch and numpy alone."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "doublehead"

# A module, or a folder of them, imports only from those above it.
ORDER = (
    "system",
    # the method: from small tools to the companion
    "torch_tools", "calibration_data", "tasks", "network", "calibration_head", "head_training", "calibrated",
    "double_head", "llm_answers", "score_arrays",
    # what a classifier predicts, and how good that is
    "predictions", "losses", "bins", "metrics", "abstain", "calibrators",
    # the verb calibrate
    "calibrate", "guard", "shift_guard", "saving", "outcomes", "curves", "plots",
    # all numbers of some predictions
    "summary", "stream",
    # training
    "data", "models", "training",
    # files of predictions
    "files", "report_page",
    # the verbs evaluate and report
    "audit", "integrations", "cli", "__main__",
)  # fmt: skip
# Methods that open a door further down import it when they are called.
LATE = {
    "double_head": {"calibrate"},
    "calibrate": {"audit"},
    "calibrated": {"saving", "audit", "integrations"},
    "summary": {"stream"},
}
HEAVY = "matplotlib pandas sklearn scipy lightning torchvision torchmetrics typer transformers".split()  # noqa: SIM905


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def imports(source: str, *, only_at_import: bool = False) -> set[str]:
    """The modules of the package that `source` imports. `doublehead` itself may be imported for its version."""
    found = set()
    for node in top_level(ast.parse(source)) if only_at_import else ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("doublehead.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole module: from doublehead.x import y"
            base = node.module or ""
            if base.split(".")[0] == "doublehead":
                full = {f"{base}.{alias.name}" for alias in node.names} - {"doublehead.__version__"}
                found |= {name if name in MODULES else base for name in full}
    return found


def top_level(tree: ast.Module) -> list[ast.stmt]:
    """What runs when the module is imported: not the bodies of functions, nor what only a type checker reads."""
    statements = list(tree.body)
    for statement in statements:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            statements += [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
    return statements


def part(module: str) -> str:
    return module.split(".")[1]


def upward(module: str, source: str) -> list[str]:
    """The imports of a module that break the order."""
    broken = []
    at_import = imports(source, only_at_import=True)
    for wanted in sorted(imports(source)):
        if wanted == "doublehead":
            broken.append(f"{module} imports a name from doublehead itself: name the module it is from")
        elif part(wanted) in LATE.get(part(module), ()) and wanted not in at_import:
            continue
        elif part(wanted) != part(module) and ORDER.index(part(wanted)) > ORDER.index(part(module)):
            broken.append(f"{module} imports {wanted}, which stands below it")
    return broken


def test_the_list_is_complete_and_imports_go_up() -> None:
    files = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {path.stem for path in files} - {"__init__"} == set(ORDER)
    inner = {name: path for name, path in MODULES.items() if name != "doublehead"}
    broken = [line for name, path in inner.items() for line in upward(name, read(path))]
    assert not broken, "\n".join(broken)


def test_an_upward_import_is_seen() -> None:
    (broken,) = upward("doublehead.bins", "def f():\n    from doublehead import metrics")
    assert broken == "doublehead.bins imports doublehead.metrics, which stands below it"
    assert upward("doublehead.metrics", "import doublehead.cli")
    assert not upward("doublehead.metrics", "from doublehead.bins import Bins\nimport torch")


def test_no_circle_within_a_folder() -> None:
    graph = {name: imports(read(path), only_at_import=True) - {name} for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_method_stands_on_few_modules() -> None:
    closure, todo = set(), ["doublehead.double_head"]
    while todo:
        name = todo.pop()
        if name not in closure:
            closure.add(name)
            todo += imports(read(MODULES[name]), only_at_import=True)
    assert len(closure) < 10, sorted(closure)


BARE = """
import importlib.machinery, importlib.metadata, importlib.util, re, sys
def needs(name, seen):  # what torch and numpy cannot be installed without
    try: lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError: return seen
    seen.add(name)
    for line in lines:
        wanted = re.match(r"[\\w.-]+", line)[0]
        if "extra ==" not in line and wanted not in seen: needs(wanted, seen)
    return seen
files = [file for name in needs("torch", needs("numpy", set())) for file in importlib.metadata.files(name)]
allowed = {file.parts[0].split(".")[0] for file in files if file.suffix in (".py", ".so")}
allowed |= {*sys.stdlib_module_names, "doublehead"}
class Bare(importlib.machinery.PathFinder):  # finds what it would if nothing else were installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = name.split(".")[0] in allowed or name.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if known else None
"""
USE = """
from torch import nn
x, y = torch.randn(300, 4), torch.arange(300) % 3
double = doublehead.DoubleHead(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (x, y), every=1)
double.step()
p = doublehead.Predictions(double.finish()(x), y)
assert 0 <= doublehead.evaluate(p).values["ece"] <= 1
doublehead.calibrators.Temperature().fit(p).calibrate(p)
"""


def run(code: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stderr
    return done


def test_works_beside_torch_and_numpy_alone() -> None:
    hide = "sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Bare"
    gone = f"print(*(importlib.util.find_spec(name) for name in {HEAVY!r}))"
    out = run(f"{BARE}\nimport torch, numpy\n{hide}\n{gone}\nimport doublehead\n{USE}").stdout
    assert set(out.split()) == {"None"}


def test_import_stays_light() -> None:
    out = run(
        f"{BARE}\nimport torch, numpy\nbefore = set(sys.modules)\nimport doublehead\n"
        "print({n.split('.')[0] for n in set(sys.modules) - before} - allowed)\n"
        f"print(sorted(set(sys.modules) & set({HEAVY!r})))"
    ).stdout
    assert out.split("\n")[:2] == ["set()", "[]"]


def test_ci_runs_the_oldest_and_the_newest_python_that_the_package_names() -> None:
    project = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8")
    workflow = (SOURCE.parent / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    matrix = re.search(r"^ +python: \[(.*)\]", workflow, re.MULTILINE)
    assert re.findall(r"3\.\d+", matrix[1]) == [named[0], named[-1]]
    assert f'requires-python = ">={named[0]}"' in project


def test_the_command_names_its_extra_in_one_line() -> None:
    start = "import runpy, sys; sys.modules['typer'] = None; "
    done = run(f"{start}runpy.run_module('doublehead', run_name='__main__')", status=2)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert "'doublehead[cli]'" in done.stderr
