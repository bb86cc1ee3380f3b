"""The report as text: its numbers, its sentences, what it embeds and what it must never let through."""

import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import Predictions, abstain, calibrators, metrics

pytest.importorskip("jinja2")
from doublehead import outcomes as outcomes_module
from doublehead import report
from doublehead.curves import class_gaps
from doublehead.files import TableError
from doublehead.outcomes import Drawn, Outcomes, compare_all
from doublehead.report_page import page as page_module
from doublehead.report_page.page import Page, build_page, page_verdict
from doublehead.report_page.record import (
    THRESHOLDS,
    Method,
    Record,
    as_times,
    at_thresholds,
    compare_methods,
    measure,
)
from doublehead.report_page.tables import metrics_table, risk_ticks, shift_ticks
from samples import overconfident, refused

HOSTILE = "<script>alert(1)</script>\"'&</style><!--\u2028\udcff"


def page_of(named: Any, n_bins: int = 15, **options: Any) -> Page:
    return build_page({name: Record.of(p, n_bins) for name, p in named.items()}, **options)


def build(named: Any, **options: Any) -> str:
    return page_of(named, **options).html


def made(n: int = 1500, k: int = 5, sharpness: float = 1.0, seed: int = 1) -> Predictions:
    """Calibrated at sharpness 1, overconfident above."""
    return overconfident(n, k, sharpness, spread=4.0, seed=seed)


@pytest.fixture(scope="module")
def named() -> dict[str, Predictions]:
    return {"sharp": made(sharpness=3), "honest": made()}


def measured(named: dict[str, Predictions]) -> list[Method]:
    return [measure(i, name, Record.of(p)) for i, (name, p) in enumerate(named.items())]


@pytest.fixture(scope="module")
def methods(named: dict[str, Predictions]) -> list[Method]:
    return measured(named)


@pytest.fixture(scope="module")
def html(named: dict[str, Predictions]) -> str:
    return build(named, title="Two models", shift={"noise": {"sharp": made(200, sharpness=3, seed=5)}})


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text inside script and style elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "title": [], "p": []}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inside:
            self.inside[self.open[-1]].append(data)


