"""Readers of standard files, of the user's own data and of the included images; damaged files are named."""

import dataclasses
import gzip
import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from doublehead.data import DATASETS, catalog, load, load_test, readers
from doublehead.data.catalog import ASSET, fashion_subset
from doublehead.data.splits import count_duplicates
from samples import Bomb, refused

RANDOM = np.random.default_rng(0)
ASSETS = Path(catalog.__file__).parent / "assets"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist


def as_python2(content):
    """Pickle with byte strings as Python 2 did, which Python 3's pickler cannot be asked to do."""

    class Pickler(pickle._Pickler):
        dispatch = pickle._Pickler.dispatch.copy()

        def save_bytes(self, value):
            n = len(value)
            self.write(b"U" + bytes([n]) + value if n < 256 else b"T" + n.to_bytes(4, "little") + value)
            self.memoize(value)

        dispatch[bytes] = save_bytes

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar(folder, n_classes, sizes):
    folder.mkdir(parents=True)
    names = {10: [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], 100: ["train", "test"]}[n_classes]
    key = {10: b"labels", 100: b"fine_labels"}[n_classes]
    written = {}
    for name, n in zip(names, sizes):
        pixels = RANDOM.integers(0, 256, (n, 3072)).astype(np.uint8)
        labels = RANDOM.integers(0, n_classes, n).tolist()
        content = {b"data": pixels, key: labels, b"batch_label": b"a batch", b"filenames": [b"a.png"] * n}
        (folder / name).write_bytes(as_python2(content))
        written[name] = (pixels, labels)
    return written


@pytest.fixture
def small(monkeypatch):
    """Let data sets be small: the sizes in the table are what is asked for."""

    def shrink(name, sizes):
        monkeypatch.setitem(DATASETS, name, dataclasses.replace(DATASETS[name], sizes=sizes))

    return shrink


@pytest.mark.parametrize(("n_classes", "folder"), [(10, "cifar-10-batches-py"), (100, "cifar-100-python")])
def test_cifar_batches(tmp_path, small, n_classes, folder):
    name, n_train = f"cifar{n_classes}", 5 if n_classes == 10 else 1
    written = write_cifar(tmp_path / folder, n_classes, [20] * n_train + [7])
    small(name, (16 * n_train, 4 * n_train, 7))
    splits = load(name, tmp_path)
    assert splits.sizes == (16 * n_train, 4 * n_train, 7)
    pixels, labels = list(written.values())[-1]
    assert splits.test.labels.tolist() == labels
    assert splits.test.images[3, 1, 2].tolist() == [pixels[3, c * 1024 + 1 * 32 + 2] for c in range(3)]
    assert (load_test(name, tmp_path).images == splits.test.images).all()
    first = next(iter(written.values()))[0]
    assert any((splits.train.images[0].transpose(2, 0, 1).ravel() == row).all() for row in first)
    for split in ("train", "test"):
        samples = readers.read_cifar_split(tmp_path / folder, split)
        np.save(tmp_path / f"{split}_images.npy", samples.images)
        np.save(tmp_path / f"{split}_labels.npy", samples.labels)
    from_arrays = load(name, tmp_path)  # which come before the batches
    for split, samples in splits.parts.items():
        assert (from_arrays.parts[split].images == samples.images).all()


def test_no_pickle_is_executed(tmp_path):
    folder, sprung = tmp_path / "cifar-10-batches-py", tmp_path / "sprung"
    folder.mkdir()
    trap = pickle.dumps({"data": Bomb(sprung), "labels": []}, protocol=2)
    (folder / "data_batch_1").write_bytes(trap)
    refused("data_batch_1 .* it asks for", readers.read_cifar_split, folder, "train")
    assert not sprung.exists()
    pickle.loads(trap)  # the trap itself works
    assert sprung.exists()


