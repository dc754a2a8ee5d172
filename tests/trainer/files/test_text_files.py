"""Texts with classes in files: what is read, and which files are refused with which sentence."""

import pytest

from megatron.trainer.files import text_files


def test_lines_of_json_and_tables_say_the_same(tmp_path):
    """Columns by their names, in any order, also GLUE's; labels may be numbers."""
    (tmp_path / "a.jsonl").write_text('{"text": "One\\ttab.", "label": 1}\n\n{"label": "0", "sentence": "Two."}')
    (tmp_path / "b.tsv").write_text("id\tlabel\tsentence\r\n7\t1\tThree.\r\n8\t10\t\r\n")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.tsv")]
    assert text_files.read(paths) == [("One\ttab.", "1"), ("Two.", "0"), ("Three.", "1"), ("", "10")]
    assert text_files.count(paths) == 4 and text_files.class_names(paths) == ["0", "1", "10"]
    (tmp_path / "c.jsonl").write_text('{"text": "Four.", "label": "b"}')
    assert text_files.class_names([*paths, str(tmp_path / "c.jsonl")]) == ["0", "1", "10", "b"]
    assert text_files.missing([*paths, "none"]) == ["none"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text"', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[1]", r"a\.jsonl, line 1 is no object"),
        ("a.jsonl", '{"text": "a"}', r"a\.jsonl, line 1 has no text and label, but text; name them"),
        (
            "a.jsonl",
            '{"text": "a \\ud800", "label": 1}',
            r"a\.jsonl, line 1 has the lone surrogate \\ud800 at character 3",
        ),
        ("a.jsonl", '{"text": 5, "label": 1}', r"a\.jsonl, line 1 has the text 5, which is no string"),
        ("a.jsonl", "\n\n", r"a\.jsonl has no samples"),
        ("a.tsv", "text\tscore\na\t1", r"a\.tsv has the columns text, score; its first line must name text and label"),
        ("a.tsv", "text\tlabel\na\t1\tb", r"a\.tsv, line 2 has 3 columns, not 2"),
        ("a.tsv", "text\tlabel\n", r"a\.tsv has no samples"),
    ],
)
def test_lines_that_do_not_fit(tmp_path, name, content, message):
    """File, line and remedy."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        text_files.read([str(tmp_path / name)])


def test_files_that_are_none(tmp_path):
    """Missing, or of bytes that are no text."""
    with pytest.raises(ValueError, match=r"file .*none does not exist"):
        text_files.count([str(tmp_path / "none")])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes, line 1 is no UTF-8 text"):
        text_files.read([str(tmp_path / "bytes")])
