"""Damaged data files are found at the start, and named."""

import numpy
import pytest

from megatron import backend

backend.install()

from megatron.trainer.files.indexed_files import check_indexed_dataset
from tests.trainer.data.small_data import write_dataset


@pytest.fixture
def prefix(tmp_path):
    return write_dataset(tmp_path / "text", documents=5)


def test_good_files_pass(prefix):
    """What megatron.core writes is accepted, with its counts."""
    contents = check_indexed_dataset(prefix)
    assert contents.num_sequences == 5 and contents.num_tokens > 5


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        (".bin", lambda data: data[:-2], r"\.bin is truncated"),
        (".bin", lambda data: b"", r"\.bin is empty"),
        (".bin", lambda data: data + b"xx", r"\.bin is longer than its index says"),
        (".bin", lambda data: data[: len(data) // 2], r"\.bin is truncated: \d+ of \d+ bytes; run"),
        (".idx", lambda data: data[:-9], r"\.idx is truncated: \d+ of \d+ bytes; run"),
        (".idx", lambda data: data + b"xx", r"\.idx is longer than its index says"),
        (".idx", lambda data: data[:20], r"\.idx is truncated"),
        (".idx", lambda data: b"", r"\.idx is empty"),
        (".idx", lambda data: b"no index at all, but longer than a header", r"\.idx is no index"),
    ],
)
def test_damage_is_named(prefix, suffix, change, message):
    """Truncated, empty, foreign: the sentence names file and damage."""
    with open(prefix + suffix, "rb") as stream:
        data = stream.read()
    with open(prefix + suffix, "wb") as stream:
        stream.write(change(data))
    with pytest.raises(ValueError, match=message):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize(("code", "name"), [(1, "uint8"), (4, "int32"), (5, "int64"), (7, "float32")])
def test_another_dtype_is_no_truncation(tmp_path, documents, code, name):
    """Data of two bytes a token under an index of another dtype, by a wrong header or of another file, are named so."""
    prefix = write_dataset(tmp_path / "text", documents=documents)
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(17)  # after magic and version
        stream.write(bytes([code]))
    is_sure = documents > 1 or code == 1  # else the only document of wider tokens may as well be cut
    or_cut = "" if is_sure else r"is truncated, \d+ of \d+ bytes, or "
    with pytest.raises(
        ValueError, match=rf"text\.bin {or_cut}holds tokens of 2 bytes, and .*text\.idx says {name}, of \d: they"
    ):
        check_indexed_dataset(prefix)


def test_data_written_with_another_dtype(prefix):
    """An index that agrees with itself, beside data of twice as many bytes."""
    data = numpy.fromfile(f"{prefix}.bin", dtype=numpy.uint16)
    data.astype(numpy.int32).tofile(f"{prefix}.bin")
    with pytest.raises(ValueError, match=r"holds tokens of 4 bytes, and .* says uint16, of 2: .* run tools/preprocess"):
        check_indexed_dataset(prefix)


def test_unknown_dtype(prefix):
    """A code that no version of the format has."""
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(17)
        stream.write(bytes([9]))
    with pytest.raises(ValueError, match="version 1 and dtype 9, and known are version 1 and dtypes 1 to 8; run"):
        check_indexed_dataset(prefix)


def test_missing_file(tmp_path):
    """A prefix without files says which file is looked for."""
    with pytest.raises(ValueError, match=r"nowhere\.idx does not exist"):
        check_indexed_dataset(str(tmp_path / "nowhere"))


def test_no_documents(tmp_path):
    """A pair without a single token is refused."""
    with pytest.raises(ValueError, match=r"no sequences|no tokens"):
        check_indexed_dataset(write_dataset(tmp_path / "empty", documents=0))
