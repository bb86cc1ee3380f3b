"""The table of docs/data.md says what the code says. Its examples are run by test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"


def test_table_says_what_the_code_says():
    from doublehead.data import DATASETS

    text = PAGE.read_text(encoding="utf-8")
    for spec in DATASETS.values():
        sizes = " / ".join(f"{n:,}" for n in spec.sizes)
        assert re.search(rf"\|.*`{re.escape(spec.name)}`.*\| .*{spec.n_classes}.*\| {sizes} \|", text), (
            spec.name
        )
