"""The paper's tables as experiments/paper.py has them, against its LaTeX."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import paper  # noqa: E402

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "SVHN": "svhn", "ImageNet": "imagenet",
        "SST Fine Grained": "sst-fine", "SST Binary": "sst-binary", "20 Newsgroups": "20newsgroups",
        "CIFAR-10/CIFAR-10-C": "gaussian_noise:5", "CIFAR-10/SVHN": "ood:svhn"}  # fmt: skip
MODELS = {"ResNet 50": "resnet50", "ResNet 101": "resnet101", "ResNet 152": "resnet152",
          "DenseNet 121": "densenet121", "Wide ResNet 28-10": "wide_resnet28_10", "TreeLSTM": "tree_lstm",
          "GP CNN": "gp_cnn"}  # fmt: skip


def printed(source: str, label: str) -> dict[tuple[str, str], list[float]]:
    """All numbers of each line of a table in the paper's LaTeX, read without knowing what they mean."""
    start = source.rindex(r"\begin{tabular}", 0, source.index(rf"\label{{tab: {label}}}"))
    found, data = {}, ""
    for line in source[start : source.index(r"\end{tabular}", start)].split(r"\\"):
        cells = [re.sub(r"\\(midrule|toprule)", "", cell).strip() for cell in line.split("&")]
        if len(cells) == 12 and cells[1] in MODELS:
            data = re.sub(r"\\multirow\{\d\}\{\*\}\s*\{(.*)\}", r"\1", cells[0], flags=re.DOTALL) or data
            words = " ".join(cells[2:])
            found[DATA[data.strip()], MODELS[cells[1]]] = [float(n) for n in re.findall(r"\d+\.\d+", words)]
    return found


def test_every_cell_of_tables_1_and_4_is_the_papers(shared: Path) -> None:
    source = (shared / "paper.tex").read_text()
    for label, table, n in (("ece_max", paper.TABLE_1, 17), ("ece_all", paper.TABLE_4, 15)):
        copied = {
            key: [*(x for cell in row.losses for x in cell), row.no_annealing, row.annealing]
            for key, row in table.items()
        }
        assert len(copied) == n
        assert copied == printed(source, label)


def test_every_cell_of_tables_2_and_3_is_the_papers(shared: Path) -> None:
    source = (shared / "paper.tex").read_text()
    copied = {key: [x for cell in row.values() for x in cell[:2]] for key, row in paper.TABLE_2.items()}
    assert copied == printed(source, "auroc")
    lines = source[source.index("Calibration Period &") :].split(r"\\")[:3]
    numbers = [[float(n) for n in re.findall(r"[\d.]+", line)] for line in lines]
    periods = [float(k) for k in paper.TABLE_3_PERIODS]
    assert numbers == [periods, [*paper.TABLE_3_ECE.values()], [*paper.TABLE_3_OVERHEAD.values()]]


def test_a_few_cells_by_eye() -> None:
    row = paper.TABLE_1["cifar10", "resnet50"]
    assert row.cell("cross-entropy") == (4.28, 2.17, 1.8)
    assert (row.cell("double-head").before, row.cell("annealing-double-head").before) == (1.22, 0.50)
    assert paper.TABLE_1["cifar100", "resnet101"].cell("brier") == (3.43, 1.57, 3.0)
    assert paper.TABLE_1["imagenet", "resnet152"].annealing == 1.65
    assert paper.TABLE_4["20newsgroups", "gp_cnn"].cell("focal") == (11.03, 6.62, 1.1)
    assert paper.TABLE_2["ood:svhn", "wide_resnet28_10"]["brier"][:2] == (70.88, 74.68)
    assert (paper.TABLE_3_ECE[50], paper.TABLE_3_OVERHEAD[20]) == (1.28, 3.80)
