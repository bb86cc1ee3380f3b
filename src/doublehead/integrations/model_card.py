"""A model card in Hugging Face's format: what the model is, what it was trained on, and how far to trust it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from doublehead.metrics import Interval
from doublehead.predictions import Predictions
from doublehead.tables.tally import Summary, Tally

ROWS = {"accuracy": "accuracy", "ece": "ECE", "nll": "NLL", "brier": "Brier score"}
IN_PERCENT = ("accuracy", "ece")
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
    after, main = (
        Tally.of(test, n_bins).summary(),
        None if before is None else Tally.of(before, n_bins).summary(),
    )
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
        f"## How far to trust it ({after.n:,} test samples)",
        "",
        *_table(after, main, n_bins),
        "",
        verdict(after),
        "",
        "These numbers hold for data like the test data. Under distribution shift confidences are less reliable.",
        "",
        "## How to use it",
        "",
        SERVE.format(inputs=inputs),
    ]
    if classes:
        lines += ["", "## Classes", "", *(f"{number}. {one}" for number, one in enumerate(classes))]
    if settings:
        lines += ["", "## Settings", "", "```json", json.dumps(dict(settings), indent=1), "```"]
    return "\n".join(lines) + "\n"


def verdict(summary: Summary) -> str:
    """One sentence on the ECE against that of a perfect model."""
    low, high = (f"{100 * bound:.2f}" for bound in (summary.floor.low, summary.floor.high))
    ece = f"{100 * summary.metrics['ece'].estimate:.2f} %"
    perfect = f"a perfectly calibrated model with these confidences scores {low} .. {high} %"
    if summary.p_value > 0.05:
        return f"On this many samples no miscalibration can be shown: ECE {ece}, and {perfect}."
    return f"Some miscalibration remains: ECE {ece}, where {perfect}."


def _index(name: str, task: str, dataset: str, summary: Summary) -> dict[str, Any]:
    metrics = [
        {"type": key, "name": title, "value": round(summary.metrics[key].estimate, 6)}
        for key, title in ROWS.items()
    ]
    about = {"type": dataset, "name": dataset, "split": "test"}
    return {"name": name, "results": [{"task": {"type": task}, "dataset": about, "metrics": metrics}]}


def _table(after: Summary, main: Summary | None, n_bins: int) -> list[str]:
    heads = ["", "calibrated"] if main is None else ["", "network alone", "calibrated"]
    summaries = [after] if main is None else [main, after]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for key, title in ROWS.items():
        shown = f"{title}, {n_bins} bins, 95 % interval" if key == "ece" else f"{title}, 95 % interval"
        cells = [_cell(one.metrics[key], key in IN_PERCENT) for one in summaries]
        lines.append("| " + " | ".join([shown, *cells]) + " |")
    floors = [_cell(Interval(*one.floor), percent=True) for one in summaries]
    return [*lines, "| " + " | ".join(["ECE of a perfect model, 5 to 95 %", *floors]) + " |"]


def _cell(value: Interval, percent: bool) -> str:
    if percent:
        return f"{100 * value.estimate:.2f} % ({100 * value.low:.2f} .. {100 * value.high:.2f})"
    return f"{value.estimate:.4f} ({value.low:.4f} .. {value.high:.4f})"
