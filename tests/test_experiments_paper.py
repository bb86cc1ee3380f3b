"""The paper's tables as experiments have them, against its LaTeX."""

import re
import sys
from pathlib import Path

import pytest

pd = pytest.importorskip("pandas")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import tables  # noqa: E402

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "SVHN": "svhn", "ImageNet": "imagenet",
        "SST Fine Grained": "sst-fine", "SST Binary": "sst-binary", "20 Newsgroups": "20newsgroups"}  # fmt: skip
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


@pytest.mark.parametrize(("number", "label", "rows"), [(1, "ece_max", 17), (4, "ece_all", 15)])
def test_every_cell_of_tables_1_and_4_is_the_papers(shared: Path, number: int, label: str, rows: int) -> None:
    copied = pd.read_csv(ROOT / "experiments/paper.csv")
    copied = copied[copied.table == number]
    assert set(copied.groupby(["data", "model"]).size()) == {6}
    numbers = {
        key: [x for x in some[["before", "after", "temperature"]].to_numpy().flat if x == x]
        for key, some in copied.groupby(["data", "model"], sort=False)
    }
    assert len(numbers) == rows
    assert numbers == printed((shared / "paper.tex").read_text(), label)


def test_the_cells_of_table_2_are_the_papers(shared: Path) -> None:
    source = (shared / "paper.tex").read_text()
    parts = dict(zip(tables.SETS, ("CIFAR-10-C", "CIFAR-10/SVHN")))
    copied = tables.paper(2).before.groupby(level=["data", "model"], sort=False)
    assert len(copied) == 4
    for (shift, model), wanted in copied:
        name = next(printed for printed, ours in MODELS.items() if ours == model)
        place = source.index(name, source.index(parts[shift], source.index("tab: ece_max")))
        found = [float(n) for n in re.findall(r"\d+\.\d+", source[place : source.index(r"\\", place)])]
        assert [*found[:2], found[8]] == wanted.to_list()


def test_every_cell_of_table_3_is_the_papers(shared: Path) -> None:
    source = (shared / "paper.tex").read_text()
    lines = source[source.index("Calibration Period &") :].split(r"\\")[:3]
    numbers = [[float(n) for n in re.findall(r"[\d.]+", line)] for line in lines]
    copied = tables.paper(3)
    periods = [float(name.partition("-k")[2] or 10) for name in copied.index.get_level_values("method")]
    assert numbers == [periods, copied.before.to_list(), copied.after.to_list()]
