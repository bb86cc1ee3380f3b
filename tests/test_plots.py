"""Plots: what is drawn are the numbers given, on the axes given, and nothing global changes."""

import sys
from pathlib import Path

import numpy as np
import pytest

from doublehead import Predictions, plots
from doublehead.curves import reliability
from samples import overconfident

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402


@pytest.fixture(scope="module")
def p() -> Predictions:
    return overconfident(800, 4, factor=2.0)


def test_draws_on_the_axes_given_and_touches_nothing_global(p: Predictions, tmp_path: Path) -> None:
    before, ax = dict(matplotlib.rcParams), Figure().add_subplot()
    assert plots.draw_reliability(reliability(p), ax=ax) is ax
    assert ax.has_data()
    path = plots.save(plots.draw_reliability(reliability(p)), tmp_path / "new" / "picture.png", dpi=40)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_reliability_marks_stand_at_the_numbers(p: Predictions) -> None:
    curve = reliability(p, n_bins=10)
    ax = plots.draw_reliability(curve)
    full = curve.counts > 0
    bands, gaps = ax.containers[:2]
    heights = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in bands]
    np.testing.assert_allclose(heights, np.stack([curve.band_low, curve.band_high], 1)[full], atol=1e-12)
    np.testing.assert_allclose([bar.get_y() for bar in gaps], curve.accuracy[full])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in gaps], curve.confidence[full])
    ticks = ax.collections[0].get_segments()
    np.testing.assert_allclose([segment[0, 1] for segment in ticks], curve.accuracy[full])
    (strip,) = ax.child_axes
    assert [round(bar.get_height()) for bar in strip.containers[0]] == curve.counts.tolist()
    (note,) = [text.get_text() for text in ax.texts]
    assert f"ECE {100 * curve.ece:.2f} %" in note
    assert f"floor {100 * curve.floor.mean:.2f} % ({100 * curve.floor.low:.2f} to" in note
    assert "n = 800" in note


def test_save_takes_figures_and_names_the_formats(tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    assert plots.save(figure, tmp_path / "empty.svg").stat().st_size > 0
    with pytest.raises(ValueError, match=r"path must end in one of .pdf .png .*, got 'picture.html'"):
        plots.save(figure, tmp_path / "picture.html")
    assert list(tmp_path.iterdir()) == [tmp_path / "empty.svg"]


def test_needs_the_plots_extra(monkeypatch: pytest.MonkeyPatch, p: Predictions) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"doublehead\[plots\]"):
        plots.draw_reliability(reliability(p))
