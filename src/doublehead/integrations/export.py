"""A calibrated model for production: network, head and guard as one program that outputs probs, label and confidence.

The folder written holds the model, `config.json` with its inputs and outputs, and `README.md`, a model card in Hugging
Face's format. Every export is run against the original before it is kept. Nothing here, and nothing that loads these
files, executes a pickle.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from doublehead.calibrated import Calibrated
from doublehead.predictions import Predictions
from doublehead.saving import WEIGHTS, load, save
from doublehead.shift_guard import ShiftGuard
from doublehead.summary import METRICS, Summary, side_by_side
from doublehead.system import require
from doublehead.tasks import Task, class_scores, find_logits
from doublehead.torch_tools import device_of, evaluating, uncompiled

Form: TypeAlias = Literal["onnx", "torch-export", "safetensors"]
OUTPUTS = ("probs", "label", "confidence")
FILES = {"onnx": "model.onnx", "torch-export": "model.pt2", "safetensors": WEIGHTS}
TOLERANCE = 1e-5  # on probabilities
ALONE = "judges each input by itself and raises no alarm: a window is state, which an exported program lacks"


class _Answering(nn.Module):
    """A Calibrated or ShiftGuard that returns probs (B, K), the label (B,) and the confidence in it (B,).

    One logit becomes the probabilities of two classes; for tokens and pixels the class axis of probs is the last.
    Inputs come in order; `names` are the keywords under which the network gets them, where it wants keywords.
    `prepare` turns the first input into the network's own, such as pixels into normalised ones.
    """

    def __init__(
        self, model: Calibrated | ShiftGuard, prepare: Callable[[Any], Any] | None, names: Sequence[str]
    ) -> None:
        super().__init__()
        self.model, self.prepare, self.names = model, prepare, tuple(names)
        self.task: Task = self.inner.reader.task if isinstance(self.inner, Calibrated) else "classes"

    @property
    def inner(self) -> nn.Module:
        """The model without a guard."""
        return self.model.model if isinstance(self.model, ShiftGuard) else self.model

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(probs, label, confidence)."""
        if self.prepare is not None:
            inputs = (self.prepare(inputs[0]), *inputs[1:])
        output = self.model(**dict(zip(self.names, inputs))) if self.names else self.model(*inputs)
        probs = class_scores(find_logits(output).float(), self.task).softmax(-1)
        confidence, label = probs.max(-1)
        return probs, label, confidence


def export_model(
    model: Calibrated | ShiftGuard,
    path: str | Path,
    example: Any,
    to: Form = "onnx",
    *,
    prepare: Callable[[Any], Any] | None = None,
    card: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the network with its head, guard, or both, as one model into the folder `path`; returns the model's file.

    `example` is a batch of inputs: a tensor, a tuple of them, or a dict for models that are called by keyword. Its
    batch size stays free in what is written; so does the length of whole-number inputs (B, T), which are words.
    `to="onnx"` and `"torch-export"` write a program with the outputs probs, label and confidence; `"safetensors"`
    writes what `model.save` does, weights which `doublehead.load` puts into a network you build. A guard's window is
    state, which a program does not have: there the guard judges each sample by itself. `prepare` is a step
    before the network, `card` the text of README.md, and `facts` are added to config.json.
    """
    if to not in FILES:
        raise ValueError(f"to must be one of {', '.join(FILES)}, got {to!r}")
    inner: Any = uncompiled(model)
    if not isinstance(inner, (Calibrated, ShiftGuard)):
        raise TypeError(f"model must be a Calibrated or a ShiftGuard, got {type(inner).__name__}")
    names, inputs = _inputs(example, device_of(inner))
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with (
        evaluating(inner),
        inner.guard.alone() if isinstance(inner, ShiftGuard) else nullcontext(),
        torch.no_grad(),
        tempfile.TemporaryDirectory(dir=path, prefix=".export-") as folder,
    ):
        answering = _Answering(inner, prepare, names).eval()
        # Once outside of a trace: constants that are kept from now on must be real tensors.
        answering(*inputs)
        write = {"onnx": _to_onnx, "torch-export": _to_program, "safetensors": _to_weights}[to]
        file = Path(folder) / FILES[to]
        write(answering, inputs, file)
        file.replace(path / FILES[to])
    config = {
        **(facts or {}), "format": to, "inputs": _input_names(answering, inputs), "outputs": list(OUTPUTS)
    }  # fmt: skip
    if isinstance(inner, ShiftGuard) and to != "safetensors":
        config["guard"] = ALONE
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if card is not None:
        (path / "README.md").write_text(card)
    return path / FILES[to]


def load_program(path: str | Path) -> nn.Module:
    """What `to="torch-export"` wrote, ready to call. A file with a pickle or native code to execute is an error."""
    path = Path(path) / FILES["torch-export"] if Path(path).is_dir() else Path(path)
    with zipfile.ZipFile(path) as archive:
        _refuse_code(archive, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own pytree
        return torch.export.load(path).module()


def _inputs(example: Any, device: torch.device) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The example's keywords, if it has any, and its tensors on `device`.

    At least two samples: a batch of one would be taken for a constant.
    """
    names = tuple(example) if isinstance(example, Mapping) else ()
    parts = example.values() if isinstance(example, Mapping) else example
    found = []
    for value in parts if isinstance(parts, (tuple, list)) or names else (parts,):
        if not isinstance(value, Tensor) or value.ndim == 0:
            raise TypeError(
                f"example must be a tensor, or a tuple or dict of them, got {type(value).__name__}"
            )
        found.append((torch.cat([value, value]) if len(value) == 1 else value).to(device))
    return names, tuple(found)


def _input_names(model: _Answering, inputs: tuple[Tensor, ...]) -> list[str]:
    if model.names:
        return list(model.names)
    return ["input"] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))]


