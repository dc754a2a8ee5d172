"""Files of samples, and sentences for those that are none."""

import importlib.util
import json

import pytest

from megatron.finetuning.data.files import column, read_samples, texts_of

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
    assert read_samples(path) == ROWS
    assert read_samples(path, limit=1) == ROWS[:1]


def test_parquet(tmp_path):
    if importlib.util.find_spec("pyarrow") is None:
        path = written(tmp_path, "rows.parquet", b"PAR1")
        with pytest.raises(ValueError, match=r"needs the package pyarrow; pip install .\[parquet\]"):
            read_samples(path)
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=1)
    assert read_samples(str(tmp_path / "rows.parquet")) == ROWS
    with pytest.raises(ValueError, match="is no parquet file"):
        read_samples(written(tmp_path, "broken.parquet", b"PAR1"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text"', "a.jsonl, line 2 is no JSON .*mend it"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "a.jsonl, line 2 is no object with fields"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', "sample 2: no field 'label', which the first"),
        ("a.jsonl", "\n", "has no samples"),
        ("a.json", "[1, 2]", "sample 1 is no object"),
        ("a.csv", "text,label\na,1\nb\n", "line 3: it has not as many fields"),
        ("a.csv", "text,label\na,1\nb,2,3\n", "line 3: it has not as many fields"),
        ("a.csv", "text,label\n", "has no samples"),
        ("a.txt", "a", "unknown ending; give .jsonl"),
        ("a.jsonl", b'{"text": "\xff"}', "no UTF-8 text"),
    ],
)
def test_sentences(tmp_path, name, content, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_samples(written(tmp_path, name, content))


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"there is no file nowhere\.jsonl"):
        read_samples("nowhere.jsonl")


def test_columns():
    assert column(ROWS, "f", None, ("sentence", "text"), "text") == "text"
    assert column(ROWS, "f", "label", ("text",), "text") == "label"
    with pytest.raises(ValueError, match=r"no column 'other' for the text; it has text, label"):
        column(ROWS, "f", "other", ("text",), "text")
    with pytest.raises(ValueError, match=r"looked for question.* name one with --question_column"):
        column(ROWS, "f", None, ("question",), "question")
    with pytest.raises(ValueError, match="sample 1: 'text' is 3, and a text is wanted"):
        texts_of([{"text": 3}], "f", "text")