def embedded(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_page_says_what_the_metrics_say(html: str, named: dict[str, Predictions]) -> None:
    for p in named.values():
        for value in (metrics.ece(p), metrics.accuracy(p), metrics.aurc(p), metrics.adaptive_ece(p)):
            assert f"{100 * value:.2f} %" in html
        assert f"{metrics.nll(p):.4f}" in html
        floor = metrics.ece_floor(p)
        assert f"floor {100 * floor.low:.2f} to {100 * floor.high:.2f} %" in html
    assert "1,500 samples, 5 classes, 2 methods" in html


def test_same_input_same_page(html: str, named: dict[str, Predictions]) -> None:
    shift = {"noise": {"sharp": made(200, sharpness=3, seed=5)}}
    assert build(named, title="Two models", shift=shift) == html


def test_nothing_outside_is_asked_for(html: str) -> None:
    elements = Elements(html)
    for tag, attributes in elements.tags:
        assert tag not in ("iframe", "object", "embed", "img", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("src", "href", "action", "xlink:href"):
                assert value.startswith(("#", "data:,")), (tag, name, value)
    for text in elements.inside["style"] + elements.inside["script"]:
        assert "http" not in text
        assert "url(" not in text.replace("url(#hatch)", "")


def test_policy_allows_this_style_and_script_and_nothing_else(html: str) -> None:
    elements = Elements(html)
    (policy,) = [a["content"] for tag, a in elements.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    style, script = "".join(elements.inside["style"]), elements.inside["script"][-1]
    for directive, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_hostile_names_stay_text_everywhere() -> None:
    p, q = made(300), made(300, sharpness=2)
    named = {HOSTILE: p, "other": q}
    classes = [f"{HOSTILE}{i}" for i in range(5)]
    page = build(named, title=HOSTILE, classes=classes, shift={HOSTILE: {HOSTILE: q, "other": p}})
    page.encode()  # a lone surrogate of a broken file name would fail here
    assert "<script>alert" not in page
    assert "</style><!--" not in page
    elements = Elements(page)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert [tag for tag, _ in elements.tags].count("style") == 1
    shown = "<script>alert(1)</script>\"'&</style><!--\ufffd\ufffd"
    assert elements.inside["title"][0] == shown
    assert embedded(page)["methods"][0]["name"] == shown
    assert page.count("alert(1)") > 20  # it is shown, as text
    assert re.search(r"<title>&lt;script&gt;alert.*?: ECE ", page)  # a tooltip
    assert not set("<>&") & set(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])


def test_very_long_names_are_cut() -> None:
    page = build({"a" * 5000: made(100)})
    assert "a" * 101 not in page
    with pytest.raises(ValueError, match="must differ in their first 99 printable characters"):
        build({"a" * 200: made(50), "a" * 201: made(50)})


def test_page_stays_small_with_many_methods_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 1000, generator=generator)
    p = Predictions(logits, torch.randint(1000, (2000,), generator=generator))
    one = measure(0, "one", Record.of(p))
    monkeypatch.setattr(page_module, "measure", lambda i, name, *_: replace(one, index=i, name=name))
    page = build({f"method number {i}": p for i in range(12)})
    assert len(page.encode()) < 1_000_000
    assert "The 20 worst of 1000 classes" in page
    for method in embedded(page)["methods"]:
        assert len(method["accepted"]) == len(THRESHOLDS) <= 201


def test_counts_at_thresholds_against_a_loop() -> None:
    p = Predictions.from_probs([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.5, 0.5]], [0, 1, 1, 1])
    thresholds = np.array([0.0, 0.5, 0.70001, 0.8, 0.95])
    accepted, wrong = at_thresholds(Outcomes.of(p), thresholds)
    assert accepted.tolist() == [4, 4, 2, 2, 0]
    assert wrong.tolist() == [2, 2, 1, 1, 0]
    big = made(700, sharpness=2)
    accepted, wrong = at_thresholds(Outcomes.of(big), THRESHOLDS)
    confidence, correct = big.confidence.double(), big.correct
    for t, kept, errors in zip(THRESHOLDS, accepted, wrong):
        assert kept == int((confidence >= t).sum())
        assert errors == int(((confidence >= t) & ~correct).sum())


def verdict_of(*methods: tuple[str, Predictions]) -> str:
    return page_of(dict(methods)).verdict


def test_verdict_ranks_by_paired_differences_and_never_within_chance(named: dict[str, Predictions]) -> None:
    sharp, honest = named["sharp"], named["honest"]
    found = compare_all([sharp, honest])[0][1]
    said = verdict_of(("sharp", sharp), ("honest", honest))
    assert said.startswith("“honest” has the lowest NLL")
    assert f"{-found.nll.estimate:.4f} below “sharp”" in said
    assert "0 of 1,500 predicted classes differ" in said
    assert "“honest”: Calibrated" in said
    nearly = Predictions(1.0001 * honest.logits, honest.labels)
    said = verdict_of(("one", honest), ("two", nearly), ("sharp", sharp))
    assert "is within chance" in said
    assert "below" not in said
    assert "sharp" not in said
    three = verdict_of(*((name, honest) for name in ("one", "two", "three")))
    assert three.startswith("“one”, “two” and “three” have the lowest NLL")
    assert verdict_of(("sharp", sharp)).startswith("“sharp”: Badly miscalibrated: overconfident by")
    said = verdict_of(("a", made(200)), ("b", made(150)))
    assert "different samples" in said
    assert "lowest" not in said


