"""The examples of docs/data.md that need no files run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", [code for code in EXAMPLES if "glove" not in code])
def test_example(code):
    exec(compile(code, str(PAGE), "exec"), {})


def test_table_says_what_the_code_says():
    from doublehead.data import DATASETS

    text = PAGE.read_text(encoding="utf-8")
    for spec in DATASETS.values():
        sizes = " / ".join(f"{n:,}" for n in spec.sizes)
        assert re.search(rf"\|.*`{re.escape(spec.name)}`.*\| .*{spec.n_classes}.*\| {sizes} \|", text), (
            spec.name
        )
