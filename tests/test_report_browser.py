"""The report in a real browser: what a reader sees, moves and hears, and that nothing leaves the page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from doublehead import Predictions, metrics

playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
pytest.importorskip("jinja2")
from doublehead import report as write_report  # noqa: E402
from doublehead.outcomes import Outcomes, compare  # noqa: E402
from doublehead.report_page.record import THRESHOLDS, at_thresholds  # noqa: E402
from samples import overconfident  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")

OFF = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{part}" for part in OFF)]
HOSTILE = "<script>window.pwned=1;alert(1)</script><img src=x onerror=window.pwned=1></script>\"'"

# Every element that shows text of its own, with the contrast of that text to the nearest opaque background.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c[3] === 255) return c;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["SCRIPT", "NOSCRIPT", "title", "OPTION"].includes(element.tagName)) continue;
    if (!element.checkVisibility() || element.closest(".skip")) continue;
    const style = getComputedStyle(element);
    const a = light(rgb(element.closest("svg") ? style.fill : style.color)), b = light(behind(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, element.tagName, element.textContent.slice(0, 40)]);
  }
  return found;
}"""


def made(sharpness: float, n: int = 811, k: int = 4) -> Predictions:
    """811 is prime: no share of it ends in a 5 that Python and JavaScript would round differently."""
    return overconfident(n, k, sharpness, spread=3.0, seed=1)


NAMED = {"sharp": made(3.0), "honest": made(1.0), "soft": made(0.4)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shift = {"noise": {name: Predictions(p.logits + 3, p.labels) for name, p in NAMED.items()}}
    words = {"title": "Three models", "classes": ["ant", "bee", "cat", "dog"]}
    return write_report(NAMED, tmp_path_factory.mktemp("report") / "report.html", shift=shift, **words)


@contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[Any]:
    """A page in a fresh profile; what it asks for and complains about is in `page.asked` and `page.complaints`."""
    usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
    context = browser.new_context(**{**usual, **options})
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.asked, page.complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (page.complaints.append("a dialog opened"), dialog.dismiss()))
    page.goto(path.as_uri())
    yield page
    context.close()


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    with opened(browser, report) as one:
        yield one


def row_of(page: Any, method: int) -> str:
    return str(page.locator(f"#live-{method}").inner_text())


def test_opens_quietly_and_asks_for_nothing(page: Any, report: Path) -> None:
    for link in page.locator("nav a").all():
        link.click()
    page.locator("#theme").click()
    page.mouse.wheel(0, 4000)
    page.wait_for_timeout(200)
    assert page.complaints == []
    assert {url.partition("#")[0] for url in page.asked} == {report.as_uri()}
    assert page.title() == "Three models"
    assert page.locator(".verdict").inner_text().startswith("“honest” has the lowest NLL")


def test_slider_shows_error_and_coverage_of_every_threshold(page: Any) -> None:
    slider, shown = page.locator("#threshold"), page.locator("#threshold-value")
    assert shown.inner_text() == "90 %"
    for key, i in (("Home", 0), ("End", len(THRESHOLDS) - 1), ("ArrowLeft", len(THRESHOLDS) - 2)):
        slider.press(key)
        assert slider.input_value() == str(i)
        for m, (name, p) in enumerate(NAMED.items()):
            accepted, wrong = (int(column[i]) for column in at_thresholds(Outcomes.of(p), THRESHOLDS))
            row = row_of(page, m)
            assert f"{100 * accepted / len(p):.1f} %" in row
            assert f"{wrong} of {accepted} wrong" in row
            assert f"abstains on {len(p) - accepted}" in row
            wanted = f"{100 * wrong / accepted:.2f} %" if accepted else "none answered"
            assert wanted in row
            spoken = f"{name}: answers {100 * accepted / len(p):.1f} %, error {wanted}"
            assert spoken in slider.get_attribute("aria-valuetext")
    slider.press("Home")
    assert shown.inner_text() == "0 %"
    assert f"{100 - 100 * metrics.accuracy(NAMED['sharp']):.2f} %" in row_of(page, 0)


