"""What the documentation says is so: its code runs, its commands parse, its figures are in the results files."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shlex
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import doublehead.data
from doublehead.head_bank import HeadBank
from doublehead.optional import require
from doublehead.training.config import LEFT_OUT

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))

# Python blocks of these pages are run, and more is asked of them, in tests of their own.
RUN_ELSEWHERE = {
    "docs/report.md": "test_report.py",
    "docs/reading-a-reliability-diagram.md": "test_report.py",
    **{f"docs/tutorials/{name}.md": "test_integrations_docs.py"
       for name in ("training", "lightning", "transformers", "sklearn", "export")},
}  # fmt: skip
SLOW = {"docs/shift.md"}  # fits several guards
LANGUAGES = {
    "python",
    "console",
    "text",
}  # python runs; what cannot run is text, what a shell takes is console
DIRECTIVES = {"{toctree}", "{eval-rst}", "{include}"}


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of the page, where the code begins


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; a comment that begins with `<!-- run` is python the reader need not see."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(
        r"^```([^\n]*)\n(.*?)^```$|^<!-- (run)\n(.*?)^-->$", text, re.DOTALL | re.MULTILINE
    ):
        language, code = (found[1].strip(), found[2]) if found[3] is None else ("python", found[4])
        yield Block(language, code, text[: found.start()].count("\n") + 2)


def has_python(page: Path) -> bool:
    return any(block.language == "python" for block in blocks(page))


# ------------------------------------------------------------------------------------------------ code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language.split(" ")[0] in LANGUAGES | DIRECTIVES, (
            f"{name_of(page)}, line {block.line - 1}: a block is one of {sorted(LANGUAGES)}, got {block.language!r}"
        )
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == (
        page.read_text(encoding="utf-8").startswith("```")
    ), "a block is left open"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.slow] if name_of(p) in SLOW else [])
        for p in PAGES
        if has_python(p) and name_of(p) not in RUN_ELSEWHERE
    ],
    ids=name_of,
)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("torchvision", extra="models")  # some packages bring it along, whether it fits or not
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    few = doublehead.data.fashion_subset().first(1000, 500, 1000)
    monkeypatch.setattr(doublehead.data, "fashion_subset", lambda: few)  # the same images, fewer of them
    if page.name == "data.md":
        write_trees_and_vectors(tmp_path, monkeypatch)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python":  # the empty lines make the numbers of a traceback those of the page
            exec(compile("\n" * (block.line - 1) + block.code, name_of(page), "exec"), names)


def write_trees_and_vectors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A treebank and word vectors that the page reads, of a few words."""
    (folder / "data/sst").mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (folder / f"data/sst/{split}.txt").write_text("(3 (2 A) (3 (3 good) (2 film)))\n" * 50)
    words = [f"{word} {' '.join(['0.5'] * 300)}\n" for word in ("a", "good")]
    (folder / "glove.6B.300d.txt").write_text("".join(words))
    spec = doublehead.data.DATASETS["sst-fine"]
    monkeypatch.setitem(doublehead.data.DATASETS, "sst-fine", replace(spec, sizes=(50, 50, 50)))


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_what_runs_elsewhere_does(page: str, test: str) -> None:
    assert has_python(ROOT / page)
    stem = Path(page).stem
    assert re.search(rf'"{stem}(\.md)?"', (ROOT / "tests" / test).read_text(encoding="utf-8"))


def test_examples_in_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require("torchvision", extra="models")
    tried, failed = 0, []
    for path in SOURCES:
        if ">>> " not in path.read_text(encoding="utf-8"):
            continue
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if "doublehead[" in str(error):  # a package is missing, and the extra that brings it was named
                continue
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = doctest.testmod(module)
        tried += result.attempted
        failed += [name] * bool(result.failed)
    assert not failed
    assert tried > 100


# --------------------------------------------------------------------------------------------- commands