@pytest.mark.parametrize("name", ["os.system", "io.open", "numpy.load", "numpy.core.multiarray.fromfile"])
def test_every_other_global_is_refused(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (tmp_path / "batch").write_bytes(f"c{module}\n{attribute}\n.".encode())
    refused(f"it asks for {name}", readers.read_cifar_batch, tmp_path / "batch", "labels")


def test_a_cifar_of_few_images_and_truncated_and_missing_batches_are_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar(folder, 10, [20] * 5 + [7])
    refused(r"cifar10 must have 50000 train images, got 100 in", load, "cifar10", tmp_path)
    whole = (folder / "data_batch_3").read_bytes()
    for keep in (0, 10, 1000, 60_000):
        (folder / "data_batch_3").write_bytes(whole[:keep])
        refused("data_batch_3", readers.read_cifar_split, folder, "train")
    (folder / "data_batch_2").unlink()
    refused(r"data_batch_2 is missing", readers.read_cifar_split, folder, "train", error=FileNotFoundError)


def test_svhn(tmp_path, small):
    scipy_io = pytest.importorskip("scipy.io")
    images = RANDOM.integers(0, 256, (32, 32, 3, 40)).astype(np.uint8)
    labels = (np.arange(40) % 10 + 1)[:, None].astype(np.uint8)  # 1 .. 10, where 10 is the digit 0
    for split in ("train", "test"):
        scipy_io.savemat(tmp_path / f"{split}_32x32.mat", {"X": images, "y": labels})
    small("svhn", (30, 10, 40))
    splits = load("svhn", tmp_path)
    assert splits.sizes == (30, 10, 40)
    assert splits.test.labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert (splits.test.images[17] == images[:, :, :, 17]).all()
    file = tmp_path / "train_32x32.mat"
    file.write_bytes(file.read_bytes()[:1000])
    refused("train_32x32.mat", load, "svhn", tmp_path)
    assert len(load_test("svhn", tmp_path)) == 40


def png(path, colour, size=(6, 5)):
    pillow = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow.new("RGB", size, colour).save(path)


def pngs(folder, names, **counts):
    """In a folder for each split a folder for each class, with that many images."""
    for split, n in counts.items():
        for label, name in enumerate(names):
            for i in range(n):
                png(folder / split / name / f"{i}.png", (label, i, 0))


def test_imagenet(tmp_path):
    pngs(tmp_path / "imagenet", ("n01", "n02"), train=3, val=4)
    splits = load("imagenet", tmp_path)
    assert splits.sizes == (6, 4, 4)
    assert splits.class_names == ("n01", "n02")
    assert np.bincount(splits.calib.labels).tolist() == [2, 2]
    assert not set(splits.calib.files) & set(splits.test.files)
    png(tmp_path / "imagenet" / "val" / "n03" / "0.png", (0, 0, 0))
    refused(r"val must .* got \['n03'\]", load, "imagenet", tmp_path)


def test_own_folders_of_images(tmp_path):
    pngs(tmp_path, ("cat", "dog"), train=20, val=3, test=4)
    splits = load(f"folder:{tmp_path}")
    assert splits.sizes == (40, 6, 8)
    flat = load(f"folder:{tmp_path / 'train'}")
    assert flat.sizes == (29, 3, 8)


def test_own_arrays(tmp_path):
    images = RANDOM.integers(0, 256, (50, 4, 4)).astype(np.uint8)
    np.save(tmp_path / "train_images.npy", images)
    np.save(tmp_path / "train_labels.npy", (np.arange(50) % 3).astype(np.uint8))
    splits = load(f"arrays:{tmp_path}")
    assert splits.sizes == (36, 4, 10)
    assert splits.class_names == ("0", "1", "2")
    assert splits.train.images.shape == (36, 4, 4, 1)
    (tmp_path / "classes.json").write_text('["a", "b", "c"]')
    assert load(f"arrays:{tmp_path}").class_names == ("a", "b", "c")
    np.save(tmp_path / "train_labels.npy", np.zeros(50))
    refused("train_labels.npy .* got float64", load, f"arrays:{tmp_path}")
    file = tmp_path / "train_images.npy"
    file.write_bytes(file.read_bytes()[:-10])
    refused("train_images.npy", load, f"arrays:{tmp_path}")
    np.save(file, np.array([Bomb(tmp_path / "sprung")], object), allow_pickle=True)
    refused("train_images.npy", load, f"arrays:{tmp_path}")
    assert not (tmp_path / "sprung").exists()
    file.unlink()
    refused(r"train_images.npy is missing", load, f"arrays:{tmp_path}", error=FileNotFoundError)


def test_own_table(tmp_path):
    file = tmp_path / "reviews.csv"
    rows = [f'"text {i}, with a comma",{"good" if i % 2 else "bad"}' for i in range(50)]
    file.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    splits = load(f"table:{file}")
    assert splits.sizes == (36, 4, 10)
    assert splits.class_names == ("bad", "good")
    pairs = zip(splits.test.texts, splits.test.labels)
    assert all(int(text.split()[1][:-1]) % 2 == label for text, label in pairs)


def test_own_table_with_splits(tmp_path):
    pandas = pytest.importorskip("pandas")
    halves = ["train", "train", "val", "val", "test", "test"]
    frame = pandas.DataFrame({"text": list("abcdef"), "label": [7, 9] * 3, "split": halves})
    frame.to_parquet(tmp_path / "all.parquet")
    splits = load(f"table:{tmp_path / 'all.parquet'}")
    assert splits.sizes == (2, 2, 2)
    assert splits.class_names == ("7", "9")
    assert splits.calib.texts == ("c", "d")
    folder = tmp_path / "folder"
    folder.mkdir()
    for split, part in frame.groupby("split"):
        part[["text", "label"]].to_csv(folder / f"{split}.csv", index=False)
    assert load(f"table:{folder}").sizes == (2, 2, 2)
    file = tmp_path / "all.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    refused("all.parquet", load, f"table:{file}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,class\na,1\n", r"must have the columns 'text' and 'label', got \['class', 'text'\]"),
        ("text,label\na,1\nb,\n", "row 2"),
        ("text,label,split\na,1,train\nb,2,exam\n", r"got \['exam'\]"),
        ("", "table.csv"),
    ],
)
def test_bad_tables_are_named(tmp_path, content, message):
    (tmp_path / "table.csv").write_text(content)
    refused(message, load, f"table:{tmp_path / 'table.csv'}")


