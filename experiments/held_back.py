"""How many held-back samples a choice among heads needs: what `HeadBank.select` warns of, measured.

    python experiments/held_back.py     # half a minute on one CPU core; no data to fetch

A small network is trained on Fashion-MNIST with the bank of `auto`. Its test images then play the calibration data: of
5 n of them n are held back to choose, by the rule of `HeadBank.select` and by its first rule (the lowest NLL as
trained, no last temperature); the rest tell what the choice is worth beside a temperature fitted to all 5 n.
"""

from __future__ import annotations

import json
import warnings

import torch
import torch.nn.functional as F
from committed import HERE, small
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import Alternation, DoubleHead, HeadBank, Readings, hold_back
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.data import fashion_subset
from doublehead.training.run_folder import environment

SIZES = (30, 50, 100, 150, 200, 300, 500, 800)
FILE = HERE / "results" / "held_back.json"


def trained(epochs: int = 15) -> tuple[DoubleHead, Readings]:
    """A network with a bank of heads, overconfident after so many epochs, and its readings of the test images."""
    torch.manual_seed(0)
    parts = fashion_subset()
    train, calib, test = (
        TensorDataset(
            torch.from_numpy(part.images).flatten(1).float() / 255, torch.from_numpy(part.labels).long()
        )
        for part in (parts.train, parts.calib, parts.test)
    )
    network = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DoubleHead(network, head=HeadBank.auto)
    optimizer = torch.optim.SGD(model.main_parameters(), lr=0.1, momentum=0.9)
    alternation = Alternation(model, DataLoader(hold_back(calib)[0], 100, shuffle=True), lr=optimizer)
    batches = DataLoader(train, 100, shuffle=True)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - epoch / epochs)
        for step, (x, y) in enumerate(batches):
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            alternation.step(step / len(batches))
    return model.eval(), model.read(DataLoader(test, 500))


def nll_of(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) the NLL of each sample."""
    return F.cross_entropy(logits, labels, reduction="none").double()


@torch.no_grad()
def excess(
    bank: HeadBank, readings: Readings, nlls: Tensor, n: int, generator: torch.Generator
) -> tuple[float, float, bool]:
    """NLL on new data less that of a temperature fitted to 5 n samples: today's rule, the first rule; a head chosen?

    A fifth of the 5 n samples chooses. `nlls` (H, N) are those of the heads as trained, by which the first rule chose.
    """
    order = torch.randperm(len(readings.labels), generator=generator)
    parts = (order[:n], order[: 5 * n], order[5 * n :])
    held, calib, rest = (Readings(*(part[rows] for part in readings)) for rows in parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of too few samples: that is what is measured
        choice = bank.select(held, calib)
    today = nll_of(bank(rest.features, rest.main), rest.labels)
    inverse = fit_inverse_temperature(held.main, held.labels)
    best = int(nlls[:, parts[0]].mean(1).argmin())
    first = nlls[best, parts[2]]
    if nlls[best, parts[0]].mean() >= nll_of(held.main * inverse, held.labels).mean():
        first = nll_of(rest.main * inverse, rest.labels)
    scaled = nll_of(rest.main * fit_inverse_temperature(calib.main, calib.labels), rest.labels)
    return float((today - scaled).mean()), float((first - scaled).mean()), choice.index is not None


@torch.no_grad()
def measure(model: DoubleHead, readings: Readings, draws: int = 60) -> dict[str, object]:
    """The spread of NLL differences per sample, and by n what the choice is worth."""
    heads = model.head.all_heads(readings.features, readings.main)  # (H, N, K)
    nlls = torch.stack([nll_of(one, readings.labels) for one in heads])  # (H, N)
    main, labels = readings.main.float(), readings.labels
    scaled = nll_of(main * fit_inverse_temperature(main, labels), labels)
    generator, found = torch.Generator().manual_seed(0), {}
    for n in SIZES:
        draw = [excess(model.head, readings, nlls, n, generator) for _ in range(draws)]
        today, first, chose = (torch.tensor(part) for part in zip(*draw))
        found[str(n)] = {"share_with_a_head": float(chose.float().mean()),
                         **{rule: {"mean": float(values.mean()), "worst": float(values.max()),
                                   "share_worse": float((values > 0).float().mean())}
                            for rule, values in (("today", today), ("first", first))}}  # fmt: skip
    return {
        "sd_of_nll_differences": sorted((nlls - scaled).std(1).tolist()),
        "best_head_less_temperature": float(nlls.mean(1).min() - scaled.mean()),
        "draws": draws,
        "excess_by_n": found,
    }


def main() -> None:
    torch.set_num_threads(1)
    results = {
        "what": "NLL of what HeadBank.select chooses on n held-back samples, less that of a temperature fitted to 5 n",
        "environment": environment(torch.device("cpu")),
        "seed": 0,
        **measure(*trained()),
    }
    FILE.write_text(json.dumps(small(results), indent=1) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