def test_slider_moves_the_dots_along_the_curves(page: Any) -> None:
    slider, dot = page.locator("#threshold"), page.locator('#risk [data-method="1"] .dot')
    slider.press("Home")
    right = dot.bounding_box()
    frame = page.locator("#risk").bounding_box()
    # everything answered: the right end of the frame, 388 of 400 wide
    assert right["x"] + right["width"] / 2 == pytest.approx(frame["x"] + frame["width"] * 388 / 400, abs=1.5)
    for _ in range(5):
        slider.press("PageUp")
    moved = dot.bounding_box()
    assert moved["x"] < right["x"] - 20
    assert moved["y"] > right["y"] + 5


def test_methods_can_be_hidden_and_shown(page: Any) -> None:
    marked = page.locator('[data-method="1"]')
    assert marked.count() > 10
    box = page.get_by_role("checkbox", name="honest")
    box.press("Space")
    assert not any(element.is_visible() for element in marked.all())
    assert page.locator("#shown").inner_text() == "2 of 3 methods shown"
    assert page.locator('#reliability [data-method="0"] svg').is_visible()
    box.press("Space")
    assert page.locator('#reliability [data-method="1"] svg').is_visible()
    assert page.locator('#numbers td[data-method="1"]').first.is_visible()


def test_before_and_after_follow_the_choice(page: Any) -> None:
    sentence = page.locator("#pair-sentence")
    soft, found = metrics.ece(NAMED["soft"]), compare(NAMED["sharp"], NAMED["honest"])
    assert f"{found.nll.estimate:.4f}" in sentence.inner_text()
    assert f"{found.nll.low:.4f} to {found.nll.high:.4f}" in sentence.inner_text()
    assert "0 of 811 " in sentence.inner_text()
    page.locator("#before").select_option("soft")
    page.locator("#after").select_option("sharp")
    assert page.locator("#before-ece").inner_text() == f"{100 * soft:.2f} %"
    assert page.locator("#after-nll").inner_text() == f"{metrics.nll(NAMED['sharp']):.4f}"
    difference = metrics.nll(NAMED["sharp"]) - metrics.nll(NAMED["soft"])
    word = "worse" if difference > 0 else "better"
    assert page.locator("#change-nll").inner_text() == f"{difference:+.4f} ({word})"
    assert page.locator("#change-accuracy").inner_text() == "no change"
    shown = [group.is_visible() for group in page.locator("#overlay [data-pair]").all()]
    assert shown == [True, False, True]
    assert page.locator("#overlay .before").get_attribute("data-pair") == "2"
    assert [band.is_visible() for band in page.locator("#overlay [data-after]").all()] == [True, False, False]


def test_last_bin_can_be_left_out(page: Any) -> None:
    kept, dropped = (page.locator(f'[data-last-bin="{which}"]').first for which in ("kept", "dropped"))
    assert (kept.is_visible(), dropped.is_visible()) == (True, False)
    page.get_by_label("Leave out the last bin").check()
    assert (kept.is_visible(), dropped.is_visible()) == (False, True)
    assert dropped.locator(".bar").count() == kept.locator(".bar").count() - 1


def test_classes_of_the_chosen_method(page: Any) -> None:
    tables = page.locator("[data-of=class-method]")
    assert [table.is_visible() for table in tables.all()] == [True, False, False]
    page.locator("#class-method").select_option("soft")
    assert [table.is_visible() for table in tables.all()] == [False, False, True]
    gaps = [float(cell) for cell in tables.nth(2).locator("tbody td:nth-child(5) strong").all_inner_texts()]
    assert gaps
    assert all(gap < 0 for gap in gaps)  # all underconfident
    assert {"ant", "bee", "cat", "dog"} == set(tables.nth(2).locator("tbody td.name").all_inner_texts())


