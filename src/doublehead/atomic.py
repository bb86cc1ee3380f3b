"""Write files and folders so that they appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write a file or a folder at, which takes the place of `path` at the end.

    If anything fails, `path` stays as it was and nothing is left behind. A folder only replaces an empty folder.

    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text(), [file.name for file in target.parent.iterdir()]
    ('whole', ['a.txt'])
    """
    path = Path(path)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    temporary = folder / path.name
    try:
        yield temporary
        if path.is_dir():
            path.rmdir()  # it was empty, or this fails
        if temporary.is_file():
            temporary.chmod(0o666 & ~_umask())  # temporary files are private, results are not
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)  # it can only be read by setting it
    os.umask(mask)
    return mask