def _free_axes(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """The free sizes for torch.export: that of the batch, and the length of words where the network allows it."""
    batch = torch.export.Dim("batch", min=1)

    def axes(value: Tensor) -> dict[int, Any]:
        words = value.ndim == 2 and not value.is_floating_point()
        return {0: batch, 1: torch.export.Dim.AUTO} if words else {0: batch}

    return {"inputs": tuple(axes(value) for value in inputs)}


def _to_program(model: _Answering, inputs: tuple[Tensor, ...], file: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.export.save(torch.export.export(model, inputs, dynamic_shapes=_free_axes(inputs)), file)
    _compare(model, load_program(file), inputs, "torch.export")


def _to_onnx(model: _Answering, inputs: tuple[Tensor, ...], file: Path) -> None:
    require("onnxscript", extra="export")
    runtime = require("onnxruntime", extra="export")
    names = _input_names(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            file,
            input_names=names,
            output_names=list(OUTPUTS),
            dynamic_shapes=_free_axes(inputs),
            dynamo=True,
            external_data=False,  # one file
            verbose=False,
        )
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(*some: Tensor) -> list[Tensor]:
        feed = {name: value.cpu().numpy() for name, value in zip(names, some)}
        return [torch.from_numpy(value) for value in session.run(OUTPUTS, feed)]

    _compare(model, run, inputs, "ONNX Runtime")


def _to_weights(model: _Answering, inputs: tuple[Tensor, ...], file: Path) -> None:
    save(model.model, file.parent)
    network, logits_of = model.inner, None
    if isinstance(network, Calibrated):
        logits_of, network = network.reader.logits_of, network.network
    again = load(file, copy.deepcopy(network), logits_of=logits_of)
    with again.guard.alone() if isinstance(again, ShiftGuard) else nullcontext():
        _compare(model, _Answering(again, model.prepare, model.names).eval(), inputs, "safetensors")


def _compare(model: _Answering, other: Callable[..., Any], inputs: tuple[Tensor, ...], name: str) -> None:
    """Run both on all `_trials`; probabilities must agree to the tolerance and labels exactly."""
    for some, tolerance in _trials(model, inputs):
        probs, label, _ = (value.cpu() for value in model(*some))
        got, got_label, _ = (value.cpu() for value in other(*some))
        off = float((probs - got).abs().max())
        top = probs.topk(2, -1).values
        # If two classes are nearly equal, rounding may decide.
        clear = top[..., 0] - top[..., 1] > 2 * tolerance
        if not off <= tolerance or not torch.equal(label[clear], got_label[clear]):
            raise RuntimeError(
                f"{name} does not give the same answers as the model: probs differ by up to {off:.2g}"
            )


def _trials(model: _Answering, inputs: tuple[Tensor, ...]) -> Iterator[tuple[tuple[Tensor, ...], float]]:
    """Batches to compare on, and how far probabilities may differ: the example, and other batch sizes.

    A guard acts only on unusual inputs, so it is also tried on a low-contrast example and noise. There rounding
    errors are larger (2e-5 for a MobileNet); a small network without its guard differs by 0.2.
    """
    for rows in (slice(None), [0, 1, 0], slice(1)):
        yield tuple(value[rows] for value in inputs), TOLERANCE
    if isinstance(model.model, ShiftGuard):
        pale, noise = list(inputs), list(inputs)
        for i, value in enumerate(inputs):
            if value.is_floating_point():
                pale[i] = torch.lerp(value, value.mean(), 0.95)
                draw = torch.rand(value.shape, generator=torch.Generator().manual_seed(0))
                noise[i] = torch.lerp(*value.aminmax(), draw.to(value))
        yield tuple(pale), 10 * TOLERANCE
        yield tuple(noise), 10 * TOLERANCE


def _refuse_code(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise where anything in a torch.export archive is more than JSON, plain tensors and raw weights."""
    pickled = set()
    for name in archive.namelist():
        if name.endswith("_config.json"):
            entries = json.loads(archive.read(name)).get("config", {}).values()
            pickled |= {entry["path_name"] for entry in entries if entry.get("use_pickle")}
    for name in archive.namelist():
        is_code = "aotinductor" in name or name.endswith((".so", ".cubin", ".o"))
        if name.endswith(".pt") or Path(name).name in pickled:
            try:
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            except Exception:  # whatever the safe unpickler raises
                is_code = True
        if is_code:
            raise ValueError(
                f"{path} must hold tensors alone, got code to execute in {name!r}: it was not opened"
            )


# --- the model card

# JSON, as the model index has it, is YAML.
CARD = """---
library_name: doublehead
pipeline_tag: {task}
tags: [calibration, uncertainty, doublehead]
model-index: {index}
---
# {name}

A classifier whose confidences are calibrated: of all answers given with a confidence of 0.8, about 80 % should be
right. Outputs: `probs`, `label` and `confidence`.

**Data.** {data}

**Method.** {method}

## Calibration ({n:,} test samples)

```text
{table}
```

{verdict}

These numbers hold for data like the test data. Under distribution shift confidences are less reliable.

## Use

```python
import numpy as np
{use}
for one, how_sure in zip(label, confidence):
    print(f"class {{one}}, right with probability {{how_sure:.2f}}")
```
"""

USE: dict[Form, str] = {
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
inputs = {inputs}
probs, label, confidence = session.run(["probs", "label", "confidence"], inputs)""",
    "torch-export": """import torch
from doublehead.integrations.export import load_program

program = load_program("model.pt2")
inputs = {inputs}
probs, label, confidence = program(*map(torch.from_numpy, inputs.values()))""",
    "safetensors": """import doublehead
import torch

model = doublehead.load("model.safetensors", network)  # of the same architecture; it gets the weights
inputs = {inputs}
probs = model(*map(torch.from_numpy, inputs.values())).softmax(-1)
confidence, label = probs.max(-1)""",
}


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
    to: Form = "onnx",
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The text of README.md: a YAML head that the Hub reads, then data, method and numbers for people.

    `dataset` is its short name, `data` a sentence about it. `test` are the calibrated predictions on data that neither
    the network nor its head has seen, `before` those of the network alone. ECE stands with its 95 % interval and the
    floor of a perfect model. `inputs` is Python code for the example of use, `to` the form that is exported.
    """
    after = Summary.of(test)
    both = (
        {"calibrated": after}
        if before is None
        else {"network alone": Summary.of(before), "calibrated": after}
    )
    metrics = [
        {"type": key, "name": METRICS[key].title, "value": round(after.values[key], 6)}
        for key in ("accuracy", "ece", "nll", "brier")
    ]
    about = {"type": dataset, "name": dataset, "split": "test"}
    index = {"name": name, "results": [{"task": {"type": task}, "dataset": about, "metrics": metrics}]}
    card = CARD.format(
        name=name, task=task, index=json.dumps([index]), data=data, method=method, n=after.n, verdict=after.verdict,
        table=side_by_side(both), use=USE[to].format(inputs=inputs),
    )  # fmt: skip
    if classes:
        card += "\n## Classes\n\n" + "".join(f"{number}. {one}\n" for number, one in enumerate(classes))
    if settings:
        card += f"\n## Settings\n\n```json\n{json.dumps(dict(settings), indent=1)}\n```\n"
    return card
