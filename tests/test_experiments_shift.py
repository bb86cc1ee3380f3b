"""The measurement of the shift guard, on a network that is made up."""

from pathlib import Path

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[1]

import shift  # noqa: E402
import shift_sets  # noqa: E402
import tables  # noqa: E402

from doublehead.guard import Observed  # noqa: E402

WORDS = ["the", "film", "is", "not", "as", "good", "as", "the", "book", "that", "it", "was", "made", "from"]


@pytest.mark.parametrize("family", ["drop", "cut", "replace", "shuffle", "typo"])
def test_a_larger_share_changes_more_words(family: str) -> None:
    def same(share: float) -> int:
        new = shift_sets.change(WORDS, family, share, ["x"], np.random.default_rng(0))
        assert new
        assert family not in ("shuffle",) or sorted(new) == sorted(WORDS)
        return sum(a == b for a, b in zip(new, WORDS)) if family not in ("drop", "cut") else len(new)

    assert same(0.0) == len(WORDS)
    assert same(0.3) < len(WORDS)
    assert same(1.0) < same(0.3)


def dump(file: Path, seed: int) -> Path:
    """A network that is too sure the farther its inputs are; two kinds of shift, of one family or two."""
    generator, sets = torch.Generator().manual_seed(seed), {}
    cells = [f"{family}/{level}" for family in ("drop", "cut", "typo") for level in range(1, 6)]
    perturbed = [f"{split}/{cell}" for split in ("calib", "test") for cell in cells]
    for name in ["calib/clean", "test/clean", *perturbed, "unknown/x"]:
        n, level = 300, int(name[-1]) if name[-1].isdigit() else 0
        logits = 3 * torch.randn(n, 3, generator=generator)
        labels = torch.multinomial((logits * 0.75**level).softmax(1), 1, generator=generator)[:, 0]
        labels = torch.full_like(labels, shift_sets.UNKNOWN) if name == "unknown/x" else labels
        far = 0.3 * torch.randn(n, 4, generator=generator) + 0.5 * level
        sets[name] = Observed(far, logits, labels, torch.zeros_like(labels), torch.arange(n))
    shift_sets.write(file, sets)
    return file


def test_a_guard_beats_temperature_scaling_where_it_should(tmp_path: Path) -> None:
    table = shift.measure([dump(tmp_path / "one-cross.npz", 0)])
    assert set(table.left_out) == {"missing words", "letters", "all"}
    found = shift.summary(table).loc["one-cross"]
    assert found.share["temperature"] == 1
    assert found.share["perfect"] < found.share["window-64"] < 0.8
    assert found.cost["head"] == 0
    assert abs(found.cost["window-64"]) < 2
    alarms = table[table.method == "alarm-64"].set_index("cell").alarms
    assert alarms["clean"] < 0.1
    assert alarms["cut/5"] == 1


@pytest.mark.parametrize("name", shift.TABLES)
def test_the_document_shows_the_committed_numbers(name: str) -> None:
    file, made = shift.TABLES[name]
    page = (ROOT / file).read_text()
    assert f"<!-- results: {name} -->" in page
    assert tables.fill(page, name, made()) == page


def test_simulated_guards_see_shifted_windows_and_few_clean_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "WINDOWS", 500)
    (row,) = shift.simulate("sparse", 872, 1)
    assert row["false"] < 0.1
    assert row["false"] < row["seen"]


def test_runs_on_the_same_inputs_form_an_ensemble(tmp_path: Path) -> None:
    sets = shift.read(dump(tmp_path / "one.pt", 0))
    assert shift.same_inputs(sets, shift.read(tmp_path / "one.pt"))
    assert not shift.same_inputs(sets, shift.read(dump(tmp_path / "two.pt", 1)))  # other labels
