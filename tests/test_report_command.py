"""`doublehead report`: from files and run folders to a page, or one sentence that says what is wrong."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import call
from doublehead import Predictions, evaluate, metrics
from doublehead.calibrators import Temperature
from doublehead.files import read_predictions
from samples import overconfident

pytest.importorskip("jinja2")


def made(sharpness: float = 2.0, n: int = 240, seed: int = 0) -> Predictions:
    return overconfident(n, 3, sharpness, spread=3.0, seed=seed, dtype=torch.float64)


def write_csv(path: Path, p: Predictions, columns: list[str], scores: Any) -> Path:
    lines = [",".join(["label", *columns])]
    lines += [",".join([str(int(y)), *(f"{v:.17g}" for v in row)]) for y, row in zip(p.labels, scores)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    return re.sub(r"\s+", " ", call("report", "--force", *arguments, code=code).output)


def text_of(page: str) -> str:
    return Path(page).read_text(encoding="utf-8")


def methods_of(page: str) -> dict[str, dict[str, float]]:
    (text,) = re.findall(r'id="data">(.*?)</script>', text_of(page), re.DOTALL)
    return {method["name"]: method["values"] for method in json.loads(text)["methods"]}


def test_npz_to_the_default_page(folder: Path) -> None:
    p = made()
    p.save(folder / "main.npz")
    said = run("main.npz", "--title", "Mine & yours")
    assert "“main”: " in said
    assert "Wrote report.html" in said
    assert methods_of("report.html")["main"]["ece"] == pytest.approx(metrics.ece(p))
    assert "<title>Mine &amp; yours</title>" in text_of("report.html")


def test_logits_before_and_probs_after_from_csv(folder: Path) -> None:
    before, after = made(), made(1.0)
    write_csv(folder / "test.csv", before, ["logit_cat", "logit_dog", "logit_emu"], before.logits)
    write_csv(folder / "fixed.csv", after, ["prob_cat", "prob_dog", "prob_emu"], after.probs)
    run("before=test.csv", "after=probs:fixed.csv", "--logits", "-o", "page.html")
    found = methods_of("page.html")
    assert list(found) == ["before", "after"]
    assert found["before"]["nll"] == pytest.approx(metrics.nll(before))
    assert found["after"]["nll"] == pytest.approx(metrics.nll(after))
    for name in ("cat", "dog", "emu"):
        assert f"<bdi>{name}</bdi>" in text_of("page.html")


def test_scores_of_an_unknown_or_another_kind_are_refused(folder: Path) -> None:
    p = made()
    write_csv(folder / "fixed.csv", p, ["prob_0", "prob_1", "prob_2"], p.probs)
    write_csv(folder / "test.csv", p, ["s0", "s1", "s2"], p.logits)
    said = run("fixed.csv", "--logits", code=2)
    assert "fixed.csv has columns such as 'prob_0', but --logits was given" in said
    assert "probs:FILE" in said
    assert "say whether the scores are logits or probabilities" in run("test.csv", code=2)
    assert not (folder / "report.html").exists()
    run("probs:fixed.csv", "--logits")


def test_run_folder_gives_its_test_outputs_temperature_and_shift(folder: Path) -> None:
    main, calib, head = made(), made(seed=1), made(1.0)
    inside = folder / "run" / "predictions"
    for name, p in {"train-main": calib, "calib-main": calib, "test-main": main, "test-head": head}.items():
        p.save(inside / f"{name}.npz")
    shift = {"noise:5": {"main": {"accuracy": 0.5, "ece": 0.25, "auroc": 0.875, "mean_confidence": 0.75}}}
    (folder / "run" / "results.json").write_text(json.dumps({"shift": shift}))
    run("run")
    found = methods_of("report.html")
    assert list(found) == ["main", "main+T", "head"]
    scaled = Temperature().fit(calib).calibrate(main)
    assert found["main+T"]["nll"] == pytest.approx(metrics.nll(scaled))
    page = text_of("report.html")
    assert "noise:5" in page
    assert "<td>87.5</td>" in page


def test_folder_of_npz_and_names_that_collide(folder: Path) -> None:
    for place in ("a", "b"):
        made().save(folder / place / "x.npz")
        made(1.0).save(folder / place / "y.npz")
    run("a")
    assert list(methods_of("report.html")) == ["x", "y"]
    assert "a/x.npz has no column 'site', it has" in run("a", "--by", "site", code=2)
    run("a", "b")
    assert list(methods_of("report.html")) == ["a/x", "a/y", "b/x", "b/y"]
    run("a/x.npz", "b/x.npz", "third=b/y.npz")
    assert list(methods_of("report.html")) == ["x", "b/x", "third"]
    said = run(*["a/x.npz"] * 4, code=2)
    assert "two inputs have the name 'x': give them different ones as NAME=FILE" in said
    assert "two inputs have the name 'm'" in run("m=a/x.npz", "m=b/x.npz", code=2)
    (folder / "one.csv").write_text("label,p_0,p_1,p_2\n" + "0,0.5,0.25,0.25\n" * 20)
    made().save(folder / "one.npz")
    run("one.csv", "one.npz")
    assert list(methods_of("report.html")) == ["one", "one.npz"]


def test_one_set_of_an_npz_that_holds_several(folder: Path) -> None:
    p, q = made(), made(1.0)
    sets = {"val_logits": p.logits, "val_labels": p.labels, "test_logits": q.logits, "test_labels": q.labels}
    np.savez(folder / "both.npz", **sets)
    run("both.npz:val", "both.npz:test")
    found = methods_of("report.html")
    assert list(found) == ["both:val", "both:test"]
    assert found["both:test"]["nll"] == pytest.approx(metrics.nll(q))


def audited_csv(path: Path, n: int = 900) -> Path:
    """Overconfident in the south and ever more so over the months of a year."""
    p = made(1.0, n)
    lines = ["image,taken,site,label,prob_cat,prob_dog,prob_emu"]
    for i, (row, label) in enumerate(zip(p.probs.tolist(), p.labels.tolist())):
        site, month = ("south", "north")[i % 2], 1 + 12 * i // n
        wrong = i % 2 == 0 and i % 24 < 2 * month - 2  # labels that the model cannot know
        name = ("cat", "dog", "emu")[(label + wrong) % 3]
        lines.append(f"img{i}.png,2024-{month:02d}-11,{site},{name},{','.join(f'{v:.6f}' for v in row)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_groups_times_errors_and_provenance(folder: Path) -> None:
    file = audited_csv(folder / "test.csv")
    run("test.csv", "--by", "site", "--time", "taken")
    page = text_of("report.html")
    assert "<bdi>south</bdi>" in page
    assert "1 of 2 groups deviates by more than chance explains" in page
    assert "changes over time by more than chance" in re.sub(r"\s+", " ", page)
    assert "<bdi>2024-12-11</bdi>" in page
    summary = evaluate(str(file), by="site")
    assert summary.groups_off == ["south"]
    p = read_predictions(file).load()
    wrong = (~p.correct).nonzero()[:, 0]
    worst = int(wrong[p.confidence[wrong].argmax()])
    (errors,) = re.findall(r"The most confident errors.*?</table>", page, re.DOTALL)
    first = re.findall(r"<td.*?</td>", errors)[:6]
    assert f"<bdi>img{worst}.png</bdi>" in first[5]
    assert f"<bdi>{('south', 'north')[worst % 2]}</bdi>" in first[4]
    assert first[0] == f"<td>{worst + 1}</td>"
    assert hashlib.sha256(file.read_bytes()).hexdigest() in page
    assert "time in &#39;taken&#39;" not in page
    assert "must be numbers or dates" in run("test.csv", "--time", "site", code=2)


def test_several_labels_are_told_apart(folder: Path) -> None:
    rows = [f"{i % 2},{i % 3 == 0:d},0.{3 + i % 5},0.{1 + i % 7},{'ns'[i // 30]}" for i in range(60)]
    (folder / "several.csv").write_text("\n".join(["y_red,y_new,p_red,p_new,site", *rows]) + "\n")
    for options, headings in ([], 0), (["--by", "site"], 1):
        run("several.csv", "--label", "y_*", *options)
        page = text_of("report.html")
        assert "60 samples, 2 labels each" in page
        (errors,) = re.findall(r"The most confident errors.*?</table>", page, re.DOTALL)
        assert {"y_red", "y_new"} <= set(re.findall(r"<bdi>(\w+)</bdi>", errors))
        assert errors.count('class="name">Label</th>') == 1
        assert errors.count(">Group</th>") == headings


def test_confidences_alone_make_a_page(folder: Path) -> None:
    rows = [f"{int(i % 10 < 7)},{0.7 + 0.01 * (i % 5)}" for i in range(400)]
    (folder / "top.csv").write_text("\n".join(["correct,confidence", *rows]) + "\n")
    said = run("top.csv")
    assert "“top”: " in said
    (folder / "full.csv").write_text("label,p_0,p_1\n" + "0,0.75,0.25\n" * 400)
    assert "only the confidence of “top” is known. “full”: " in run("full.csv", "top.csv", "-o", "both.html")
    page = text_of("report.html")
    assert "400 samples" in page
    assert 'id="classes"' not in page
    assert 'id="errors"' in page


def test_alarm_of_new_features(folder: Path) -> None:
    made().save(folder / "main.npz")
    rng = np.random.default_rng(0)
    np.save("calib.npy", rng.normal(size=(500, 5)))
    np.save("new.npy", np.concatenate([rng.normal(size=(256, 5)), rng.normal(2, 1, (256, 5))]))
    said = run("main.npz", "--features", "calib.npy", "new.npy")
    since = re.search(r"since sample (\d+) of 512", said)
    assert 256 < int(since[1]) <= 320
    page = text_of("report.html")
    assert since[0] in page
    (table,) = re.findall(r'id="alarm".*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert re.findall(r"<tr><td>(\d+)</td><td>4</td><td>(\w+)", table) == [("256", "no"), ("512", "yes")]
    header = ",".join(map(str, range(5)))  # as pandas names columns
    np.savetxt("new.csv.gz", np.load("new.npy"), delimiter=",", header=header, comments="")
    assert since[0] in run("main.npz", "--features", "calib.npy", "new.csv.gz")
    np.save("odd.npy", np.array([[1.0, 2, 3, 4, np.nan]]))
    np.save("narrow.npy", np.zeros((200, 4)))
    for name, wanted in (
        ("odd", "finite numbers, got nan or inf in row 1"),
        ("narrow", "5 features .* got 4"),
    ):
        assert re.search(
            f"{name}.npy must .*{wanted}", run("main.npz", "--features", "calib.npy", f"{name}.npy", code=2)
        )
    run("main.npz")
    assert 'id="alarm"' not in text_of("report.html")


def test_shift_files_and_folders(folder: Path) -> None:
    made().save(folder / "main.npz")
    made(seed=3).save(folder / "noisy.npz")
    run("main.npz", "--shift", "noise=noisy.npz")
    assert "<bdi>noise</bdi>" in text_of("report.html")
    made(1.0).save(folder / "head.npz")
    made(seed=4).save(folder / "blur" / "main.npz")
    run("main.npz", "head.npz", "--shift", "blur=blur")
    assert "<bdi>blur</bdi>" in text_of("report.html")
    said = run("main.npz", "head.npz", "--shift", "noise=noisy.npz", code=2)
    assert "got one file: with several methods give a folder" in said
    made().save(folder / "wrong" / "other.npz")
    made().save(folder / "wrong" / "another.npz")
    said = run("main.npz", "head.npz", "--shift", "blur=wrong", code=2)
    assert "wrong must hold predictions of main, head under these names, got another, other" in said


def test_class_names_from_a_file(folder: Path) -> None:
    made().save(folder / "main.npz")
    for encoding in ("utf-8", "utf-8-sig"):  # with a byte order mark
        (folder / "names.txt").write_text("<b>ant</b>\nbee\ncow\n", encoding=encoding)
        run("main.npz", "--classes", "names.txt")
        assert "<bdi>&lt;b&gt;ant&lt;/b&gt;</bdi>" in text_of("report.html")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.csv", "--logits"], "nowhere.csv does not exist"),
        (["main.npz", "-o", "page.txt"], "--output must end in .html, got 'page.txt'"),
        (["main.npz", "-o", "missing/page.html"], "missing/page.html cannot be written"),
        (["broken"], "broken/predictions/test-main.npz"),
        (["main.npz", "--classes", "nowhere.txt"], "nowhere.txt"),
        (["main.npz", "--classes", "two.txt"], "classes must be 3 names, one per class of 'main', got 2"),
        (["main.npz", "--classes", "binary.txt"], "binary.txt must be a text file in UTF-8"),
        (["main.npz", "--shift", "main.npz"], "--shift must read NAME=FILE, got 'main.npz'"),
        (["main.npz", "--features", "none.npy", "none.npy"], "none.npy does not exist"),
        ([f"m{i}=main.npz" for i in range(13)], "must hold 1 to 12 methods, got 13"),
    ],
)
def test_bad_input_is_one_sentence_and_no_file(folder: Path, arguments: Any, sentence: str) -> None:
    made(n=40).save(folder / "main.npz")
    (folder / "two.txt").write_text("ant\nbee\n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "broken" / "predictions").mkdir(parents=True)
    (folder / "broken" / "predictions" / "test-main.npz").write_bytes(b"PK half a file")
    before = sorted(folder.rglob("*"))
    said = run(*arguments, code=2)
    assert said.startswith("Error: ")
    assert sentence in said
    assert "Traceback" not in said
    assert sorted(folder.rglob("*")) == before


def test_classes_in_another_order_are_put_in_that_of_the_first_file(folder: Path) -> None:
    p, q = made(), made(1.0)
    names = np.array(["cat", "dog", "emu"])
    for file, one, order in (("a.csv", p, [0, 1, 2]), ("b.csv", q, [2, 0, 1])):
        write_csv(folder / file, one, names[order].tolist(), one.probs[:, order])
        lines = (folder / file).read_text().splitlines()
        rows = [f"{names[int(line[0])]}{line[1:]}" for line in lines[1:]]
        (folder / file).write_text("\n".join([lines[0], *rows]) + "\n")
    run("a.csv", "b.csv")
    found = methods_of("report.html")
    assert found["b"]["nll"] == pytest.approx(metrics.nll(q))
    page = text_of("report.html")
    assert "different samples" not in page
    (classes,) = re.findall(r"Classes of “<bdi>b</bdi>”.*?</table>", page, re.DOTALL)
    counts = dict(re.findall(r"<bdi>(\w+)</bdi></td><td>(\d+)</td>", classes))
    assert counts == {name: str(int((q.predicted == k).sum())) for k, name in enumerate(names)}
    sets = {"probs": q.probs[:, [2, 0, 1]], "labels": (q.labels + 1) % 3, "classes": names[[2, 0, 1]]}
    np.savez(folder / "c.npz", **sets)
    assert "the classes of c.npz must be in the order of those of a.csv" in run("a.csv", "c.npz", code=2)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_the_terminal_cannot_show_is_escaped(folder: Path, encoding: str) -> None:
    made().save(folder / "main.npz")
    command = [sys.executable, "-m", "doublehead", "report", "m=main.npz", "-o", "page\u5317.html"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert ("page\u5317" if encoding == "utf-8" else "page\\u5317") in result.stdout.decode(encoding)
