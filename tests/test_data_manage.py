"""list, get, check, convert: whole files or none, checksums, archives that cannot escape."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import numpy as np
import pytest

from doublehead.data import DATASETS, check, convert, get, list_datasets, load, manage
from doublehead.data.fetch import download, unpack
from doublehead.data.manage import Source


@pytest.fixture
def web(tmp_path):
    """A real web server on this machine: (folder it serves, its address)."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path.startswith("/cut"):  # promise more than is sent
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"too little")
            else:
                super().do_GET()

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def everything_in(folder):
    return sorted(path.name for path in folder.rglob("*"))


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def test_download_with_progress_and_checksum(web, tmp_path):
    folder, address = web
    content = bytes(range(256)) * 10_000
    (folder / "a.bin").write_bytes(content)
    seen = []
    file = download(f"{address}/a.bin", tmp_path / "data" / "a.bin", md5(content), lambda *p: seen.append(p))
    assert file.read_bytes() == content
    assert seen[-1] == ("a.bin", len(content), len(content))
    (folder / "a.bin").unlink()
    assert download(f"{address}/a.bin", file, md5(content)) == file  # there already and right: not fetched
    assert everything_in(tmp_path / "data") == ["a.bin"]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("a.bin", ValueError, r"a.bin must have the checksum md5:0000, got md5:.*; nothing was kept"),
        ("missing.bin", ConnectionError, r"missing.bin could not be downloaded: HTTP Error 404"),
        ("cut.bin", ConnectionError, r"cut.bin (was cut off|could not be downloaded)"),
    ],
)
def test_a_failed_download_leaves_nothing(web, tmp_path, path, error, message):
    folder, address = web
    (folder / "a.bin").write_bytes(b"content")
    with pytest.raises(error, match=message):
        download(f"{address}/{path}", tmp_path / "data" / path, "md5:0000")
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


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_unpack(tmp_path, pack):
    archive = pack({"trees/train.txt": b"hello", "trees/dev.txt": b"you"}, tmp_path / "archive")
    assert unpack(archive, tmp_path / "out") == ["trees"]
    assert (tmp_path / "out" / "trees" / "train.txt").read_bytes() == b"hello"
    assert everything_in(tmp_path / "out") == ["dev.txt", "train.txt", "trees"]
    with pytest.raises(FileExistsError, match=r"trees is there already"):
        unpack(archive, tmp_path / "out")
    assert everything_in(tmp_path / "out") == ["dev.txt", "train.txt", "trees"]


@pytest.mark.parametrize("pack", [tar_of, zip_of])
@pytest.mark.parametrize(
    "members",
    [{"fine.txt": b"x", "../escaped.txt": b"x"}, {"fine.txt": b"x", "link": "/etc/passwd"}],
    ids=["path", "link"],
)
def test_archives_that_reach_outside_are_refused(tmp_path, pack, members):
    archive = pack(members, tmp_path / "archive")
    with pytest.raises(ValueError, match=r"archive is truncated, damaged or not safe to unpack"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "escaped.txt").exists()
    assert everything_in(tmp_path / "out") == []


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_truncated_archives_leave_nothing(tmp_path, pack):
    content = np.random.default_rng(0).bytes(100_000)
    archive = pack({f"{i}.bin": content for i in range(3)}, tmp_path / "archive")
    archive.write_bytes(archive.read_bytes()[:150_000])
    with pytest.raises(ValueError, match=r"archive is truncated, damaged or not safe to unpack"):
        unpack(archive, tmp_path / "out")
    assert everything_in(tmp_path / "out") == []


def test_damaged_member_of_a_zip_is_found(tmp_path):
    archive = zip_of({"a.txt": b"0123456789" * 100}, tmp_path / "archive")
    archive.write_bytes(archive.read_bytes().replace(b"0123456789", b"0123456780", 1))
    with pytest.raises(ValueError, match=r"Bad CRC-32"):
        unpack(archive, tmp_path / "out")


def test_get_an_archive(web, tmp_path, monkeypatch):
    folder, address = web
    trees = {f"trees/{part}.txt": b"(3 (2 a) (3 b))\n" for part in ("train", "dev", "test")}
    zip_of(trees, folder / "sst.zip")
    source = Source(f"{address}/sst.zip", "sst.zip", md5((folder / "sst.zip").read_bytes()), "trees")
    monkeypatch.setattr(manage, "sources", lambda name: (source,))
    assert get("sst-fine", tmp_path / "data") == tmp_path / "data" / "sst"
    assert everything_in(tmp_path / "data" / "sst") == ["dev.txt", "test.txt", "train.txt", "trees"]
    (folder / "sst.zip").unlink()
    get("sst-binary", tmp_path / "data")  # the same files: nothing is fetched
    assert load("sst-fine", tmp_path / "data").sizes == (1, 1, 1)


