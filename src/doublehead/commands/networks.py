"""Networks that the working folder holds."""

from __future__ import annotations

import os
import sys


def importable_here(model: str | None) -> None:
    """Let the module of `package.module:factory` lie in the working folder, as for `python -m`; last, it hides nothing.

    A script that pip installed does not look there, so every command that builds a network calls this first.
    """
    if model and ":" in model and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
