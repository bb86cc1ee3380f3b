"""Texts, trees and image files train like images in memory; what does not fit together says so."""

import csv
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import HeadSpec, Predictions
from doublehead.calibration_data import fold_of, unpack
from doublehead.cli.export import open_run
from doublehead.data import load
from doublehead.data.trees import TreeBatch, parse_tree
from doublehead.training.config import Config
from doublehead.training.loop import train
from doublehead.training.run import Inputs
from doublehead.training.run_folder import RunFolder
from tiny_networks import tiny_bert
from training_helpers import fashion, small

pytest.importorskip("safetensors")
pytestmark = pytest.mark.filterwarnings("ignore:.* calibration samples are little data:UserWarning")
WORDS = {"game": ("win", "team", "ball"), "law": ("court", "judge", "jury"), "food": ("soup", "rice", "salt")}
GRADES = ("awful", "poor", "film", "good", "superb")
CPU = torch.device("cpu")


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A CSV of 240 texts about three things."""
    draw, path = random.Random(0), tmp_path / "texts.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for i in range(240):
            topic = [*WORDS][i % 3]
            text = [draw.choice([*WORDS[topic], "the", "a", "of"]) for _ in range(draw.randint(3, 9))]
            rows.writerow([" ".join(text), topic])
    return f"table:{path}"


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """SST's three files: good and bad words under binary trees, every node with a grade."""
    draw = random.Random(0)

    def tree(grade: int, depth: int) -> str:
        if depth == 0:
            return f"({grade} {GRADES[grade]})"
        return f"({grade} {tree(2, 0)} {tree(grade, depth - 1)})"

    (tmp_path / "sst").mkdir()
    for name, n in (("train", 60), ("dev", 30), ("test", 20)):
        lines = [tree(i % 5, draw.randint(0, 4)) for i in range(n)]
        (tmp_path / "sst" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def go(config: Config, folder: Path, **options: Any) -> dict[str, Any]:
    return train(config, RunFolder(folder), accelerator="cpu", **options)


def words(**settings: Any) -> Config:
    steps = {"epochs": 1, "optimizer": "adam", "lr": 0.003}
    steps |= {"batch_size": 20, "calib_batch_size": 20, "every": 2}
    heads = {"a": HeadSpec(), "b": HeadSpec(kind="mlp", reads="logits")}
    usual = {"embeddings": "random:16", "warmup": 0.0, "heads": heads, "auto": True}
    return Config(**{**steps, **usual, **settings})


@pytest.mark.parametrize("model", ["gp_cnn", "textcnn"])
def test_texts_of_a_table(model: str, table: str, tmp_path: Path) -> None:
    results = go(words(data=table, model=model, epochs=8), tmp_path / "run")
    assert results["sizes"] == [173, 19, 48]
    assert results["outputs"]["main"]["before"]["accuracy"] > 0.8  # three topics of three words each
    assert set(results["outputs"]) == {"main", "a", "b", "auto"}


@pytest.mark.parametrize(("data", "model", "k"), [("sst-fine", "tree_lstm", 5), ("sst-binary", "textcnn", 2)])
def test_trees(data: str, model: str, k: int, trees: Path, tmp_path: Path) -> None:
    results = go(words(data=data, model=model, batch_size=10), tmp_path / "run", root=str(trees))
    p = Predictions.load(tmp_path / "run/predictions/test-a.npz")
    assert p.n_classes == k
    assert len(p) == results["sizes"][2] == (20 if k == 5 else 16)  # of a tree its root is the answer


def test_word_pieces_of_trees(trees: Path, tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    models = pytest.importorskip("tokenizers").models
    rows = {"[PAD]": 0, "[UNK]": 1} | {word: 103 + i for i, word in enumerate(GRADES)}
    tokenizer = pytest.importorskip("tokenizers").Tokenizer(models.WordLevel(rows, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = words(data="sst-fine", model="minilm", model_options={"weights": str(tmp_path)}, max_words=30)
    results = go(config, tmp_path / "run", root=str(trees))
    assert set(results["outputs"]) == {"main", "a", "b", "auto"}
    found = open_run(tmp_path / "run", "auto", trees)
    assert found.inputs.words == ()  # its tokenizer has them
    again = found.model(found.example).detach()
    saved = Predictions.load(tmp_path / "run/predictions/test-auto.npz").logits[: len(again)]
    torch.testing.assert_close(again.softmax(1), saved.softmax(1), rtol=0, atol=2e-3)  # saved as float16


@pytest.mark.parametrize("model", ["gp_cnn", "tree_lstm"])
def test_trees_are_learned_by_phrase_or_by_sentence(model: str, trees: Path) -> None:
    splits = load("sst-fine", trees)
    sizes = {}
    for phrases in (True, False):
        inputs = Inputs(words(data="sst-fine", model=model, phrases=phrases), CPU, splits, None)
        parts = inputs.train, inputs.whole(splits.train)
        sizes[phrases] = tuple(sum(len(y) for _, y in part) for part in parts)
    every = len(splits.train.phrases()) if model == "gp_cnn" else sum(map(len, splits.train.trees))
    assert sizes == {True: (every - every % 20 if model == "gp_cnn" else every, 60), False: (60, 60)}


def test_folds_of_trees_follow_their_words_and_structure() -> None:
    shapes = ["(1 (2 a) (3 (2 b) (2 c)))", "(1 (3 (2 a) (2 b)) (2 c))", "(1 (3 (2 b) (2 a)) (2 c))"]
    shapes += ["(0 a)", "(4 b)"]
    lookup = {"a": 2, "b": 3, "c": 4}.__getitem__
    trees = [parse_tree(shape).index(lookup) for shape in shapes]
    keys = TreeBatch.of(trees).sample_keys
    assert len(set(keys.tolist())) == len(trees)
    other_labels = parse_tree(shapes[0].replace("(3 ", "(0 ")).index(lookup)
    again = TreeBatch.of([trees[3], other_labels, trees[1]])
    assert torch.equal(again.sample_keys, keys[[3, 0, 1]])  # whatever the batch and the labels
    number = lambda word: int(word) if word != "a" else 2  # noqa: E731
    words = [parse_tree(f"(1 (2 a) (2 {i}))").index(number) for i in range(500)]
    folds = fold_of(unpack((TreeBatch.of(words), torch.zeros(500, dtype=torch.long)), CPU))
    assert (folds.bincount(minlength=5) > 60).all()  # about a hundred in each


def test_image_files(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    draw = np.random.RandomState(0)
    for split, n in (("train", 12), ("calib", 6), ("test", 5)):
        for place, name in enumerate(("red", "green")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                pixels = draw.randint(0, 100, (24, 20 + i, 3), np.uint8)
                pixels[..., place] += 120
                pillow.fromarray(pixels).save(folder / f"{i}.png")
    config = small(
        data=f"folder:{tmp_path / 'images'}", model="small_cnn", image_size=16, batch_size=8, epochs=8, workers=1,
        heads={"a": HeadSpec()}, calib_augment="noise", shift=("contrast:2",), augment="crop-flip",
    )  # fmt: skip
    results = go(config, tmp_path / "run")
    assert results["sizes"] == [24, 12, 10]
    assert results["shift"]["contrast:2"]["a"]["accuracy"] > 0.8
    labels = Predictions.load(tmp_path / "run/predictions/test-main.npz").labels
    assert labels.tolist() == [0] * 5 + [1] * 5  # green, red
    example = open_run(tmp_path / "run", "a").example  # pixels, not normalised ones
    assert 0 <= example.min() < example.max() <= 1


def test_two_processes_see_what_one_sees() -> None:
    config = small(auto=True, augment="crop-flip", batch_size=40, calib_batch_size=30)
    one = Inputs(config, CPU, fashion(), None)
    both = [Inputs(config, CPU, fashion(), None, rank, 2) for rank in range(2)]
    for whole, left, right in zip(one.train, both[0].train, both[1].train):
        torch.testing.assert_close(torch.cat([left[0], right[0]]), whole[0])
        assert torch.equal(torch.cat([left[1], right[1]]), whole[1])
    whole, left, right = (next(iter(inputs.make_calib())) for inputs in (one, *both))
    torch.testing.assert_close(torch.cat([left[0], right[0]]), whole[0])  # calibration data is dealt out too
    assert len(left[1]) == 15
    test = [torch.cat([y for _, y in inputs.make_eval(fashion().test)]) for inputs in both]
    assert torch.equal(torch.cat(test), torch.from_numpy(fashion().test.labels))


def test_cut_splits_keep_the_shares_of_the_classes() -> None:
    order = np.argsort(fashion().train.labels, kind="stable")
    sorted_by_class = replace(fashion(), train=fashion().train.take(order))
    inputs = Inputs(small(n_train=120, n_test=1000), CPU, sorted_by_class, None)
    assert inputs.splits.sizes == (120, 240, 150)
    assert inputs.splits.test is fashion().test
    halves = np.bincount(inputs.splits.train.labels, minlength=10) - np.bincount(fashion().train.labels) / 2
    assert (abs(halves) <= 0.5).all()


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        ("fashion", {"model": "gp_cnn"}, "must read images for fashion, got gp_cnn, which reads words"),
        ("fashion", {"batch_size": 45}, "batch_size must be a multiple of the 2 processes, got 45"),
        ("fashion", {"batch_size": 1000}, "batch_size must be at most the 240 samples"),
        ("table", {"model": "small_cnn"}, "words or word pieces for table:.* small_cnn, which reads images"),
        ("table", {"model": "tree_lstm"}, "words or word pieces for table:.* tree_lstm, which reads trees"),
        ("table", {"mixup": 0.2}, "mixup is for images, table:.* holds words"),
        ("table", {"calib_augment": "noise"}, "calib_augment is for images, table:.* holds words"),
        ("table", {"auto": True, "guards": ("shifts",)}, "guarded, are for images, table:.* holds words"),
        ("table", {"embeddings": "random:few"}, "must be glove, a file or random:SIZE, got 'random:few'"),
    ],
)
def test_bad_settings(data: str, settings: dict[str, Any], said: str, table: str) -> None:
    usual = small() if data == "fashion" else words(data=table, model="textcnn")
    splits = fashion() if data == "fashion" else None
    with pytest.raises(ValueError, match=said):
        Inputs(replace(usual, **settings), CPU, splits, None, 0, 2)


def test_a_run_that_cannot_start_leaves_no_folder(table: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shift must name a data set for words, got 'gaussian_noise:1'"):
        go(words(data=table, model="textcnn", shift=("gaussian_noise:1",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