def test_get_says_what_to_put_where(tmp_path):
    with pytest.raises(
        LookupError, match=r"imagenet cannot be downloaded .* put the folders train and val .*imagenet\)"
    ):
        get("imagenet", tmp_path)
    with pytest.raises(ValueError, match=r"data set must be one of"):
        get("mnist", tmp_path)


def test_sources_are_named_for_every_set_but_two():
    for name in DATASETS:
        found = manage.sources(name)
        assert bool(found) == (name not in ("fashion", "imagenet"))
        assert all(source.url.startswith("http") for source in found)
    assert manage.sources("cifar10")[0].checksum == "md5:c58f30108f718f92721af3b95e74349a"


def test_list():
    rows = list_datasets()
    assert [row["name"] for row in rows] == list(DATASETS)
    assert rows[0] | {"layout": ""} == {
        "name": "fashion",
        "about": "a subset of Fashion-MNIST that comes with the package",
        "kind": "images",
        "n_classes": 10,
        "train": 8_500,
        "calib": 2_500,
        "test": 6_000,
        "layout": "",
    }


def test_check_of_good_data():
    report = check("fashion")
    assert report.ok
    assert report.sizes == (8_500, 2_500, 6_000)
    assert report.notes == ()


def test_check_of_missing_and_wrong_data(tmp_path):
    missing = check("svhn", tmp_path)
    assert not missing.ok
    assert "put train_32x32.mat" in missing.problems[0]
    (tmp_path / "train_32x32.mat").write_bytes(b"no matrix")
    (tmp_path / "test_32x32.mat").write_bytes(b"no matrix")
    problems = check("svhn", tmp_path).problems
    assert any("does not have its published checksum" in problem for problem in problems)
    assert any("train_32x32.mat is truncated or damaged" in problem for problem in problems)


def test_check_counts_sizes_and_duplicates(tmp_path):
    for part, line in (("train", "(3 (2 a) (3 b))"), ("dev", "(3 (2 a) (3 b))"), ("test", "(1 c)")):
        (tmp_path / f"{part}.txt").write_text(line + "\n")
    report = check("sst-fine", tmp_path)
    assert report.problems == ("sst-fine must have train/calib/test of (8544, 1101, 2210), got (1, 1, 1)",)
    assert report.notes == ("1 of the calib samples are also in train, byte for byte",)


def test_convert_images_and_read_back(tmp_path):
    source, dest = tmp_path / "source", tmp_path / "deep" / "dest"
    source.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3)).astype(np.uint8)
    np.save(source / "train_images.npy", images)
    np.save(source / "train_labels.npy", np.arange(30) % 3)
    convert(f"arrays:{source}", None, dest)
    before, after = load(f"arrays:{source}"), load(f"arrays:{dest}")
    assert before.class_names == after.class_names
    for part in ("train", "calib", "test"):
        assert (getattr(before, part).images == getattr(after, part).images).all()
        assert (getattr(before, part).labels == getattr(after, part).labels).all()
    with pytest.raises(FileExistsError, match=r"dest must be empty or not exist"):
        convert(f"arrays:{source}", None, dest)
    assert everything_in(tmp_path / "deep") == [
        "calib_images.npy",
        "calib_labels.npy",
        "classes.json",
        "dest",
        "test_images.npy",
        "test_labels.npy",
        "train_images.npy",
        "train_labels.npy",
    ]


def test_convert_trees_to_texts(tmp_path):
    lines = {"train": '(3 (2 a) (3 "quoted,"))', "dev": "(1 b)", "test": "(4 c)"}
    for part, line in lines.items():
        (tmp_path / f"{part}.txt").write_text(line + "\n")
    convert("sst-fine", tmp_path, tmp_path / "dest")
    splits = load(f"table:{tmp_path / 'dest'}")
    assert splits.class_names == ("very negative", "negative", "neutral", "positive", "very positive")
    assert splits.train.texts == ('a "quoted,"',)
    assert [part.labels.tolist() for part in (splits.train, splits.calib, splits.test)] == [[3], [1], [4]]


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(manage.np, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        convert("fashion", None, tmp_path / "dest")
    assert everything_in(tmp_path) == []
