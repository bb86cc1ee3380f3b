"""Downloads that are whole or not there, and archives that cannot write outside their folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Progress: TypeAlias = Callable[
    [str, int, int], None
]  # (file name, bytes so far, bytes in all or 0 if unknown)
BLOCK = 1 << 20


def download(url: str, file: Path, checksum: str | None = None, progress: Progress | None = None) -> Path:
    """Download `url` to `file`; the file appears only when it is complete and its checksum is right.

    `checksum` is "md5:..." or "sha256:...". A file that is there already and right is not fetched again.
    """
    if file.exists() and checksum and digest(file, checksum) == checksum:
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(file.parent, file.name) as temporary:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer, temporary.open("wb") as out:
                expected = int(answer.headers.get("Content-Length") or 0)
                received = 0
                while block := answer.read(BLOCK):
                    out.write(block)
                    received += len(block)
                    if progress:
                        progress(file.name, received, expected)
        except OSError as error:
            raise ConnectionError(f"{url} could not be downloaded: {error}") from error
        if expected and received != expected:
            raise ConnectionError(f"{url} was cut off: {received} of {expected} bytes came")
        if checksum and (found := digest(temporary, checksum)) != checksum:
            raise ValueError(f"{url} must have the checksum {checksum}, got {found}; nothing was kept")
        temporary.chmod(0o644)
        os.replace(temporary, file)
    return file


def digest(file: Path, like: str) -> str:
    """The checksum of a file in the same form as `like`, for example "md5:...": the part before the colon."""
    kind = like.partition(":")[0]
    sha = hashlib.new(kind, usedforsecurity=False)
    with file.open("rb") as handle:
        while block := handle.read(BLOCK):
            sha.update(block)
    return f"{kind}:{sha.hexdigest()}"


def unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack a .tar.* or .zip into `folder`; returns the names of what came to lie there.

    Everything is unpacked beside its destination first and then moved, so a damaged archive leaves nothing behind.
    Members that would land outside the folder, links out of it and devices are refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _temporary(folder, "unpack", is_folder=True) as temporary:
        try:
            if zipfile.is_zipfile(archive):
                _unzip(archive, temporary)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(temporary, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{archive} is truncated, damaged or not safe to unpack: {error}") from error
        names = sorted(entry.name for entry in temporary.iterdir())
        for name in names:
            if (folder / name).exists():
                raise FileExistsError(
                    f"{folder / name} is there already; move it away to unpack {archive.name}"
                )
        for name in names:
            os.replace(temporary / name, folder / name)
    return names


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as zipped:
        root = folder.resolve()
        for member in zipped.infolist():
            target = (root / member.filename).resolve()
            if root != target and root not in target.parents:
                raise ValueError(f"its member {member.filename!r} would land outside the folder")
            if (member.external_attr >> 16) & 0o170000 == 0o120000:
                raise ValueError(f"its member {member.filename!r} is a link")
        zipped.extractall(folder)  # checks each member's CRC


@contextmanager
def _temporary(folder: Path, name: str, is_folder: bool = False) -> Iterator[Path]:
    """A hidden file or folder beside the destination, gone afterwards whatever happens."""
    if is_folder:
        path = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
    else:
        handle, created = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        os.close(handle)
        path = Path(created)
    try:
        yield path
    finally:
        if is_folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
