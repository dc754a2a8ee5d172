"""Text files that users write: plain or compressed, with a mark or without, and which line is none."""

import bz2
import gzip
import lzma

import pytest

from megatron.documents import counted
from megatron.documents.files import ending, open_text
from megatron.finetuning.data.files import read_file
from megatron.trainer.files import text_files

PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".XZ": lzma.compress}
TEXT = '{"text": "Grüße", "label": "1"}\r\n{"text": "b", "label": "0"}\n'


def written(folder, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "mark"])
@pytest.mark.parametrize("packed", PACKERS)
def test_every_reader_takes_compressed_text_and_a_mark(tmp_path, packed, mark):
    """The lines themselves, and the samples of both fine-tuning programs."""
    pack, table = PACKERS[packed], "text,label\nGrüße,1\nb,0\n"
    path = written(tmp_path, f"a.jsonl{packed}", pack(mark + TEXT.encode()))
    rows = [{"text": "Grüße", "label": "1"}, {"text": "b", "label": "0"}]
    with open_text(path, newline="\n") as stream:
        assert list(stream) == TEXT.splitlines(keepends=True)
    assert ending(path) == ".jsonl"
    assert read_file(path).samples == rows
    assert read_file(written(tmp_path, f"a.csv{packed}", pack(mark + table.encode()))).samples == rows
    assert text_files.read([path]) == [("Grüße", "1"), ("b", "0")]
    tabs = written(tmp_path, f"a.tsv{packed}", pack(mark + table.replace(",", "\t").encode()))
    assert text_files.read([tabs]) == [("Grüße", "1"), ("b", "0")]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", TEXT.encode() * 900 + b'{"text": "caf\xe9"}\n' + TEXT.encode(), r"a\.jsonl, line 1801 is no UTF-8"),
        ("a.jsonl.gz", gzip.compress(TEXT.encode() + b"\xff\n"), r"a\.jsonl\.gz, line 3 is no UTF-8 text .*convert"),
        ("a.jsonl", TEXT.encode("utf-16"), r"a\.jsonl, line 1 is no UTF-8 text"),
        ("a.jsonl.gz", TEXT.encode(), r"a\.jsonl\.gz cannot be read \(Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(TEXT.encode())[:-12], r"a\.jsonl\.gz cannot be read \(Compressed file ended"),
        ("a.jsonl.xz", b"\xfd7zXZ\0" + bytes(40), r"a\.jsonl\.xz cannot be read \("),
    ],
    # Not the bytes, into which gzip writes the time: processes that share the tests have to collect the same names.
    ids=["latin-1", "latin-1 packed", "utf-16", "not packed", "cut off", "damaged"],
)
def test_what_is_no_text_is_named_with_its_line(tmp_path, name, content, sentence):
    """By every reader alike, also where the decoder reads ahead."""
    path = written(tmp_path, name, content)
    for read in (read_file, lambda path: text_files.read([path])):
        with pytest.raises(ValueError, match=sentence):
            read(path)


def test_a_file_that_is_missing():
    """In one sentence, before anything else."""
    with pytest.raises(ValueError, match=r"^file nowhere\.gz does not exist$"), open_text("nowhere.gz"):
        pass


def test_errors_about_other_files_are_not_of_this_one(tmp_path):
    """A block that reads a file may open others: what they lack is said of them."""
    path, other = written(tmp_path, "a.txt", b"a"), tmp_path / "other.txt"
    with pytest.raises(FileNotFoundError, match=r"other\.txt"), open_text(path):
        other.read_text()
    with pytest.raises(ValueError, match=r"^\S*/other\.txt, line 2 is no UTF-8"), open_text(path):
        other.write_bytes(b"a\n\xff")
        with open_text(other) as stream:
            stream.read()


def test_one_is_no_plural():
    """Nor is 0 one; a batch has batches."""
    assert [counted(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(number, "microbatch") for number in (1, 2)] == ["1 microbatch", "2 microbatches"]
