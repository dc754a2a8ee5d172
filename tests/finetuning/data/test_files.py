"""Files of samples, and sentences for those that are none."""

import importlib.util
import json

import pytest

from megatron.finetuning.data.files import File, read_file

ROWS = [{"text": "a, b", "label": "1"}, {"text": 'he said "no"\nand left', "label": "0"}]


def written(folder, name: str, content: str | bytes):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
        ("lines.json", "\n".join(map(json.dumps, ROWS))),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("excel.csv", '\ufefftext,label\n"a, b",1\n"he said ""no""\nand left",0\n'),
        ("rows.csv", 'text,label\n"a, b",1\n"he said ""no""\nand left",0\n'),
    ],
)
def test_forms(tmp_path, name, content):
    path = written(tmp_path, name, content)
    assert read_file(path) == File(path, ROWS)
    assert read_file(path, limit=1) == File(path, ROWS[:1])


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_needs_a_package(tmp_path):
    with pytest.raises(ValueError, match=r"needs the package pyarrow; pip install .\[parquet\]"):
        read_file(written(tmp_path, "rows.parquet", b"PAR1"))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=1)
    assert read_file(str(tmp_path / "rows.parquet")).samples == ROWS
    assert read_file(str(tmp_path / "rows.parquet"), limit=1).samples == ROWS[:1]
    with pytest.raises(ValueError, match="is no parquet file"):
        read_file(written(tmp_path, "broken.parquet", b"PAR1"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text"', "a.jsonl, line 2 is no JSON .*mend it"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "a.jsonl, line 2 is no object with fields"),
        ("a.jsonl", "\n", "has no samples"),
        ("a.json", "[1, 2]", "sample 1 is no object"),
        (
            "a.csv",
            "text,label\na,1\nb,2,3\n",
            r"line 3: it has more fields than the 2 that the first line names \('text', 'label'\)",
        ),
        ("a.csv", "text,label\n", "has no samples"),
        ("a.csv", "text,text\na,b\n", r"a\.csv: the first line names 'text' twice; rename one"),
        ("a.jsonl", "[" * 10**5, r"a\.jsonl, line 1 cannot be read \(maximum recursion depth"),
        ("a.txt", "a", "unknown ending; give .jsonl"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2 is no UTF-8 text"),
        ("a.parquet.gz", b"PAR1", r"unknown ending; give .*or text with \.gz, \.bz2 or \.xz behind"),
    ],
)
def test_sentences(tmp_path, name, content, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_file(written(tmp_path, name, content))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_mark_before_the_first_character(tmp_path, name):
    """As programs of Windows write it."""
    content = "text\na\n" if name == "a.csv" else '{"text": "a"}\n'
    assert read_file(written(tmp_path, name, b"\xef\xbb\xbf" + content.encode())).samples == [{"text": "a"}]


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"there is no file nowhere\.jsonl"):
        read_file("nowhere.jsonl")


def test_columns():
    assert File("f", ROWS).column(None, ("sentence", "text"), "text") == "text"
    assert File("f", ROWS).column("label", ("text",), "text") == "label"
    with pytest.raises(ValueError, match=r"no column 'other' for the text; it has 'text', 'label': .*--text_column"):
        File("f", ROWS).column("other", ("text",), "text")
    with pytest.raises(
        ValueError, match=r"looked for question.*; it has 'text', 'label': name one with --question_column"
    ):
        File("f", ROWS).column(None, ("question",), "question")
    with pytest.raises(ValueError, match="sample 1: 'text' is 3, and a text is wanted"):
        File("f", [{"text": 3}]).texts("text", "text")


def test_half_a_character(tmp_path):
    """JSON can write it, and tokenizers have other errors for it, or none."""
    path = written(tmp_path, "a.jsonl", '{"text": "good"}\n{"text": "bad \\ud800 half", "note": "\\udc00"}\n')
    with pytest.raises(
        ValueError, match=r"a.jsonl, sample 2: 'text' has the lone surrogate \\ud800 at character 5, wh"
    ):
        read_file(path).texts("text", "text")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", '{"text": "a", "label": "1"}\n\n{"text": "b", "note": "x"}\n'), ("a.csv", "text,label\na,1\nb\n")],
)
def test_samples_may_differ_in_fields_that_nobody_uses(tmp_path, name, content):
    file = File("f", read_file(written(tmp_path, name, content)).samples)
    assert file.texts(file.column(None, ("text",), "text"), "text") == ["a", "b"]
    assert file.fields == ["text", "label", *(["note"] if name == "a.jsonl" else [])]
    with pytest.raises(ValueError, match=r"f, sample 2: no field 'label' for the label; it has 'text'.*: add it, or"):
        file.column(None, ("label",), "label")
    with pytest.raises(ValueError, match=r"f, sample 1: no field 'label' for the label; it has 'text'"):
        File("f", file.samples[::-1]).column("label", (), "label")
