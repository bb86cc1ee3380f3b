"""A model card in Hugging Face's format: the model, its data, its method and its calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from doublehead.metrics import Interval
from doublehead.predictions import Predictions
from doublehead.showing import METRICS, shown, shown_interval
from doublehead.summary import Summary

ROWS = ("accuracy", "ece", "nll", "brier")
SERVE = """```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
inputs = {inputs}
probs, label, confidence = session.run(["probs", "label", "confidence"], inputs)
for one, how_sure in zip(label, confidence):
    print(f"class {{one}}, right with probability {{how_sure:.2f}}")
```"""


def model_card(
    name: str,
    *,
    dataset: str,
    data: str,
    method: str,
    test: Predictions,
    before: Predictions | None = None,
    classes: Sequence[str] = (),
    task: str = "image-classification",
    inputs: str = '{"input": np.zeros((1, 3, 32, 32), np.float32)}',
    settings: Mapping[str, Any] | None = None,
    n_bins: int = 15,
) -> str:
    """The text of README.md: a YAML head that the Hub reads, then data, method and numbers for people.

    `dataset` is its short name, `data` a sentence about it. `test` are the calibrated predictions on data that neither
    the network nor its head has seen, `before` those of the network alone. ECE stands with its 95 % interval and the
    floor of a perfect model. `inputs` is Python code for the example of use.
    """
    after, main = Summary.of(test, n_bins), None if before is None else Summary.of(before, n_bins)
    lines = [
        "---",
        "library_name: doublehead",
        f"pipeline_tag: {task}",
        "tags: [calibration, uncertainty, doublehead]",
        f"model-index: {json.dumps([_index(name, task, dataset, after)])}",  # JSON is YAML
        "---",
        f"# {name}",
        "",
        "A classifier whose confidences are calibrated: of all answers given with a confidence of 0.8, about 80 % "
        "should be right. Outputs: `probs`, `label` and `confidence`.",
        "",
        f"**Data.** {data}",
        "",
        f"**Method.** {method}",
        "",
        f"## Calibration ({after.n:,} test samples)",
        "",
        *_table(after, main, n_bins),
        "",
        after.verdict,
        "",
        "These numbers hold for data like the test data. Under distribution shift confidences are less reliable.",
        "",
        "## Use",
        "",
        SERVE.format(inputs=inputs),
    ]
    if classes:
        lines += ["", "## Classes", "", *(f"{number}. {one}" for number, one in enumerate(classes))]
    if settings:
        lines += ["", "## Settings", "", "```json", json.dumps(dict(settings), indent=1), "```"]
    return "\n".join(lines) + "\n"


def _index(name: str, task: str, dataset: str, summary: Summary) -> dict[str, Any]:
    metrics = [
        {"type": key, "name": METRICS[key].title, "value": round(summary.metrics[key].estimate, 6)}
        for key in ROWS
    ]
    about = {"type": dataset, "name": dataset, "split": "test"}
    return {"name": name, "results": [{"task": {"type": task}, "dataset": about, "metrics": metrics}]}


def _table(after: Summary, main: Summary | None, n_bins: int) -> list[str]:
    heads = ["", "calibrated"] if main is None else ["", "network alone", "calibrated"]
    summaries = [after] if main is None else [main, after]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for key in ROWS:
        title = f"{METRICS[key].title}, {n_bins} bins" if key == "ece" else METRICS[key].title
        cells = [_cell(one.metrics[key], METRICS[key].is_share) for one in summaries]
        lines.append("| " + " | ".join([f"{title}, 95 % interval", *cells]) + " |")
    floors = [_cell(Interval(*one.floor), is_share=True) for one in summaries]
    return [*lines, "| " + " | ".join(["ECE of a perfectly calibrated model, 5 to 95 %", *floors]) + " |"]


def _cell(value: Interval, is_share: bool) -> str:
    return f"{shown(value.estimate, is_share)} ({shown_interval(value, is_share)})"
