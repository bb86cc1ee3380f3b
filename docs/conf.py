"""How the site is built: `make docs`. Nothing is fetched, neither when building nor when reading."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

from doublehead import __version__
from doublehead.system import require

require("torchvision", extra="models")  # some packages bring it along, whether it fits torch or not

project = "doublehead"
author = copyright = "The doublehead developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a page may begin its sections where it likes

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"doublehead {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
smartquotes = False  # a "name" in a docstring is a value to type
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"  # commands without their prompt and output

DOCTEST = re.compile(r"^(?:>>>|\.\.\.)", re.MULTILINE)
LITERAL = re.compile(r"(?:(?:    |\|).*(?:\n|\Z))+")  # a block of indented code, or of a table's rows


def plain_to_rst(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code`, lists and doctests; reStructuredText would read more into them."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    lines[:] = "\n\n".join(map(_as_rst, blocks)).split("\n")
    lines.append("")


def _as_rst(block: str) -> str:
    if DOCTEST.search(block):
        return block
    if LITERAL.fullmatch(block):
        return f".. code-block:: {_language(block)}\n\n" + textwrap.indent(block, "    ")
    return _escaped(block)


def _language(block: str) -> str:
    """Whether a block is Python; a table or a list of files is plain text."""
    try:
        ast.parse(textwrap.dedent(block))
    except SyntaxError:
        return "text"
    return "python"


def _escaped(text: str) -> str:
    pieces = re.split(r"`+([^`]+)`+", text)  # text and code in turn
    pieces[::2] = [re.sub(r"([\\*|]|_(?!\w))", r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [rf"\ ``{' '.join(piece.split())}``\ " for piece in pieces[1::2]]
    return re.sub(r"(?<=[^\n])\n(?=- )", "\n\n", "".join(pieces))


def readable_defaults(*event: Any) -> tuple[str, str | None] | None:
    """A default that a dataclass makes anew each time is no Python; without it the signature can be laid out."""
    signature, returned = event[-2:]
    return (signature.replace("<factory>", "..."), returned) if signature else None


def skip_generated(*event: Any) -> bool | None:
    """Leave out the fields of named tuples, which are in the signature, and scikit-learn's metadata requests."""
    name, obj = event[2:4]
    alias = str(getattr(obj, "__doc__", "")).startswith("Alias for field number")
    return True if alias or name in ("set_fit_request", "set_score_request") else None


def list_results(_app: Any, docname: str, source: list[str]) -> None:
    """Put the pages under results/, most of them generated, into the navigation below their index."""
    if docname == "results/index":
        pages = "\n".join(("methods", "stages", "versus", "safety", "paper", "runs", "notes/*"))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def write_math(translator: Any, node: nodes.Element) -> None:
    """Formulas as MathML, which browsers draw themselves."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    formula = convert(node.astext(), display=display)
    translator.body.append(formula.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em"/>'))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the functions above."""
    app.connect("autodoc-process-docstring", plain_to_rst)
    app.connect("autodoc-process-signature", readable_defaults)
    app.connect("autodoc-skip-member", skip_generated)
    app.connect("source-read", list_results)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