def shell_lines(page: Path) -> Iterator[str]:
    """Commands in console blocks (after a $, if there is output) and in indented lines that begin with doublehead."""
    for block in blocks(page):
        if block.language == "console":
            lines = block.code.replace("\\\n", " ").splitlines()
            prompted = [line[2:] for line in lines if line.startswith("$ ")]
            yield from prompted or [line for line in lines if line.strip() and not line.startswith("#")]
    yield from re.findall(r"^    (doublehead .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_commands_parse() -> None:
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from doublehead.cli import app

    root = typer.main.get_command(app)
    seen = set()
    for page in PAGES:
        for line in shell_lines(page):
            words = shlex.split(line, comments=True)
            if words[0] == "doublehead":
                seen.add(check_command(root, words[1:], f"{name_of(page)}: {line}"))
            elif words[0] == "make":
                targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert words[-1] in targets, f"{name_of(page)}: {line}"
    assert {"evaluate", "calibrate", "report", "demo", "export"} <= seen
    for name in seen:
        assert not CliRunner().invoke(app, [*name.split(), "--help"]).exit_code


def check_command(group: Any, words: list[str], where: str) -> str:
    """Walk to the command that is named and let its own parser read the options."""
    command, used = group, []
    while hasattr(command, "commands") and len(used) < len(words):
        assert words[len(used)] in command.commands, f"{where}: no command {words[len(used)]!r}"
        used.append(words[len(used)])
        command = command.commands[used[-1]]
    context = command.context_class(command)
    left = [word for word in words[len(used) :] if word not in ("--help", "-h")]
    if not is_prose(left):
        try:
            command.make_parser(context).parse_args(left)
        except Exception as error:
            pytest.fail(f"{where}: {getattr(error, 'message', error)}")
    return " ".join(used)


def is_prose(words: list[str]) -> bool:
    """Whether the rest of an indented line explains the command: `doublehead report   show it to someone`."""
    return len(words) > 2 and all(re.fullmatch(r"[a-z]+\??", word) for word in words)


def test_files_and_extras_exist() -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for names in re.findall(r"doublehead\[([\w,]+)\]", text):
            assert set(names.split(",")) <= set(extras), f"{name_of(page)}: doublehead[{names}]"
        for path in re.findall(r"\b(?:examples|experiments|benchmarks|tests)/[\w./-]*\w\.\w+", text):
            assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


# ------------------------------------------------------------------------------------------------ pages


def test_every_page_is_in_the_navigation() -> None:
    listed: set[Path | str] = set((DOCS / "results").glob("*.md"))  # docs/conf.py puts them below their index
    for page in DOCS.rglob("*.md"):
        for block in blocks(page):
            if block.language == "{toctree}":
                entries = [line for line in block.code.splitlines() if line and not line.startswith(":")]
                for entry in entries:
                    listed |= set(page.parent.glob(f"{entry}.md")) or {f"nothing is {entry}"}
    assert listed | {DOCS / "index.md"} == set(DOCS.rglob("*.md"))


def test_every_public_module_is_in_the_reference() -> None:
    from test_layout import ORDER

    inner = {
        "optional",
        "plumbing",
        "last_layer",
        "head_optimizer",
        "head_rate",
        "atomic",
        "report_page",
        "cli",
        "__main__",
    }
    reference = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"automodule:: doublehead\.(\w+)", reference))
    assert named == set(ORDER) - inner


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


# ---------------------------------------------------------------------------------------------- figures


