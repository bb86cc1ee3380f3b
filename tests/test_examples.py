"""Every example runs, says what it should, and stays short enough to read."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import pytest

from doublehead.optional import require

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {
    "lightning_callback": "lightning",
    "fabric_loop": "lightning",
    "transformers_trainer": "transformers",
    "accelerate_loop": "accelerate",
    "sklearn_classifier": "sklearn",
    "timm_network": "timm",
    "export_onnx": "onnxruntime",
}


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    require("torchvision", extra="models")  # some packages bring it, fitting or not
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def numbers(text: str, name: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{name} ([0-9.]+[0-9])", text)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(path, tmp_path, monkeypatch, capsys)
    assert out.strip()
    if path.stem == "plain_loop":
        before, after = (float(number) for number in out.split(" -> "))
        assert after < before / 2
    elif path.stem == "frozen_network":
        before, after = numbers(out, "ECE")
        assert after < before
        assert numbers(out, "accuracy")[0] == numbers(out, "accuracy")[1] > 0.75
        assert numbers(out, "NLL")[1] < numbers(out, "NLL")[0]
    elif path.stem == "shift_guard":
        accuracies, eces = numbers(out, "accuracy"), numbers(out, "ECE")
        assert accuracies[::2] == accuracies[1::2]
        assert eces[1] < eces[0] + 0.01
        assert eces[3] < 0.8 * eces[2]
    elif path.stem in ("accelerate_loop", "fabric_loop"):
        assert numbers(out, "accuracy")[0] > 0.75
        assert numbers(out, "ECE")[0] < 0.06
    elif path.stem == "export_onnx":
        assert float(out.split("largest difference ")[1].split()[0]) < 1e-5
        assert (tmp_path / "exported/README.md").read_text().startswith("---\n")
    elif path.stem == "transformers_trainer":
        assert "reloaded with its head" in out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40


def test_the_plain_loop_is_that_of_the_readme() -> None:
    def code(text: str) -> list[str]:
        return [re.sub(r"  +#", "  #", line) for line in text.splitlines() if line.strip()]

    readme = (EXAMPLES[0].parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "Alternation(" in block
    ]
    if not blocks:
        pytest.skip("the README shows no training loop")
    example = next(path for path in EXAMPLES if path.stem == "plain_loop").read_text()
    assert code(example)[2:] == code(blocks[0])


def test_every_integration_has_an_example() -> None:
    assert set(NEEDS) | {"plain_loop", "frozen_network", "shift_guard"} == {path.stem for path in EXAMPLES}
