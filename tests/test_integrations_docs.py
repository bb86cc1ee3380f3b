"""The code of the tutorials runs as it stands, block after block."""

import re
import warnings
from pathlib import Path

import pytest

from doublehead.system import require

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
NEEDS = {
    "training": "torch",
    "lightning": "lightning",
    "transformers": "transformers",
    "sklearn": "sklearn",
    "export": "onnxruntime",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", NEEDS)
def test_tutorial(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS[page])
    require("torchvision", extra="models")  # some packages bring it, fitting or not
    monkeypatch.chdir(tmp_path)
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {"__name__": page}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)


def test_serving_takes_ten_lines() -> None:
    text = (FOLDER / "export.md").read_text(encoding="utf-8").split("## Serve the ONNX file")[1]
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    lines = [line for line in block.group(1).splitlines() if line.strip()]
    assert len(lines) <= 10
    assert not any("import torch" in line or "doublehead" in line for line in lines)