def test_of_many_samples_every_method_keeps_the_same(named: Any, methods: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(outcomes_module, "MAX_SAMPLES", 400)
    drawn = measured(named)
    sums = ("accuracy", "ece", "nll", "brier", "ece_classwise", "p_value")
    for one, whole in zip(drawn, methods):
        assert len(one.record.outcomes) == 400
        assert "400 samples drawn" in " ".join(one.record.notes)
        assert not whole.record.notes
        assert [one.summary.values[key] for key in sums] == [whole.summary.values[key] for key in sums]
        np.testing.assert_array_equal(one.record.wrong, whole.record.wrong)
        assert one.record.errors == whole.record.errors
        assert one.summary.values["aurc"] == pytest.approx(whole.summary.values["aurc"], abs=0.1)
    found, exact = compare_methods(drawn)[0][1], compare_methods(methods)[0][1]
    assert found is not None
    assert exact is not None
    assert found.n == 400
    assert found.nll.estimate == pytest.approx(exact.nll.estimate)
    width, exact_width = (pair.nll.high - pair.nll.low for pair in (found, exact))
    assert width == pytest.approx(exact_width, rel=0.5)
    assert "(a random sample)" in page_verdict(drawn, compare_methods(drawn))


@pytest.mark.parametrize("size", [1, 77, 1500])
def test_drawn_samples_do_not_depend_on_the_chunks(named: Any, size: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(outcomes_module, "MAX_SAMPLES", 100)
    all_of_them, times = Outcomes.of(named["sharp"]), np.arange(1500.0)
    parts = [slice(first, first + size) for first in range(0, 1500, size)]
    drawn = Drawn()
    for rows in parts:
        drawn.add(all_of_them[rows], times[rows])
    outcomes, places = drawn.joined(1.0)
    assert places is not None
    lowest = np.random.default_rng(0).random(1500).argsort()[:100]
    np.testing.assert_array_equal(places, np.sort(lowest))
    assert outcomes.nll is not None
    assert outcomes.nll.equal(Outcomes.of(named["sharp"][np.sort(lowest)]).nll)


def test_star_marks_the_best_of_a_row_and_no_one_where_all_are_equal(methods: list[Method]) -> None:
    rows = {row["label"]: [cell["best"] for cell in row["cells"]] for row in metrics_table(methods)}
    assert rows["ECE"] == [False, True]
    assert rows["NLL"] == [False, True]
    assert rows["Accuracy"] == [False, False]  # the same answers
    assert rows["P-value"] == [False, False]
    assert not any(cell["best"] for row in metrics_table(methods[:1]) for cell in row["cells"])


def test_guarantees_are_those_of_choose_threshold(html: str, named: dict[str, Predictions]) -> None:
    rows = re.findall(r'<th scope="row">([\d.]+) %</th>(<td data-method.*?)</tr>', html)
    assert [limit for limit, _ in rows] == ["5", "2", "1", "0.1"]
    choice = abstain.choose_threshold(named["honest"], 0.05)
    (printed,) = re.findall(rf"≥ ([\d.]+) %</span>[^/]*answers {100 * choice.coverage:.1f} %", rows[0][1])
    assert choice.threshold - 1e-6 <= float(printed) / 100 < choice.threshold + 0.002
    assert ">none</span>" in rows[3][1].partition("</td>")[0]


def test_classes_come_worst_first_with_their_names(named: dict[str, Predictions]) -> None:
    order = class_gaps(named["sharp"]).worst_first()
    for names in ([f"name {k}" for k in range(5)], None):
        page = build(named, classes=names)
        tables = re.findall(r"<span>Classes of (.*?)</caption>.*?<tbody (.*?)</tbody>", page, re.DOTALL)
        shown = re.findall(r'<td class="name"><bdi>(.*?)</bdi>', tables[0][1])
        assert shown == [f"name {k}" if names else f"class {k}" for k in order]
        assert tables[0][1].count("<strong>") == 5
        assert "5 of 5 predicted classes deviate" in tables[0][0]
        assert "No class deviates" in tables[1][0]


EVEN = Predictions.from_probs([[0.75 - 1e-6, 0.25 + 1e-6]] * 400, [0] * 300 + [1] * 100)
TWO_OF_THREE = Predictions.from_probs([[0.9, 0.1, 0.0]] * 30, [0] * 27 + [2] * 3)


@pytest.mark.parametrize(
    ("p", "n_bins", "pattern"),
    [(TWO_OF_THREE, 15, "(?i)nan"), (EVEN, 15, r"[-+]0\.0+(?!\d)"), (made(400), 1200, r'width="-|h--')],
    ids=["a class that is never predicted", "numbers that round to zero", "thousands of bins"],
)
def test_what_no_page_shows(p: Predictions, n_bins: int, pattern: str) -> None:
    page = build({"m": p}, n_bins=n_bins)
    assert not re.findall(
        pattern, re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)
    )


def test_one_sample_or_one_bin_makes_a_page() -> None:
    assert "Bins: 1 of equal width" in build({"a": made(60)}, n_bins=1)
    one = page_of({"one": Predictions([[3.0, 0.0]], [0])})
    assert "Too few samples to judge" in one.verdict
    assert "too few samples to judge" in one.html


def test_shift_from_predictions_and_from_numbers(named: dict[str, Predictions]) -> None:
    shifted = made(400, sharpness=4, seed=9)
    numbers = {"honest": {"auroc": 0.875, "mean_confidence": 0.61}}
    page = build(named, shift={"blur": {"sharp": shifted}, "other data": numbers})
    auroc = metrics.auroc(named["sharp"].confidence, shifted.confidence)
    assert f"{100 * metrics.ece(shifted):.2f}" in page
    assert f"<td>{100 * auroc:.1f}</td>" in page
    assert "<td>87.5</td>" in page
    assert "unknown" in page


def test_bad_arguments_are_named(named: dict[str, Predictions]) -> None:
    for options, message in (
        ({"shift": {"blur": {"x": {}}}}, r"shift\['blur'\] .* the methods \['sharp', 'honest'\], got 'x'"),
        ({"named": {}}, "a report must hold 1 to 12 methods, got 0"),
        ({"classes": ["a", "b"]}, "classes must be 5 names, one per class of 'sharp', got 2"),
        ({"n_bins": 0}, "n_bins must be a whole number >= 1, got 0"),
    ):
        refused(message, build, **{"named": named, **options})


# What writes a file, given its path and what to write.
WRITERS: dict[str, Callable[[Path, Predictions], Any]] = {
    "page.html": lambda path, p: report({"a": p}, path),
    "p.npz": lambda path, p: p.save(path),
    "fitted.safetensors": lambda path, p: calibrators.save(calibrators.Temperature().fit(p), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_written_whole_or_not_at_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / name
    WRITERS[name](path, made(60))
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    refused("no space left", WRITERS[name], path, made(50), error=OSError)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [name]
    refused(r"path must end in .html, got 'page.txt'", report, made(60), tmp_path / "page.txt")


def test_report_takes_predictions_pairs_and_paths(tmp_path: Path) -> None:
    p = made(80)
    p.save(tmp_path / "logits.npz")
    probs = (p.probs.double().numpy(), p.labels.numpy())
    both = {"array": probs, "file": tmp_path / "logits.npz", "own": p}
    page = report(both, tmp_path / "page.html").read_text(encoding="utf-8")
    numbers = {method["name"]: method["values"]["nll"] for method in embedded(page)["methods"]}
    assert numbers == pytest.approx(dict.fromkeys(both, metrics.nll(p)))
    alone = report(tmp_path / "logits.npz", tmp_path / "alone.html").read_text(encoding="utf-8")
    assert [method["name"] for method in embedded(alone)["methods"]] == ["logits"]
    twice = report([tmp_path / "logits.npz", p.save(tmp_path / "more.npz")], tmp_path / "twice.html")
    assert [method["n"] for method in embedded(twice.read_text(encoding="utf-8"))["methods"]] == [160]
    moved = {
        "blur": {"array": probs},
        "fog": {"array": tmp_path / "logits.npz"},
        "rain": {"array": {"ece": 0.5}},
    }
    page = report({"array": probs}, tmp_path / "page.html", shift=moved).read_text(encoding="utf-8")
    shown = f'<td class="nowrap">{100 * metrics.ece(p):.2f}<'
    assert page.count(shown) == 2
    p.save(tmp_path / "moved" / "array.npz")
    page = report({"array": probs}, tmp_path / "page.html", shift={"fog": tmp_path / "moved"})
    assert page.read_text(encoding="utf-8").count(shown) == 1
    with pytest.raises(TypeError, match="label must be given with a DataFrame or with files, got an array"):
        report({"array": probs}, tmp_path / "page.html", label="y")


def test_times_with_zones_and_times_that_are_none(tmp_path: Path) -> None:
    times = np.array(["2024-01-31 23:00:00+00:00", "2024-03-01T10:00Z"], dtype=object)
    found = as_times(times, "taken", "a.csv").astype(str).tolist()
    assert found == ["2024-01-31T23:00:00", "2024-03-01T10:00:00"]
    for wrong in ("31/01/2024", "2024年"):
        with pytest.raises(
            TableError, match=f"'taken' must be numbers or dates such as 2024-12-31, got .*{wrong}"
        ):
            as_times(np.array([wrong], dtype=object), "taken", "a.csv")


def test_times_are_one_for_each_sample(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one time for each of 100 samples, got shape \(5,\)"):
        report({"a": made(100)}, tmp_path / "a.html", time=range(5))


def test_errors_of_one_confidence_come_in_the_order_of_the_file() -> None:
    record = Record.of(Predictions.from_probs([[1.0, 0.0]] * 40, [1] * 40))
    assert [error.row for error in record.errors] == [*range(1, 26)]
    assert risk_ticks([measure(0, "wrong", record)])[-1] == 1  # no error above 100 %
    assert shift_ticks([("wrong", [{"ece": 1.0}, None])])[-1] == 1


def test_needs_the_report_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    refused(r"doublehead\[report\]", build, {"a": made(60)}, error=ImportError)


def test_counts_at_thresholds_of_float32_and_with_weights() -> None:
    probs = np.array([[0.7, 0.3], [0.9, 0.1]], dtype=np.float32)  # 0.7 and 0.9 are a little less as float64
    p = Predictions.from_probs(probs, [0, 1])
    accepted, wrong = at_thresholds(Outcomes.of(p), np.array([0.0, 0.7, 0.9, 0.95]))
    assert (accepted.tolist(), wrong.tolist()) == ([2, 2, 1, 0], [1, 1, 1, 0])
    weighted = Predictions.from_probs([[0.9, 0.1]] * 3, [0, 0, 1], weights=[0.6, 0.6, 0.6])
    (row,) = [row for row in embedded(build({"w": weighted}))["methods"][0]["classes"] if row[0] == 0]
    assert row[1] == 2  # 1.8 samples


def test_names_keep_their_blanks_and_joiners() -> None:
    page = build({"m": made(60)}, classes=["日本\u3000語", "👩\u200d🔬", "two\nlines", "a\xa0b", "\x00"])
    shown = {"日本 語", "👩\u200d🔬", "two lines", "a b", "\ufffd"}
    assert shown <= set(re.findall(r"<bdi>(.*?)</bdi>", page))


def test_a_month_of_days_and_a_day_of_hours_have_several_periods() -> None:
    days = np.datetime64("2024-01-01T00:00:00") + np.arange(1500) // 49 * np.timedelta64(86400, "s")
    hours = np.datetime64("2024-01-01T00:00:00") + np.arange(1500) // 63 * np.timedelta64(3600, "s")
    for times in (days, hours):
        method = measure(0, "m", Record.of(made(), times=times))
        assert method.periods is not None
        names = list(method.periods.groups)
        assert 12 <= len(names) <= 24
        assert names[0].startswith("2024-01-01")
        assert sum(group.n for group in method.periods.groups.values()) == 1500
    page = build_page({"m": Record.of(made(), times=np.zeros(1500))}).html
    assert "All samples are of one time." in page
    assert not re.findall(r'd="M[\d. ]+" class="curve (?:right|claimed)"', page)  # a point is not drawn


def test_every_method_of_a_full_page_looks_different() -> None:
    page = build({f"m{i}": made(60, sharpness=1 + i) for i in range(12)})
    (legend,) = re.findall(r'id="decisions".*?<ul class="legend">(.*?)</ul>', page, re.DOTALL)
    looks = re.findall(r"<svg.*?</svg>", legend)
    assert len(looks) == len(set(looks)) == 12
    assert len(set(re.findall(r'<path d="(.*?)"', legend))) == 12  # also without colours


def test_only_the_ratios_of_weights_count_also_where_they_are_tiny() -> None:
    p, weights = made(300), torch.linspace(0.5, 1.5, 300)
    large, tiny = (
        measured({"m": Predictions(p.logits, p.labels, scale * weights)})[0].summary
        for scale in (1.0, 2.0**-20)
    )
    assert tiny.values["ece"] == pytest.approx(large.values["ece"])
    assert tiny.values["nll"] == pytest.approx(large.values["nll"])
