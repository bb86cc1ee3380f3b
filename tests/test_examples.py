"""Every example and the notebook run and print what they should."""

import ast
import json
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

import doublehead.data
from doublehead.system import require

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
NEEDS = {
    "lightning_callback": "lightning", "fabric_loop": "lightning", "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers", "language_model": "transformers", "timm_network": "timm",
    "export_onnx": "onnxruntime", "skorch_callback": "skorch", "fastai_callback": "fastai",
    **dict.fromkeys(("sklearn_classifier", "one_logit", "several_labels", "segmentation"), "sklearn"),
}  # fmt: skip


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    require("torchvision", extra="models")  # first: Lightning cannot import one that does not fit torch
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def numbers(text: str, name: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{name} ([0-9.]+[0-9])", text)]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = run(path, tmp_path, monkeypatch, capsys)
    assert out.strip()
    if path.stem == "plain_loop":
        before, after = (float(number) for number in out.split(" -> "))
        assert after < before
    elif path.stem == "frozen_network":
        before, after = numbers(out, "ECE")
        assert after < before
        assert numbers(out, "accuracy")[0] == numbers(out, "accuracy")[1] > 0.75
        assert numbers(out, "NLL")[1] < numbers(out, "NLL")[0]
    elif path.stem in ("one_logit", "several_labels", "segmentation", "language_model"):
        before_and_after = numbers(out, "NLL")
        assert before_and_after
        assert all(after < before for before, after in zip(before_and_after[::2], before_and_after[1::2]))
    elif path.stem == "shift_guard":
        assert ["ALARM" in line for line in out.splitlines()] == [False] * 4 + [True] * 4
        after, before = numbers(out, "ECE"), numbers(out, "guard")
        assert sum(after[:4]) < sum(before[:4]) + 0.04
        assert sum(after[4:]) < 0.7 * sum(before[4:])
    elif path.stem in ("accelerate_loop", "fabric_loop"):
        assert numbers(out, "accuracy")[0] > 0.75
        assert numbers(out, "ECE")[0] < 0.06
    elif path.stem == "export_onnx":
        assert float(out.split("largest difference ")[1].split()[0]) < 1e-5
        assert (tmp_path / "exported/README.md").read_text().startswith("---\n")
    elif path.stem in ("skorch_callback", "fastai_callback"):
        nlls = re.findall(r"^(?:network|calibrated) +([0-9.]+)", out, re.MULTILINE)
        assert float(nlls[1]) < float(nlls[0]) + 0.01
    elif path.stem == "transformers_trainer":
        assert "reloaded with its head" in out


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells in order, in one namespace, on fewer images; what a cell ends in must be able to show itself."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    for package in ("jinja2", "safetensors"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("agg")
    few = doublehead.data.fashion_subset().first(1000, 500, 1000)
    monkeypatch.setattr(doublehead.data, "fashion_subset", lambda: few)
    names: dict[str, Any] = {"__name__": "quickstart"}
    for number, cell in enumerate(code_cells()):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"quickstart.ipynb, code cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), f"quickstart.ipynb, code cell {number}", "eval")
            shown = eval(code, names)
            assert getattr(shown, "_repr_html_", shown.__repr__)() if shown is not None else True
    pyplot.close("all")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_notebook_was_executed_in_order() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert "stderr" not in {output.get("name") for output in outputs}
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_every_integration_has_an_example() -> None:
    assert set(NEEDS) | {"plain_loop", "frozen_network", "shift_guard"} == {path.stem for path in EXAMPLES}
