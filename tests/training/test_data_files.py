"""Damaged data files are found at the start, and named."""

import pytest

from megatron import backend

backend.install()

from megatron.training.data_files import check_indexed_dataset
from tests.training.small_data import write_dataset


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
        (".idx", lambda data: data[:-9], r"\.idx is truncated"),
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


def test_missing_file(tmp_path):
    """A prefix without files says which file is looked for."""
    with pytest.raises(ValueError, match=r"nowhere\.idx does not exist"):
        check_indexed_dataset(str(tmp_path / "nowhere"))


def test_no_documents(tmp_path):
    """A pair without a single token is refused."""
    with pytest.raises(ValueError, match=r"no sequences|no tokens"):
        check_indexed_dataset(write_dataset(tmp_path / "empty", documents=0))
