"""get, check: no partial files, checksums, archives that stay in their folder."""

import functools
import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from doublehead.data import DATASETS, check, get, load
from doublehead.data.catalog import ASSET, Source, download, unpack
from samples import refused


@pytest.fixture
def web(tmp_path):
    """A local web server: (folder it serves, its address)."""
    pytest.importorskip("pooch")
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path.startswith("/cut"):  # announces more bytes than it sends
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"too little")
            else:
                super().do_GET()

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def archive(web, monkeypatch):
    """Serves a file as the only download of both forms of SST; it must contain the folder trees."""
    folder, address = web

    def serve(pack, members, checksum=False):
        file = pack(members, folder / "sst.zip")
        known = md5(file.read_bytes()) if checksum else None
        source = Source(f"{address}/sst.zip", "sst.zip", known, "trees")
        for name in ("sst-fine", "sst-binary"):
            monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], downloads=(source,)))
        return file

    return serve


def everything_in(folder):
    return sorted(path.name for path in folder.rglob("*"))


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def test_download_with_progress_and_checksum(web, tmp_path):
    folder, address = web
    content = bytes(range(256)) * 10_000
    (folder / "a.bin").write_bytes(content)
    source, seen = Source(f"{address}/a.bin", "a.bin", md5(content)), []
    bar = SimpleNamespace(update=seen.append, reset=seen.clear, close=lambda: None)
    file = download(source, tmp_path / "data", bar)
    assert file.read_bytes() == content
    assert file.stat().st_mode & 0o777 == 0o644
    assert bar.total == sum(seen) == len(content)
    (folder / "a.bin").unlink()
    assert download(source, tmp_path / "data") == file  # not downloaded again
    assert everything_in(tmp_path / "data") == ["a.bin"]


@pytest.mark.parametrize("path", ["a.bin", "missing.bin", "cut.bin"])
def test_a_failed_download_leaves_no_files(web, tmp_path, path):
    folder, address = web
    (folder / "a.bin").write_bytes(b"content")  # of another checksum
    with pytest.raises(ValueError if path == "a.bin" else ConnectionError, match=path):
        download(Source(f"{address}/{path}", path, "md5:0000"), tmp_path / "data")
    assert everything_in(tmp_path / "data") == []


def tar_of(members, path):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def zip_of(members, path):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if isinstance(content, str):
                info.external_attr = 0o120777 << 16
            archive.writestr(info, content)
    return path


@pytest.mark.parametrize("bad", [{"../escaped.txt": b"x"}, {"link": "/etc/passwd"}], ids=["path", "link"])
def test_archives_cannot_write_outside_their_folder(tmp_path, bad):
    members = {"fine.txt": b"x", **bad}
    with pytest.raises(ValueError, match="archive.tar is truncated, damaged or unsafe"):
        unpack(tar_of(members, tmp_path / "archive.tar"), tmp_path / "tar")
    unpack(zip_of(members, tmp_path / "archive.zip"), tmp_path / "zip")
    assert not (tmp_path / "escaped.txt").exists()
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(("pack", "damage"), [(tar_of, "cut off"), (zip_of, "cut off"), (zip_of, "changed")])
def test_damaged_and_other_archives_leave_no_files(archive, tmp_path, pack, damage):
    content = np.random.default_rng(0).bytes(100_000)
    file = archive(pack, {f"trees/{i}.bin": content for i in range(3)})
    whole = file.read_bytes()
    changed = whole[:99_000] + bytes([whole[99_000] ^ 1]) + whole[99_001:]
    file.write_bytes(whole[:150_000] if damage == "cut off" else changed)
    refused("sst.zip is truncated, damaged or unsafe", get, "sst-fine", tmp_path / "data")
    archive(pack, {"other.txt": b"x"})
    refused(r"sst.zip must contain trees", get, "sst-fine", tmp_path / "data")
    assert everything_in(tmp_path / "data" / "sst") == []


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_get_an_archive(archive, tmp_path, pack):
    trees = {f"trees/{part}.txt": b"(3 (2 a) (3 b))\n" for part in ("train", "dev", "test")}
    file = archive(pack, trees | {"more/README": b""}, checksum=True)
    assert get("sst-fine", tmp_path / "data") == tmp_path / "data" / "sst"
    assert everything_in(tmp_path / "data" / "sst") == [
        "README", "dev.txt", "more", "test.txt", "train.txt", "trees",
    ]  # fmt: skip
    file.unlink()
    get("sst-binary", tmp_path / "data")  # the same files: nothing is downloaded
    assert load("sst-fine", tmp_path / "data").sizes == (1, 1, 1)


def test_get_describes_the_files_of_a_set_that_cannot_be_downloaded(tmp_path):
    refused(re.escape(DATASETS["imagenet"].layout), get, "imagenet", tmp_path)
    refused("mnist", get, "mnist", tmp_path)
    assert (get("fashion", tmp_path) / ASSET).exists()


def test_every_set_has_names_and_sources_and_stands_in_the_documentation():
    page = (Path(__file__).resolve().parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    for name, one in DATASETS.items():
        sizes = " / ".join(f"{n:,}" for n in one.sizes)
        cells = rf"\|.*`{re.escape(name)}`.*\| .*{one.n_classes}.*\| {sizes} \|"
        assert re.search(cells, page), name
        assert len(set(one.class_names)) in (0, one.n_classes)
        assert bool(one.downloads) == (name not in ("fashion", "imagenet"))
        assert all(source.url.startswith("http") for source in one.downloads)


def test_check_of_good_data():
    splits, notes = check("fashion")
    assert splits.sizes == (8_500, 2_500, 6_000)
    assert notes == []


def test_check_of_missing_and_wrong_data(tmp_path):
    pytest.importorskip("pooch")
    refused(re.escape(DATASETS["svhn"].layout), check, "svhn", tmp_path, error=FileNotFoundError)
    for name in ("train", "test"):
        (tmp_path / f"{name}_32x32.mat").write_bytes(b"no matrix")
    refused(r"train_32x32.mat must .* md5:.*; .*test_32x32.mat must .* md5:", check, "svhn", tmp_path)


def test_check_counts_sizes_and_duplicates(tmp_path, monkeypatch):
    for part, line in (("train", "(3 (2 a) (3 b))"), ("dev", "(3 (2 a) (3 b))"), ("test", "(1 c)")):
        (tmp_path / f"{part}.txt").write_text(line + "\n")
    refused(r"\(8544, 1101, 2210\), got \(1, 1, 1\)", check, "sst-fine", tmp_path)
    monkeypatch.setitem(DATASETS, "sst-fine", replace(DATASETS["sst-fine"], sizes=(1, 1, 1)))
    assert check("sst-fine", tmp_path)[1] == ["1 of the calib samples are also in train, byte for byte"]
