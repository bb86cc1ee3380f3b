"""The command `doublehead`, and `python -m doublehead`."""

from __future__ import annotations

import sys

from doublehead.system import require


def main() -> None:
    """Run the command line, or name the extra that brings its packages."""
    try:
        for package in ("typer", "rich"):
            require(package, extra="cli")
    except ImportError as error:
        sys.stderr.write(f"doublehead: {error}\n")
        sys.exit(2)
    from doublehead.cli import app

    app()


if __name__ == "__main__":
    main()
