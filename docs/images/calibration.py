"""Make docs/images/reliability.png, with its numbers in reliability.json, and docs/images/stages.png.

    python docs/images/calibration.py      (about two minutes on one CPU core)

A small convolutional network is trained on the images that come with the package, with calibration heads beside it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn

import doublehead as dh
from doublehead.calibrators.choose import Choice
from doublehead.curves import reliability
from doublehead.data import DATASETS, fashion_subset
from doublehead.models import build
from doublehead.plots import draw_reliability, save

SETTINGS: dict[str, Any] = {
    **{"data": "fashion", "model": "small_cnn", "epochs": 15, "batch_size": 128, "lr": 0.1, "momentum": 0.9},
    **{"weight_decay": 5e-4, "schedule": "cosine", "seed": 0, "every": 4},
}
NORMALISE = DATASETS["fashion"].normalise
HERE = Path(__file__).parent


def main() -> None:
    """Train, calibrate, measure, write, draw."""
    torch.manual_seed(SETTINGS["seed"])
    torch.set_num_threads(1)
    splits = fashion_subset()
    train, calib, test = (tensors(part) for part in (splits.train, splits.calib, splits.test))
    network = build("small_cnn", 10)
    double = trained(network, *train, calib)
    model = double.finish()
    scaled = dh.calibrate(network, calib, method="temperature")
    after = dh.calibrate(network, calib)
    shown = {"network": network.eval(), "temperature scaling": scaled, "doublehead": model}
    with torch.no_grad():
        found = {name: dh.Predictions(one(test[0]), test[1]) for name, one in shown.items()}
        found_after = dh.Predictions(after(test[0]), test[1])
    choices = {"heads trained beside": model.head.choice, "after training": after.head.choice}
    methods = {name: numbers(p) for name, p in {**found, "doublehead, after training": found_after}.items()}
    made = {
        "doublehead": dh.__version__,
        "torch": torch.__version__,
        "settings": SETTINGS,
        "methods": methods,
    }
    made["choices"] = {name: asdict(choice) for name, choice in choices.items() if choice}
    (HERE / "reliability.json").write_text(json.dumps(made, indent=1) + "\n")
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    for ax, (name, p) in zip(figure.subplots(1, 3), found.items()):
        draw_reliability(reliability(p), ax, title=name)
    save(figure, HERE / "reliability.png", dpi=110)
    if model.head.choice is not None:
        save(draw_stages(model.head.choice), HERE / "stages.png", dpi=110)


def tensors(part: Any) -> tuple[Tensor, Tensor]:
    """Normalised images (N, 1, 28, 28) and their labels."""
    return NORMALISE(torch.from_numpy(part.images).permute(0, 3, 1, 2) / 255), torch.from_numpy(part.labels)


def trained(network: nn.Module, x: Tensor, y: Tensor, calib: tuple[Tensor, Tensor]) -> dh.DoubleHead:
    """Train the network by SGD with the settings above, with calibration heads beside it."""
    options = {key: SETTINGS[key] for key in ("lr", "momentum", "weight_decay")}
    optimizer = torch.optim.SGD(network.parameters(), **options, nesterov=True)
    double = dh.DoubleHead(network, calib, follow=optimizer, every=SETTINGS["every"])
    for epoch in range(SETTINGS["epochs"]):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / SETTINGS["epochs"]))
        batches = torch.randperm(len(y)).split(SETTINGS["batch_size"])[:-1]
        for step, rows in enumerate(batches):
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            double.step(progress=step / len(batches))
    return double


def numbers(p: dh.Predictions) -> dict[str, float]:
    """Accuracy, NLL, and ECE with the range of a perfectly calibrated model."""
    values = dh.evaluate(p).values
    names = ("accuracy", "ece", "ece_floor_low", "ece_floor_high", "nll", "brier")
    return {name: round(values[name], 5) for name in names}


# --- the picture of the stages


STAGES = (
    ("temperature", "one number\nfor all samples"),
    ("map", "scales and shifts\nof classes"),
    ("head", "a temperature\nfor each sample"),
    ("pool", "weighted sum of\nall outputs so far"),
    ("curve", "a function of the\nlog-probability"),
)
READS = (
    ("logits", 0, 2),
    ("statistics of logits\nand of features", 2, 1),
    ("distances to\nclass means; heads\ntrained beside", 3, 1),
    ("log-probabilities", 4, 1),
)


def draw_stages(choice: Choice) -> Figure:
    """The stages as boxes, and below them the held-back NLL after each."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.15])
    _draw_boxes(top.subplots())
    _draw_nlls(bottom.subplots(), choice)
    return figure


def _draw_boxes(ax: Any) -> None:
    ax.set(xlim=(-0.75, 5.95), ylim=(-0.75, 1.15))
    ax.axis("off")
    for i, (name, what) in enumerate(STAGES):
        face = "#0072b2" if i == 0 else "#56b4e9"
        box = FancyBboxPatch(
            (i, 0.2), 0.82, 0.8, boxstyle="round,pad=0.03", facecolor=face, alpha=0.25, edgecolor=face
        )
        ax.add_patch(box)
        ax.text(i + 0.41, 0.82, name, ha="center", va="center", fontweight="bold")
        ax.text(i + 0.41, 0.45, what, ha="center", va="center", fontsize=8.5)
        _arrow(ax, (i - 0.15, 0.6), (i - 0.03, 0.6))
    _arrow(ax, (4.85, 0.6), (5.0, 0.6))
    ax.text(-0.18, 0.6, "network's\nlogits", ha="right", va="center", fontsize=9)
    ax.text(5.05, 0.6, "keep the\nnetwork's class,\nthen softmax", ha="left", va="center", fontsize=9)
    for text, first, n in READS:
        x = first + 0.41 + (n - 1) / 2
        ax.text(x, -0.35, text, ha="center", va="center", fontsize=8.5, color="#333333")
        for i in range(first, first + n):
            _arrow(ax, (x if n == 1 else i + 0.41, -0.14), (i + 0.41, 0.15))
    ax.text(-0.18, -0.35, "reads", ha="right", va="center", fontsize=9, style="italic")
    ax.set_title("The stages, in order", fontsize=11, loc="left")


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#333333"})


def _draw_nlls(ax: Any, choice: Choice) -> None:
    nlls = {name: nll for name, nll in choice.nlls.items() if name != "none"}
    names = sorted(nlls, key=len, reverse=True)
    colours = ["#d55e00" if name == choice.chosen else "#0072b2" for name in names]
    base = nlls[choice.baseline]
    ax.axvline(base, color="#333333", linewidth=1)
    ax.scatter([nlls[name] for name in names], range(len(names)), color=colours, zorder=3)
    ax.set_yticks(range(len(names)), names, fontsize=8.5)
    ax.set_xlabel(f"NLL on held-back calibration samples (n = {choice.n:,})")
    ax.set_title(
        "After each stage on one network; orange: chosen; line: temperature alone",
        fontsize=11,
        loc="left",
    )
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
