"""Make docs/images/shift.png: ECE against the strength of a shift, with and without a guard. Numbers: shift.json.

    python docs/images/shift.py      (about three minutes on one idle CPU core)

The guards are fitted with the corruptions of CIFAR-10-C on calibration images, or without the one of the panel.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from doublehead import Predictions, ShiftGuard, __version__, calibrate, metrics
from doublehead.data import DATASETS, GaussianNoise, Shifts, corrupt, fashion_subset
from doublehead.models import build
from doublehead.plots import draw_sweep, save
from doublehead.shift_guard import STEPS

SETTINGS = {
    **{"data": "fashion", "model": "small_cnn", "epochs": 12, "batch_size": 128, "lr": 0.1, "momentum": 0.9},
    **{"weight_decay": 5e-4, "schedule": "cosine", "seed": 0, "views": 6, "keep": 0.9, "steps": STEPS},
}
SIGMAS = (0.05, 0.1, 0.2, 0.3, 0.4)  # of the pixel range; CIFAR-10-C's strongest is 0.1
NORMALISE = DATASETS["fashion"].normalise
HERE = Path(__file__).parent


def main() -> None:
    """Train, guard, measure, write, draw."""
    torch.manual_seed(SETTINGS["seed"])
    torch.set_num_threads(1)
    splits = fashion_subset()
    train, calib, test = (tensors(part) for part in (splits.train, splits.calib, splits.test))
    network = trained(build("small_cnn", 10), *train)
    calib_batches = list(zip(*(part.split(500) for part in calib)))
    scaled = calibrate(network, calib_batches, method="temperature")
    perturbations = {
        "shifts": Shifts(1.0, NORMALISE),
        "contrast": Shifts(1.0, NORMALISE, ["contrast"]),
        "brightness": Shifts(1.0, NORMALISE, ["brightness"]),
        "noise": GaussianNoise(0.4, 1.0, NORMALISE),
    }
    models: dict[str, nn.Module] = {"network": network, "temperature": scaled}
    started = time.process_time()
    for name, perturb in perturbations.items():
        models[name] = ShiftGuard(scaled).fit(calib_batches, perturb)
    settings = SETTINGS | {"layers": models["shifts"].tap.layers}
    settings |= {"fit_seconds": round((time.process_time() - started) / len(perturbations), 1)}
    made = {"doublehead": __version__, "torch": torch.__version__, "settings": settings}
    made |= {"n_test": len(test[1]), **measured(models, *test)}
    text = re.sub(r"\[[^][]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(made, indent=1))
    (HERE / "shift.json").write_text(text + "\n")
    draw(made)


def tensors(part: Any) -> tuple[Tensor, Tensor]:
    """Normalised images (N, 1, 28, 28) and their labels."""
    return NORMALISE(torch.from_numpy(part.images).permute(0, 3, 1, 2) / 255), torch.from_numpy(part.labels)


def trained(network: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """The network after SGD with the settings above."""
    settings: dict[str, Any] = {key: SETTINGS[key] for key in ("lr", "momentum", "weight_decay")}
    optimizer = torch.optim.SGD(network.parameters(), **settings, nesterov=True)
    for epoch in range(SETTINGS["epochs"]):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / SETTINGS["epochs"]))
        for rows in torch.randperm(len(y)).split(SETTINGS["batch_size"])[:-1]:
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return network.eval()


def shifted_images(x: Tensor, kind: str, strength: float) -> Tensor:
    """The images after a shift: noise of that deviation, or a family of corruption at that severity."""
    pixels, generator = NORMALISE.undo(x).clamp(0, 1), torch.Generator().manual_seed(0)
    if kind == "noise":
        draw = torch.randn(x.shape, generator=generator)
        return NORMALISE((pixels + strength * draw).clamp(0, 1))
    return NORMALISE(corrupt(pixels, kind, int(strength), generator))


@torch.no_grad()
def measured(models: dict[str, nn.Module], x: Tensor, y: Tensor) -> dict[str, Any]:
    """ECE by panel and model, from no shift to the strongest."""
    clean = {name: round(metrics.ece(Predictions(model(x), y)), 5) for name, model in models.items()}
    panels: dict[str, Any] = {}
    for kind, strengths in (("contrast", range(1, 6)), ("brightness", range(1, 6)), ("noise", SIGMAS)):
        panels[kind] = {
            "strengths": [0, *strengths],
            **{name: [clean[name]] for name in clean},
            "accuracy": [],
        }
        for strength in (0, *strengths):
            shifted = shifted_images(x, kind, strength) if strength else x
            outputs = {name: Predictions(model(shifted), y) for name, model in models.items()}
            panels[kind]["accuracy"].append(round(metrics.accuracy(outputs["network"]), 4))
            if strength:
                for name, p in outputs.items():
                    panels[kind][name].append(round(metrics.ece(p), 5))
    return {"clean_ece": clean, "acts_on_clean": acts_on(models["shifts"], x, y), "panels": panels}


def acts_on(safe: Any, x: Tensor, y: Tensor) -> float:
    """The share of images on which the guard acts."""
    return round(float((safe.guard(safe.look([(x, y)]).stages) < 1).float().mean()), 4)


def draw(made: dict[str, Any]) -> None:
    """A panel for each kind of shift, a line for each model."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    titles = {"contrast": "less contrast", "brightness": "more brightness", "noise": "Gaussian noise"}
    for ax, (kind, title) in zip(figure.subplots(1, 3, sharey=True), titles.items()):
        panel = made["panels"][kind]
        last = "guard fitted with noise up to 0.4" if kind == "noise" else f"guard that never saw {kind}"
        names = {"network": "network", "temperature": "+ temperature", "shifts": "+ guard", kind: last}
        lines = {label: panel[name] for name, label in names.items()}
        xlabel = "deviation, of the pixel range" if kind == "noise" else "severity (0: clean)"
        draw_sweep(panel["strengths"], lines, ax, xlabel=xlabel, ring=False, title=title)
        ax.set_ylabel("ECE" if kind == "contrast" else "")
        ax.legend(fontsize="small", frameon=False, loc="upper left")
        if kind == "noise":
            ax.axvspan(0, 0.1, color="#b8b8b8", alpha=0.35, linewidth=0)
            ax.text(0.004, 0.28, "the guard was\nfitted with", fontsize="small", color="#333333")
    save(figure, HERE / "shift.png", dpi=130)


if __name__ == "__main__":
    main()