def test_classes_are_sorted_searched_and_downloaded(page: Any) -> None:
    table = page.locator("[data-of=class-method]").first
    counts = lambda: [int(text) for text in table.locator("tbody td:nth-child(2)").all_inner_texts()]  # noqa: E731
    table.get_by_role("button", name="Samples").click()
    assert counts() == sorted(counts(), reverse=True)
    table.get_by_role("button", name="Samples").click()
    assert counts() == sorted(counts())
    page.locator("#class-search").fill("BE")
    assert table.locator("tbody td.name").all_inner_texts() == ["bee"]
    assert page.locator("#class-shown").inner_text() == "1 of 4 classes shown"
    with page.expect_download() as download:
        page.locator("#class-csv").click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith("class,samples,")
    assert {line.split(",")[0] for line in lines[1:]} == {'"ant"', '"bee"', '"cat"', '"dog"'}


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_theme_follows_the_system_and_the_button(browser: Any, report: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        with opened(browser, report, color_scheme=scheme) as page:
            button = page.locator("#theme")
            seen[scheme] = [background(page)]
            for word in ("light", "dark", "auto"):
                button.press("Enter")
                assert button.inner_text() == f"Theme: {word}"
                seen[scheme].append(background(page))
            button.press("Enter")
            page.reload()
            assert button.inner_text() == "Theme: light"  # remembered
    light, dark = seen["light"][0], seen["dark"][0]
    assert light != dark
    assert seen["light"] == [light, light, dark, light]
    assert seen["dark"] == [dark, light, dark, dark]


def test_every_text_has_enough_contrast(page: Any) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate(CONTRASTS)
        assert len(found) > 200
        assert [entry for entry in found if entry[0] < 4.5] == []


def test_page_never_scrolls_sideways(page: Any) -> None:
    for width in (320, 390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_keyboard_reaches_everything_and_everything_has_a_name(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "before", "after", "drop-last", "class-method", "threshold", "SUMMARY"} <= reached
    assert page.get_by_role("slider", name="Answer when the confidence is at least").count() == 1
    for role in ("button", "checkbox", "combobox", "slider", "img", "region", "table", "link"):
        nodes = page.get_by_role(role).all()
        assert nodes, role
        html = "e => e.outerHTML.slice(0, 80)"
        assert [node.evaluate(html) for node in nodes if not accessible_name(node)] == []


def accessible_name(node: Any) -> str:
    return node.evaluate(
        """e => e.getAttribute("aria-label") || (e.labels && [...e.labels].map(l => l.textContent).join(" ").trim())
        || (e.caption && e.caption.textContent.trim()) || e.textContent.trim()"""
    )


def test_ids_are_unique_and_headings_in_order(page: Any) -> None:
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for link in page.evaluate("[...document.querySelectorAll('nav a')].map(e => e.getAttribute('href'))"):
        assert link.removeprefix("#") in ids


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    p = made(1.0, 200)
    shift = {HOSTILE: {HOSTILE: p}}
    words = {"title": HOSTILE, "classes": [HOSTILE] * 4, "shift": shift}
    path = write_report({HOSTILE: p, "b": made(2.0, 200)}, tmp_path / "hostile.html", **words)
    with opened(browser, path) as page:
        page.locator("#after").select_option(index=0)
        page.locator("#before").select_option(index=1)
        page.locator("#threshold").press("ArrowRight")
        page.wait_for_timeout(200)
        assert page.complaints == []
        assert {url.partition("#")[0] for url in page.asked} == {path.as_uri()}
        assert page.evaluate("typeof window.pwned") == "undefined"
        assert page.evaluate("document.querySelectorAll('script').length") == 2
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.locator("h1").inner_text() == HOSTILE
        assert page.locator("#classes td.name").first.inner_text() == HOSTILE
        assert HOSTILE in page.locator("#pair-sentence").inner_text()


BREAK_IN = """() => {
  const script = document.createElement("script");
  script.textContent = "window.pwned = 1";
  document.body.append(script);
  const image = new Image(); image.src = "http://192.0.2.1/leak.png"; document.body.append(image);
  document.body.insertAdjacentHTML("beforeend", "<p onclick='window.pwned = 1'>x</p>");
  document.body.lastElementChild.click();
}"""


def test_policy_stops_code_and_requests_even_if_markup_got_in(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        refused: list[tuple[str, str]] = []
        page.on("requestfailed", lambda request: refused.append((request.url, request.failure)))
        told = page.expect_event("console", lambda _: len(page.complaints) >= 3)  # what the browser refused
        with page.expect_event("requestfailed"), told:
            page.evaluate(BREAK_IN)
        assert page.evaluate("typeof window.pwned") == "undefined"
        assert refused == [("http://192.0.2.1/leak.png", "csp")]


def test_print_is_light_opens_the_explanations_and_drops_the_controls(browser: Any, report: Path) -> None:
    with opened(browser, report, color_scheme="dark") as page:
        dark = background(page)
        page.evaluate(
            """addEventListener("beforeprint", () => {
              window.explained = document.querySelectorAll("details.reading[open]").length;
            })"""
        )
        printed = page.pdf(format="A4")
        assert printed.startswith(b"%PDF")
        n = page.locator("details.reading").count()
        assert n >= 6
        assert page.evaluate("window.explained") == n
        assert page.locator("details.reading[open]").count() == 0  # closed again afterwards
        page.emulate_media(media="print")
        assert background(page) != dark
        assert not page.locator("nav").is_visible()
        assert not page.locator(".choose").is_visible()
        assert page.locator("#reliability svg.chart").first.is_visible()


def test_without_javascript_pictures_and_tables_remain(browser: Any, report: Path) -> None:
    with opened(browser, report, java_script_enabled=False) as page:
        assert page.locator("#reliability svg.chart").count() == 3
        assert page.locator("#reliability svg.chart").first.is_visible()
        assert page.locator("#numbers table").is_visible()
        assert not page.locator("#threshold").is_visible()
        assert not page.locator("#theme").is_visible()
        assert page.locator("noscript p").bounding_box()["height"] > 10


def test_one_method_needs_no_comparison(browser: Any, tmp_path: Path) -> None:
    path = write_report({"alone": made(2.0)}, tmp_path / "one.html")
    with opened(browser, path) as page:
        assert page.complaints == []
        assert page.locator("#compare").count() == 0
        assert page.locator(".choose").count() == 0
        assert page.locator(".verdict").inner_text().startswith("“alone”: ")
        page.locator("#threshold").press("Home")
        assert "100.0 %" in row_of(page, 0)


def test_classes_sort_by_number_and_unknown_ones_come_last(browser: Any, tmp_path: Path) -> None:
    p = made(1.0, k=12)
    never = p.logits.clone()
    never[:, 3] = -9.0
    named = {
        "a": p,
        "b": Predictions(p.logits + 1e-6 * p.logits, p.labels),
        "c": Predictions(never, p.labels),
    }
    path = write_report(named, tmp_path / "sorted.html")
    with opened(browser, path) as page:
        page.locator("#class-method").select_option("c")
        table = page.locator("[data-of=class-method]").nth(2)
        by_name, by_gap = (table.get_by_role("button", name=name) for name in ("When it says", "Gap"))
        by_name.click()
        by_name.click()
        shown = table.locator("tbody td.name").all_inner_texts()
        assert shown == [f"class {k}" for k in range(12)]
        assert table.locator("tbody td.name bdi").count() == 12
        for _ in range(2):
            by_gap.click()
            assert table.locator("tbody td.name").last.inner_text() == "class 3"
        page.locator("#before").select_option("a")
        page.locator("#after").select_option("b")
        assert "-0.0000" not in page.locator("#compare").inner_text()


def test_choosers_name_the_methods_that_have_the_part(browser: Any, tmp_path: Path) -> None:
    """Of the first method only confidences are known; its name is too long for a phone."""
    p = made(1.0)
    rows = [f"{int(one)},{sure:.6f}" for one, sure in zip(p.correct.tolist(), p.confidence.tolist())]
    (tmp_path / "top.csv").write_text("\n".join(["correct,confidence", *rows]) + "\n")
    long = "a name that is too long for the width of a phone"
    path = write_report({long: tmp_path / "top.csv", long + "!": p}, tmp_path / "page.html")
    with opened(browser, path, viewport={"width": 390, "height": 800}) as page:
        assert page.locator("#class-method option").all_inner_texts() == [long + "!"]
        assert page.locator("[data-of=class-method] table").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert "cannot be compared" in page.locator("#pair-sentence").inner_text()