def test_figures_of_the_guide_are_in_the_results() -> None:
    """Worked out once more from the results files, without the code that writes the table."""
    page = (DOCS / "which-method.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    start = next(i for i, row in enumerate(rows) if row[0] == "finding")
    columns = [evidence(seeds_of(data)) for data in ("cifar10", "cifar100")]
    assert [row[1:] for row in rows[start + 2 : start + 10]] == [list(pair) for pair in zip(*columns)]
    columns = [guard_evidence(seeds_of(data)) for data in ("cifar10", "cifar100")]
    assert [row[1:] for row in rows[start + 10 : start + 12]] == [list(pair) for pair in zip(*columns)]


def guard_evidence(runs: list[dict[str, Any]]) -> list[str]:
    """Two lines on guards: each family, or kind, by the one that left it out; all families seen."""

    def mean(parts: tuple[str, ...], output: str = "") -> tuple[str, str]:
        names = {f"guarded@shifts-{part}": LEFT_OUT[part] for part in parts}
        has = [run["shift"] for run in runs if set(names) <= set(run["outputs"])]
        sets = [
            (name, f"{family}:{i}") for name, some in names.items() for family in some for i in range(1, 6)
        ]
        assert len({one for _, one in sets}) == len(sets) == 65
        if not has:
            return "not run", ""
        means = [statistics.mean(100 * one[at][output or name]["ece"] for name, at in sets) for one in has]
        return spelled(means, 1), f" ({len(has)} seed{'s' * (len(has) > 1)})" * (len(has) < len(runs))

    family, kind = ("1", "2", "3"), ("noises", "blurs", "colours", "digital")
    alone, unseen, whole = mean(family, "main+T")[0], "".join(mean(family)), "".join(mean(kind))
    return [f"{alone}; {unseen}", f"{whole}; {''.join(mean(family, 'guarded'))}"]


def seeds_of(data: str) -> list[dict[str, Any]]:
    """The cross-entropy runs of a data set on ResNet-50, those with the most epochs, by seed."""
    files = (ROOT / "experiments/results").glob(f"{data}-resnet50-cross_entropy-e*-s*/results.json")
    runs = [json.loads(file.read_text()) for file in files]
    runs.sort(key=lambda run: run["config"]["seed"])
    longest = max(run["config"]["epochs"] for run in runs)
    return [run for run in runs if run["config"]["epochs"] == longest and not run["config"]["mixup"]]


def spelled(values: list[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def evidence(runs: list[dict[str, Any]]) -> list[str]:
    """A column of the guide's last table."""

    def of(output: str, key: str, when: str = "before", scale: float = 100) -> list[float]:
        return [scale * run["outputs"][output][when][key] for run in runs if output in run["outputs"]]

    def ece(output: str, when: str = "before") -> str:
        found, low, high = (of(output, key, when) for key in ("ece", "ece_floor_low", "ece_floor_high"))
        if not found:
            return "not run"
        bold = "**" if statistics.mean(found) <= statistics.mean(high) else ""
        band = f"({statistics.mean(low):.2f} to {statistics.mean(high):.2f})"
        fewer = f", {len(found)} seed{'s' * (len(found) > 1)}" * (len(found) < len(runs))
        return f"{bold}{spelled(found, 2)}{bold} {band}{fewer}"

    def nll(output: str, when: str = "before") -> str:
        return spelled(of(output, "nll", when, 1), 4)

    def accuracies() -> str:
        both = [run["outputs"] for run in runs if "annealing-double-head" in run["outputs"]]
        pair = [
            [100 * one[name]["before"]["accuracy"] for one in both]
            for name in ("annealing-double-head", "main")
        ]
        return "; ".join(spelled(values, 2) for values in pair) + few(both)

    def few(some: list[Any]) -> str:
        return f" ({len(some)} seed{'s' * (len(some) > 1)})" * (len(some) < len(runs))

    def shifted(without: str) -> str:
        names = [
            f"{family}:{i}"
            for family in doublehead.data.FAMILIES
            if without not in family
            for i in range(1, 6)
        ]
        assert len(names) == (13 * 5 if without == "nothing" else 9 * 5)
        both = [
            run["shift"] for run in runs if all(perturbed in run["shift"].get(name, ()) for name in names)
        ]
        pair = [
            [statistics.mean(100 * one[name][output]["ece"] for name in names) for one in both]
            for output in ("main+T", perturbed)
        ]
        return "; ".join(spelled(values, 1) for values in pair) + few(both)

    def fitted_later() -> str:
        networks = json.loads((ROOT / "experiments/results/post_hoc.json").read_text())
        title = {"cifar10": "CIFAR-10, ResNet-50", "cifar100": "CIFAR-100, ResNet-50"}[
            runs[0]["config"]["data"]
        ]
        heads = [one for one in networks[title]["numbers"] if one["calibrator"] == "head"]
        assert len(heads) == len(runs)
        eces, low, high = ([100 * one[key] for one in heads] for key in ("ece", "low", "high"))
        bold = "**" if statistics.mean(eces) <= statistics.mean(high) else ""
        band = f"({statistics.mean(low):.2f} to {statistics.mean(high):.2f})"
        return f"{bold}{spelled(eces, 2)}{bold} {band}; {spelled([one['nll'] for one in heads], 4)}"

    perturbed = "both@noise+broad-1"
    return [
        f"{ece('temperature-1')} / {ece('temperature-1.2')}",
        f"{ece('main', 'after')}; {nll('main', 'after')}",
        f"{ece('auto')}; {nll('auto')}",
        fitted_later(),
        accuracies(),
        shifted("nothing"),
        shifted("noise"),
        ece(perturbed),
    ]


def test_figures_of_the_shift_page_are_in_its_file() -> None:
    from doublehead.shift_guard import CHANNELS, HIDDEN, MARGIN, N_LAYERS, STEPS
    from test_integrations_architectures import NOT_GUARDED, TIMM, TORCHVISION

    page = " ".join((DOCS / "shift.md").read_text(encoding="utf-8").split())
    made = json.loads((DOCS / "images/shift.json").read_text())
    clean, panels = made["clean_ece"], made["panels"]
    alone, guarded = (100 * clean[name] for name in ("temperature", "shifts"))
    assert f"{alone:.2f} % with the temperature alone, {guarded:.2f} % with the guard round it" in page
    assert f"acts on {100 * made['acts_on_clean']:.0f} % of the clean test images" in page
    last = {
        (kind, name): f"{100 * panel[name][-1]:.0f} %" for kind, panel in panels.items() for name in clean
    }
    seen, scalar, unseen = (last["contrast", name] for name in ("shifts", "temperature", "contrast"))
    assert f"{seen} of {scalar} remain, or {unseen} if the guard never saw contrast" in page
    assert f"at 0.4 it brings {last['noise', 'temperature']} to {last['noise', 'shifts']}" in page
    assert f"leaves the last severity of brightness above at {last['brightness', 'noise']}" in page
    assert panels["brightness"]["noise"][-1] > 0.95 * panels["brightness"]["temperature"][-1]
    first = [100 * panels["brightness"][name][1] for name in ("temperature", "shifts")]
    assert f"from {first[0]:.1f} % to {first[1]:.1f} %" in page
    few = {n: f"{100 * one['acts_on_clean']:.0f} %" for n, one in made["fewer"].items()}
    assert f"it acts on {few['1000']}, {few['250']} and {few['100']} of the clean test images" in page
    assert f"{made['settings']['fit_seconds']:.0f} seconds on a CPU core" in page
    assert f"{made['n_test']:,} test images" in page
    assert (N_LAYERS, CHANNELS, HIDDEN, STEPS) == (9, 128, 16, 1000)  # the page says nine, a thousand steps
    assert f"{CHANNELS} channels" in page
    assert f"{HIDDEN} hidden units" in page
    assert f"{MARGIN} times the humility" in page
    n_families = len(TIMM) + len(TORCHVISION)
    assert f"Of the {n_families} families" in page
    assert f"{n_families - len(NOT_GUARDED)} work as they are" in page


def test_figures_of_the_frozen_network_are_in_the_results() -> None:
    splits = json.loads((ROOT / "experiments/results/imagenet_frozen.json").read_text())["splits"]
    ours, scaled = ([split[name] for split in splits] for name in ("fit_head", "temperature"))
    wins = {key: sum(a[key] < b[key] for a, b in zip(ours, scaled)) for key in ("nll", "ece")}
    nll = [f"{statistics.mean(row['nll'] for row in rows):.4f}" for rows in (ours, scaled)]
    page = " ".join((DOCS / "which-method.md").read_text(encoding="utf-8").split())
    assert f"in NLL in {wins['nll']} of {len(splits)} splits** ({nll[0]} against {nll[1]} on average)" in page
    assert f"in ECE in {wins['ece']} of {len(splits)}." in page


def test_figures_of_select_are_in_the_results() -> None:
    found = json.loads((ROOT / "experiments/results/held_back.json").read_text())
    worse = {
        rule: [round(found["draws"] * row[rule]["share_worse"]) for row in found["excess_by_n"].values()]
        for rule in ("today", "first")
    }
    today = worse["today"][1:]  # without 30, which gets a warning
    largest = max(row["today"]["worst"] for n, row in found["excess_by_n"].items() if int(n) >= 50)
    says = " ".join((HeadBank.select.__doc__ or "").split())
    assert f"in {min(today)} to {max(today)} of {found['draws']} draws, by {largest:.3f} at most." in says
    assert f"it was {min(worse['first'][1:])} to {max(worse['first'][1:])}." in says
