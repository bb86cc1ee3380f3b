"""Files as people have them: other layouts, encodings and formats give the predictions of a plain CSV."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doublehead.files import TableError, formats, read_predictions
from doublehead.outcomes import Outcomes

pa = pytest.importorskip("pyarrow")

PROBS = [[0.75, 0.25], [0.125, 0.875], [0.5, 0.5]]
LABELS = [0, 1, 1]

TEXTS = {
    "decimal commas": "label;a;b\n0;0,75;0,25\n1;0,125;0,875\n1;0,5;0,5\n",
    "decimal commas, no header": "0;0,75;0,25\n1;0,125;0,875\n1;0,5;0,5\n",
    "spaces": "label, a, b\na, 0.75, 0.25\nb, 0.125, 0.875\nb, 0.5, 0.5\n",
    "no header": "0,0.75,0.25\n1,0.125,0.875\n1,0.5,0.5\n",
    "no header, label last": "0.75,0.25,0\n0.125,0.875,1\n0.5,0.5,1\n",
    "bars": "label|a|b\na|0.75|0.25\nb|0.125|0.875\nb|0.5|0.5\n",
    "blanks": "label a b\na 0.75 0.25\nb 0.125 0.875\nb 0.5 0.5\n",
    "Excel's first line": "sep=;\nlabel;a;b\na;0,75;0,25\nb;0,125;0,875\nb;0,5;0,5\n",
    "blank lines first": "\n\nlabel,a,b\na,0.75,0.25\nb,0.125,0.875\nb,0.5,0.5\n",
    "R's row names": '"label" "a" "b"\n"1" "a" 0.75 0.25\n"2" "b" 0.125 0.875\n"3" "b" 0.5 0.5\n',
    "other case": "label,Cat,dog\nCAT ,0.75,0.25\nDog,0.125,0.875\ndog,0.5,0.5\n",
    "prefixes": "label,net_a,net_b\na,0.75,0.25\nb,0.125,0.875\nb,0.5,0.5\n",
    "numbers as names": "label,prob_1,prob_7\n1,0.75,0.25\n7,0.125,0.875\n7,0.5,0.5\n",
    "negative numbers": "label,-1,1\n-1,0.75,0.25\n1,0.125,0.875\n1,0.5,0.5\n",
    "numbers in disorder": "label,40,7\n40,0.75,0.25\n7,0.125,0.875\n7,0.5,0.5\n",
    "one probability": "label,prob\nFalse,0.25\nTrue,0.875\nTrue,0.5\n",
    "yes and no": "label,p\nNo,0.25\nYes,0.875\nYes,0.5\n",
    "one named probability": "y_true,p_spam\nham,0.25\nspam,0.875\nspam,0.5\n",
    "one-hot": "y_a,y_b,p_a,p_b\n1,0,0.75,0.25\n0,1,0.125,0.875\n0,1,0.5,0.5\n",
    "ids": "row_id,gt,prob_a,prob_b\n7,a,0.75,0.25\n8,b,0.125,0.875\n9,b,0.5,0.5\n",
    "long": "id,label,class,prob\n"
    + "".join(
        f"x{i},{'ab'[y]},{c},{p[k]}\n"
        for i, (y, p) in enumerate(zip(LABELS, PROBS))
        for k, c in enumerate("ab")
    ),
    "long, mixed": "sample,class,prob,gt\nu,b,0.25,a\nt,a,0.125,b\nu,a,0.75,a\nt,b,0.875,b\ns,a,0.5,b\ns,b,0.5,b\n",
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_layouts_without_a_flag(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TEXTS[case])
    label = "y_*" if case == "one-hot" else None
    p = read_predictions(tmp_path / "a.csv", label=label).load()
    assert p.probs.tolist() == PROBS
    assert p.labels.tolist() == LABELS


def test_labels_of_several_belong_to_the_scores_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y_b,y_a,p_a,p_b\n1,0,0.75,0.25\n1,1,0.5,0.5\n")
    table = read_predictions(tmp_path / "a.csv", label="y_*", kind="probs")
    assert table.layout.labels == ("y_a", "y_b")
    assert table.load().labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("label", ["gt", "actual", "category", "True Class", "y_true", "Ground Truth"])
@pytest.mark.parametrize(
    "scores", ["{}_prob", "softmax_{}", "Prob({})", "prob_{}", "P(y={})", "{} probability"]
)
def test_names_that_are_guessed(label: str, scores: str, tmp_path: Path) -> None:
    header = ",".join([label, scores.format("a"), "age", scores.format("b")])
    rows = [f"{'ab'[y]},{p[0]},31.5,{p[1]}" for y, p in zip(LABELS, PROBS)]
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]) + "\n")
    table = read_predictions(tmp_path / "a.csv")
    assert table.load().probs.tolist() == PROBS
    assert table.layout.classes == ("a", "b")


def plain() -> bytes:
    rows = [f"{y},{p[0]},{p[1]}" for y, p in zip(LABELS, PROBS)]
    return "\n".join(["label,prob_0,prob_1", *rows, ""]).encode()


def as_table() -> Any:
    columns = {"label": LABELS, "prob_0": [p[0] for p in PROBS], "prob_1": [p[1] for p in PROBS]}
    return pa.table(columns)


def as_json_lines(lists: bool) -> bytes:
    rows: list[dict[str, Any]] = [
        {"label": y, **({"probs": p} if lists else {"prob_0": p[0], "prob_1": p[1]})}
        for y, p in zip(LABELS, PROBS)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_arrow() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, as_table().schema) as writer:
        writer.write_table(as_table(), max_chunksize=2)
    return sink.getvalue()


def as_npz(**arrays: Any) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, **arrays)
    return sink.getvalue()


def as_pipeline() -> bytes:
    """A line of {"truth": "b", "scores": [{"label": "b", "score": 0.875}, ...]} per sample, the likeliest first."""
    lines = []
    for y, p in zip(LABELS, PROBS):
        pairs = sorted(({"label": c, "score": s} for c, s in zip("ab", p)), key=lambda pair: -pair["score"])
        lines.append(json.dumps({"truth": "ab"[y], "scores": pairs}) + "\n")
    return "".join(lines).encode()


CONTENTS = {
    "table.txt": plain,
    "old mac.csv": lambda: plain().replace(b"\n", b"\r"),
    "list.json": lambda: b"[" + b",".join(as_json_lines(False).splitlines()) + b"]",
    "nested.jsonl": lambda: b"".join(
        json.dumps({"label": "ab"[y], "out": {"id": 1, "probs": dict(zip("ab", p))}}).encode() + b"\n"
        for y, p in zip(LABELS, PROBS)
    ),
    "pipeline.jsonl": as_pipeline,
    "columns.npz": lambda: as_npz(probs=PROBS, labels=np.array(LABELS)[:, None]),
    "one-hot.npz": lambda: as_npz(probs=PROBS, labels=np.eye(2)[LABELS]),
    "classes.npz": lambda: as_npz(probs=PROBS, labels=np.array(list("abb")), classes=np.array(["a", "b"])),
    "gzip by content.csv": lambda: gzip.compress(plain()),
    "utf-16.csv": lambda: plain().decode().encode("utf-16"),
    "big endian.csv": lambda: b"\xfe\xff" + plain().decode().encode("utf-16-be"),
    "windows.csv": lambda: plain().replace(b"\n", b"\r\n"),
    "a.jsonl": lambda: as_json_lines(False),
    "lists.ndjson": lambda: as_json_lines(True),
    "gzip by content.jsonl": lambda: gzip.compress(as_json_lines(False)),
    "a.jsonl.gz": lambda: gzip.compress(as_json_lines(True)),
    "a.arrow": as_arrow,
    "a.feather": as_arrow,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_formats_and_encodings(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTENTS[name]())
    p = read_predictions(tmp_path / name).load()
    assert p.probs.tolist() == PROBS
    assert p.labels.tolist() == LABELS


@pytest.mark.parametrize(
    "content", [plain, as_arrow, lambda: as_json_lines(True)], ids=["csv", "arrow", "jsonl"]
)
def test_standard_input(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content())))
    assert read_predictions("-").load().probs.tolist() == PROBS


TOP_LABEL = {
    "pipeline": "label,score,true_label\na,0.75,a\na,0.5,b\nb,0.875,b\n",
    "predicted": "label,predicted,confidence\na,a,0.75\nb,a,0.5\nb,b,0.875\n",
    "numbers": "y_true,y_pred,conf\n1,1,0.75\n2,1.0,0.5\n2,2,0.875\n",
    "correct": "correct,confidence\n1,0.75\n0,0.5\n1,0.875\n",
    "words": "confidence,is_correct\n0.75,true\n0.5,False\n0.875,TRUE\n",
    "top-k": "label,class_1,prob_1,class_2,prob_2\na,a,0.75,b,0.25\nb,a,0.5,b,0.5\nb,b,0.875,a,0.125\n",
    "top1": "label,top1_class,top1_prob,top2_class,top2_prob\na,a,0.75,b,0.25\nb,a,0.5,b,0.5\nb,b,0.875,a,0.125\n",
    "ranked": "label,pred_1,confidence_1,pred_2,confidence_2\na,a,0.75,b,0.25\nb,a,0.5,b,0.5\nb,b,0.875,a,0.125\n",
}


@pytest.mark.parametrize("case", TOP_LABEL)
def test_the_confidence_in_the_predicted_class_alone(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TOP_LABEL[case])
    table = read_predictions(tmp_path / "a.csv")
    (chunk,) = table.chunks()
    assert isinstance(chunk.predictions, Outcomes)
    assert chunk.predictions.confidence.tolist() == [0.75, 0.5, 0.875]
    assert chunk.predictions.correct.tolist() == [True, False, True]
    summary = table.tally().summary()
    assert summary.values["accuracy"] == pytest.approx(2 / 3)
    assert "nll" not in summary.metrics
    assert "3 predictions" in str(summary)
    with pytest.raises(TableError, match="a score for every class is needed"):
        table.load()


def test_groups_by_the_predicted_class_and_not_by_whether_it_is_right(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TOP_LABEL["predicted"])
    groups = read_predictions(tmp_path / "a.csv", by="predicted").tally().groups
    assert {name: tally.n for name, tally in groups.items()} == {"a": 2, "b": 1}
    (tmp_path / "a.csv").write_text(TOP_LABEL["correct"])
    with pytest.raises(TableError, match="cannot be selected or grouped by their label .'correct'"):
        read_predictions(tmp_path / "a.csv", by="correct")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("correct,confidence\n1,75.0\n0,50.5\n", "row 1 must hold a confidence in 0..1, got 75"),
        ("correct,confidence\n2,0.75\n", "must say whether the answer was right"),
        ("label,predicted,confidence\na,,0.75\n", "column 'predicted', row 1 holds nothing"),
        ("id,label,class,prob\n1,a,a,0.5\n1,a,b,0.5\n2,b,a,0.5\n", "must have 2 rows for each sample"),
        ("id,label,class,prob\n1,a,a,0.5\n1,b,b,0.5\n", "one label for each sample"),
    ],
)
def test_what_is_wrong_in_other_layouts(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(TableError, match=message):
        read_predictions(tmp_path / "a.csv").tally()


def test_folders_named_by_a_column(tmp_path: Path) -> None:
    for site in ("north", "south"):
        (tmp_path / "new" / f"site={site}").mkdir(parents=True)
        (tmp_path / "new" / f"site={site}" / "part.csv").write_bytes(plain())
    groups = read_predictions(tmp_path / "new", by="site").tally().groups
    assert {name: tally.n for name, tally in groups.items()} == {"north": 3, "south": 3}
    assert read_predictions(tmp_path / "new", where={"site": "north"}).tally().n == 3


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(plain())
    (tmp_path / "link.csv").symlink_to(file)
    assert read_predictions([file, str(file), tmp_path / "link.csv"]).tally().n == 3


def test_excel(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [["label", "prob_0", "prob_1"], *([y, *p] for y, p in zip(LABELS, PROBS))]:
        book.active.append(row)
    book.save(tmp_path / "a.xlsx")
    assert read_predictions(tmp_path / "a.xlsx").load().probs.tolist() == PROBS
    book.active["B3"] = None
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(TableError, match="'prob_0', row 2 must hold a finite number, got nothing"):
        read_predictions(tmp_path / "a.xlsx").load()


def wide_lines(scores: Any, texts: list[str]) -> list[str]:
    header = ",".join(["text", *(f"logit_{i}" for i in range(scores.shape[1])), "label", "site"])
    rows = zip(texts, scores.tolist(), range(len(texts)))
    return [header, *(",".join([text, *map(str, row), str(i), "ab"[i % 2]]) for text, row, i in rows)]


@pytest.mark.parametrize("case", ["plain", "windows", "zipped", "quotes", "line break in quotes"])
def test_wide_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "WIDE_BLOCK", 1 << 15)  # so that there are several
    scores = np.random.default_rng(0).normal(size=(12, 2000)).round(4)
    odd = {"quotes": '"x, y"', "line break in quotes": '"x\ny"'}.get(case, "")
    text = "\n".join(wide_lines(scores, ["t"] * 9 + [odd] + ["t"] * 2)) + "\n"
    content = text.replace("\n", "\r\n").encode() if case == "windows" else text.encode()
    file = tmp_path / "a.csv"
    file.write_bytes(gzip.compress(content) if case == "zipped" else content)
    table = read_predictions(file, by="site", extra=["text"])
    chunks = list(table.chunks())
    assert np.array_equal(np.concatenate([chunk.scores for chunk in chunks]), scores)
    texts = np.concatenate([chunk.raw.columns["text"] for chunk in chunks]).tolist()
    assert texts[9] == odd.strip('"')
    assert table.load().labels.tolist() == list(range(12))
    assert {name: group.n for name, group in table.tally().groups.items()} == {"a": 6, "b": 6}


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("x", "column 'logit_1', row 10 must hold a number, got 'x'"),
        ("", "column 'logit_1', row 10 must hold a finite number, got nothing"),
        ("1.0,1.0", "row 10 has 2004 values where the header has 2003"),
    ],
)
def test_wide_files_name_the_place(cell: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(formats, "WIDE_BLOCK", 1 << 15)
    lines = wide_lines(np.random.default_rng(0).normal(size=(12, 2000)).round(4), ["t"] * 12)
    cells = lines[10].split(",")
    lines[10] = ",".join([*cells[:2], cell, *cells[3:]])
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(TableError, match=message):
        read_predictions(tmp_path / "a.csv").tally()
