"""The documentation holds: code blocks run, commands parse, links resolve, generated blocks are up to date."""

import doctest
import importlib
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import doublehead.data
from doublehead.system import require

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))

SLOW = {
    "docs/shift.md",
    *(f"docs/tutorials/{name}.md" for name in ("training", "lightning", "transformers", "sklearn", "export")),
}
LANGUAGES = {"python", "console", "text"}  # python is run, console is parsed
DIRECTIVES = {"{toctree}", "{eval-rst}", "{include}"}
# not in the reference
INTERNAL = {"system", "torch_tools", "score_arrays", "report_page", "cli", "__main__"}


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of the page, where the code begins


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; a comment that begins with `<!-- run` is Python that readers do not see."""
    text = text_of(page)
    fence = r"^```([^\n]*)\n(.*?)^```$|^<!-- (run)\n(.*?)^-->$"
    for found in re.finditer(fence, text, re.DOTALL | re.MULTILINE):
        language, code = (found[1].strip(), found[2]) if found[3] is None else ("python", found[4])
        yield Block(language, code, text[: found.start()].count("\n") + 2)


# --- code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_known_language(page: Path) -> None:
    for block in blocks(page):
        where = f"{name_of(page)}, line {block.line - 1}"
        assert block.language.split(" ")[0] in LANGUAGES | DIRECTIVES, f"{where}: got {block.language!r}"
    assert len(re.findall(r"^```", text_of(page), re.MULTILINE)) % 2 == 0, "a block is left open"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if name_of(page) in SLOW else [])
        for page in PAGES
        if any(block.language == "python" for block in blocks(page))
    ],
    ids=name_of,
)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("torchvision", extra="models")  # refuses one that does not fit torch
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    few = doublehead.data.fashion_subset().first(1000, 500, 1000)
    monkeypatch.setattr(doublehead.data, "fashion_subset", lambda: few)  # the same images, fewer of them
    if page.name == "data.md":
        write_trees_and_vectors(tmp_path, monkeypatch)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python":  # the empty lines give a traceback the line numbers of the page
            exec(compile("\n" * (block.line - 1) + block.code, name_of(page), "exec"), names)


def write_trees_and_vectors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small treebank and word vectors for docs/data.md."""
    (folder / "data/sst").mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (folder / f"data/sst/{split}.txt").write_text("(3 (2 A) (3 (3 good) (2 film)))\n" * 50)
    words = [f"{word} {' '.join(['0.5'] * 300)}\n" for word in ("a", "good")]
    (folder / "glove.6B.300d.txt").write_text("".join(words))
    spec = doublehead.data.DATASETS["sst-fine"]
    monkeypatch.setitem(doublehead.data.DATASETS, "sst-fine", replace(spec, sizes=(50, 50, 50)))


def test_examples_in_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require("torchvision", extra="models")
    tried, failed = 0, []
    for path in SOURCES:
        if ">>> " not in text_of(path):
            continue
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if "doublehead[" in str(error):  # an optional package is missing
                continue
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = doctest.testmod(module)
        tried += result.attempted
        failed += [name] * bool(result.failed)
    assert not failed
    assert tried > 100


# --- commands


def shell_lines(page: Path) -> Iterator[str]:
    """Commands in console blocks (after a $, if there is output) and in indented lines that begin with doublehead."""
    for block in blocks(page):
        if block.language == "console":
            lines = block.code.replace("\\\n", " ").splitlines()
            prompted = [line[2:] for line in lines if line.startswith("$ ")]
            yield from prompted or [line for line in lines if line.strip() and not line.startswith("#")]
    yield from re.findall(r"^    (doublehead .*)$", text_of(page), re.MULTILINE)


def test_commands_parse() -> None:
    typer = pytest.importorskip("typer")
    from doublehead.cli import app

    root, seen = typer.main.get_command(app), set()
    targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    for page in PAGES:
        for line in shell_lines(page):
            words = shlex.split(line, comments=True)
            if words[0] == "doublehead":
                seen.add(check_command(root, words[1:], f"{name_of(page)}: {line}"))
            elif words[0] == "make":
                assert words[-1] in targets, f"{name_of(page)}: {line}"
    assert {"evaluate", "calibrate", "report", "demo", "export", "train", "compare"} <= seen


def check_command(group: Any, words: list[str], where: str) -> str:
    """Walk to the named command and let its own parser read the options."""
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
    """Whether the rest of an indented line explains the command: `doublehead report   an HTML page`."""
    return len(words) > 2 and all(re.fullmatch(r"[A-Za-z]+[?,]?", word) for word in words)


def test_files_and_extras_exist() -> None:
    extras = re.findall(r"^(\w+) = \[", text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    for page in PAGES:
        for names in re.findall(r"doublehead\[([\w,]+)\]", text_of(page)):
            assert set(names.split(",")) <= set(extras), f"{name_of(page)}: doublehead[{names}]"
        for path in re.findall(r"\b(?:examples|experiments|benchmarks|tests)/[\w./-]*\w\.\w+", text_of(page)):
            assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


# --- pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", text_of(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name_of(page)} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_public_module_is_in_the_reference() -> None:
    from test_layout import ORDER

    reference = "".join(text_of(page) for page in (DOCS / "api").glob("*.md"))
    assert set(re.findall(r"automodule:: doublehead\.(\w+)", reference)) == set(ORDER) - INTERNAL


def test_the_comparison_with_other_libraries_is_that_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from peers_agreement import MARK, PEERS, as_markdown

    results = json.loads(text_of(ROOT / "benchmarks/results/peers_agreement.json"))
    versions = {name: results["versions"][name] for name in PEERS}
    shown = text_of(DOCS / "peers.md").split(MARK)[1].split("<!-- end -->")[0]
    assert shown.strip() == as_markdown(results["rows"], versions).strip()
    sys.modules.pop("definitions", None)