def test_own_data_that_is_not_there(tmp_path):
    refused("nowhere is missing", load, f"folder:{tmp_path / 'nowhere'}", error=FileNotFoundError)
    refused("arrays:PATH, folder:PATH or table:PATH, got 'csv:x'", load, "csv:x")


def posts(folder, n, text):
    for group in ("alt.a", "sci.b"):
        (folder / group).mkdir(parents=True)
        for i in range(n):
            header = f"From: someone\nSubject: {group}\n\n"
            (folder / group / str(i)).write_bytes(f"{header}{text} {i} caf\xe9\n".encode("latin-1"))


def test_newsgroups(tmp_path, small):
    posts(tmp_path / "20_newsgroups", 20, "Body")
    small("20newsgroups", (30, 4, 6))
    splits = load("20newsgroups", tmp_path)
    assert splits.sizes == (30, 4, 6)
    assert splits.class_names == ("alt.a", "sci.b")
    assert all(text.startswith("Body") and "caf\xe9" in text for text in splits.train.texts)
    assert np.bincount(splits.test.labels).tolist() == [3, 3]


def test_newsgroups_by_date(tmp_path, small):
    for half, n in (("train", 10), ("test", 4)):
        posts(tmp_path / "20newsgroups" / f"20news-bydate-{half}", n, half)
    small("20newsgroups-bydate", (16, 4, 8))
    splits = load("20newsgroups-bydate", tmp_path)
    assert splits.sizes == (16, 4, 8)
    assert all(text.startswith("test") for text in splits.test.texts)


def test_sst_damage_is_named_with_its_line(tmp_path):
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.txt").write_text("(3 (2 a) (3 b))\n(1 (2 c)\n")
    refused(r"train.txt .* line 2", load, "sst-fine", tmp_path)


def test_real_sst(treebank):
    fine, binary = load("sst-fine", treebank), load("sst-binary", treebank)
    assert fine.sizes == DATASETS["sst-fine"].sizes
    assert binary.sizes == DATASETS["sst-binary"].sizes
    assert np.bincount(fine.train.labels).tolist() == [1092, 2218, 1624, 2322, 1288]  # as published
    first = binary.train.trees[0]
    assert first.text.startswith("The Rock is destined to be the 21st Century 's new")
    assert set(np.unique(first.labels)) <= {-100, 0, 1}
    assert first.labels[-1] == binary.train.labels[0] == 1
    assert sum(count_duplicates(fine).values()) == 4  # two sentences of dev and two of test are also in train


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "fashion"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_the_error_for_missing_files_gives_their_layout(tmp_path, name, from_environment, monkeypatch):
    monkeypatch.setenv("DOUBLEHEAD_DATA", str(tmp_path if from_environment else tmp_path / "somewhere"))
    with pytest.raises(FileNotFoundError) as raised:
        load(name, None if from_environment else tmp_path)
    for part in (name, f"{tmp_path}:", DATASETS[name].layout, f"doublehead data get {name}"):
        assert part in str(raised.value)


@pytest.fixture(scope="module")
def shipped():
    return fashion_subset()


def test_fashion_sizes_and_balance(shipped):
    assert shipped.sizes == (8_500, 2_500, 6_000)
    for part in shipped.parts.values():
        counts = np.bincount(part.labels)
        assert counts.tolist() == [len(part) // 10] * 10
        assert part.images.dtype == np.uint8
        assert part.images.shape[1:] == (28, 28, 1)
    assert shipped.n_classes == 10


def test_the_asset_is_small_and_has_its_licence():
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) < 7_000_000
    assert "Copyright (c) 2017 Zalando SE" in (ASSETS / "LICENSE-fashion-mnist.txt").read_text()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_images_are_the_originals(shipped):
    with np.load(ASSETS / ASSET) as arrays:
        rows = np.split(arrays["rows"], [8_500, 11_000])
    for part, drawn, half in zip(shipped.parts.values(), rows, ("train", "train", "t10k")):
        pixels = gzip.decompress((DEBIAN / f"{half}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((DEBIAN / f"{half}-labels-idx1-ubyte.gz").read_bytes())[8:]
        images = np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1)
        assert (images[drawn] == part.images).all()
        assert (np.frombuffer(labels, np.uint8)[drawn] == part.labels).all()


def test_a_damaged_asset_is_named(tmp_path, monkeypatch):
    content = bytearray((ASSETS / ASSET).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / ASSET).write_bytes(content)
    monkeypatch.setattr(catalog, "ASSETS", tmp_path)
    refused("fashion_mnist_subset.npz", fashion_subset)
