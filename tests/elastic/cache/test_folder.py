"""Whatever lies in the folder: a cache opens, empty or with what it had, and nobody is harmed."""

import json
import logging
import random
import shutil

import pytest

from megatron.elastic.cache import folder as room
from tests.elastic.cache.cases import DEEPER, MOST_BYTES, bits, fill, open_cache, output, outputs, same
from tests.elastic.cache.children import call

pytest.importorskip("lmdb")
SAMPLES = range(20)


def reopened(folder, caplog, **options):
    """How many samples are found, which all are right, and what was said; it can be written again."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), open_cache(folder, **options) as cache:
        found = cache.get(SAMPLES)
        for each, expected in zip(found, outputs(SAMPLES), strict=True):
            assert each is None or same([each], [expected])
        cache.put([100], outputs([100]))
        cache.flush()
        assert same(cache.get([100]), outputs([100]))
    assert len({record.message for record in caplog.records}) == len(caplog.records)
    return sum(each is not None for each in found), " ".join(record.message for record in caplog.records)


def test_what_was_written_is_there(tmp_path, caplog):
    """Behind a proper end, and where the end was none."""
    place = fill(tmp_path, SAMPLES)
    assert reopened(tmp_path, caplog) == (20, "")
    state = json.loads((place / "state.json").read_text())
    assert state["left"] == [(place / "data.mdb").stat().st_size, (place / "data.mdb").stat().st_mtime_ns]
    (place / "state.json").write_text(json.dumps({**state, "left": None}))
    assert reopened(tmp_path, caplog) == (20, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["activations", "opening.lock"]


GARBAGE = {
    "text": lambda content: b"somebody's notes\n" * 1000,
    "noise": lambda content: random.Random(1).randbytes(len(content)),
    "head": lambda content: content[:9000],
    "half": lambda content: content[: len(content) // 2],
    "beginning": lambda content: bytes(8192) + content[8192:],
    "pages": lambda content: content[:8192] + random.Random(1).randbytes(len(content) - 8192),
}


@pytest.mark.parametrize("how", GARBAGE)
def test_damage_is_set_aside(how, tmp_path, caplog):
    """It lies beside the new one; one that was set aside before makes way."""
    for _ in range(2):
        place = fill(tmp_path, SAMPLES)
        broken = GARBAGE[how]((place / "data.mdb").read_bytes())
        (place / "data.mdb").write_bytes(broken)
        count, said = reopened(tmp_path, caplog)
        assert count == 0 and "is set aside" in said and "starts empty" in said
        assert (tmp_path / "activations.damaged" / "data.mdb").read_bytes() == broken
        assert reopened(tmp_path, caplog) == (0, "")


def test_damaged_values_are_missed(tmp_path, caplog):
    """Bytes turned within values only: the others are found, and there is one warning."""
    place = fill(tmp_path, SAMPLES)
    content = (place / "data.mdb").read_bytes()
    for sample in (3, 4, 5):
        value = bits(output(sample))[2]
        assert value in content
        content = content.replace(value, value[:-1] + bytes([value[-1] ^ 1]))
    (place / "data.mdb").write_bytes(content)
    count, said = reopened(tmp_path, caplog)
    assert count == 17 and said.count("its checksum is wrong") == 1


def test_another_folder_or_file_in_place(tmp_path, caplog):
    """Files without a state of ours are somebody's: they are kept. So is a file where our folder should be."""
    (tmp_path / "activations").write_text("mine")
    count, said = reopened(tmp_path, caplog)
    assert count == 0 and "it is no folder" in said
    assert (tmp_path / "activations.damaged").read_text() == "mine"
    for content in ("", "[]", "{}", '{"boot": 1}'):
        place = fill(tmp_path, SAMPLES)
        (place / "state.json").write_text(content)
        count, said = reopened(tmp_path, caplog)
        assert count == 0 and "it has no state" in said
    (tmp_path / "activations" / "data.mdb").unlink()
    (tmp_path / "activations" / "data.mdb").mkdir()
    assert "is set aside" in reopened(tmp_path, caplog)[1]


def test_garbage_in_the_lock_file(tmp_path, caplog):
    """LMDB makes it anew where nobody else is there."""
    place = fill(tmp_path, SAMPLES)
    (place / "lock.mdb").write_bytes(random.Random(1).randbytes(1 << 17))
    assert reopened(tmp_path, caplog) == (20, "")
    (place / "lock.mdb").unlink()
    assert reopened(tmp_path, caplog) == (20, "")
    assert (place / "lock.mdb").stat().st_blocks * 512 >= 1 << 16  # on the disk, not a hole


def test_another_boot(tmp_path, caplog):
    """What did not surely come to the disk is not used."""
    place = fill(tmp_path, SAMPLES)
    state = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps({**state, "boot": "before"}))
    count, said = reopened(tmp_path, caplog)
    assert count == 0 and "is removed (it was written before the machine was started" in said
    assert not (tmp_path / "activations.damaged").exists()


def test_a_smaller_limit(tmp_path, caplog):
    """LMDB's files do not shrink, so the file begins anew; under a larger limit it stays."""
    place = fill(tmp_path, range(3000))
    assert (place / "data.mdb").stat().st_size > 2 << 20
    count, said = reopened(tmp_path, caplog, most_bytes=2 << 20)
    assert count == 0 and "2097152 are allowed" in said
    assert (place / "data.mdb").stat().st_size < 1 << 20
    assert reopened(tmp_path, caplog, most_bytes=64 << 20)[1] == ""


def read_with_limit(folder, most_bytes):
    """What a process with this limit finds there, and whether it was told of another one."""
    with open_cache(folder, most_bytes=most_bytes) as cache:
        cache.put([200], outputs([200]))
        cache.flush()
        return same(cache.get([1, 200]), outputs([1, 200])), cache._said


def test_the_limit_of_who_is_there_stays(tmp_path):
    """All processes map the same size, so none grows the file beyond another's map."""
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        assert call(read_with_limit, tmp_path, MOST_BYTES) == (True, set())
        assert call(read_with_limit, tmp_path, 64 << 20) == (True, {"limit"})
        assert call(read_with_limit, tmp_path, 1 << 20) == (True, {"limit"})
        assert same(cache.get([200]), outputs([200]))


def find(folder):
    with open_cache(folder) as cache:
        return sum(each is not None for each in cache.get(SAMPLES)), cache._said


def test_damage_found_by_who_reads(tmp_path, caplog):
    """It stops, once said; who opens the files next sets them aside, and the first is not harmed."""
    with caplog.at_level(logging.WARNING), open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        file = tmp_path / "activations" / "data.mdb"
        content = bytearray(file.read_bytes())
        for page in range(2, len(content) // 4096):  # in place: all branches and leaves
            if content[page * 4096 + 10] in (1, 2):
                content[page * 4096 : (page + 1) * 4096] = bytes(4096)
        with file.open("r+b") as opened:
            opened.write(content)
        assert cache.get(SAMPLES) == [None] * 20
        assert cache.get([1]) == [None]
        cache.put([1], outputs([1]))
        cache.flush()
        assert cache.measured.counts.not_written == 1
        assert [record.message.count("is damaged") for record in caplog.records] == [1]
        assert call(find, tmp_path) == (0, {"damaged"})
        assert call(find, tmp_path) == (0, set())
        assert cache.get([1]) == [None]
    assert reopened(tmp_path, caplog) == (0, "")


def test_a_folder_that_is_removed_in_use(tmp_path, caplog):
    """It is read, and written where nothing new has to be made there; the next one begins anew."""
    with caplog.at_level(logging.WARNING), open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        shutil.rmtree(tmp_path)
        cache.deepen(DEEPER)
        cache.put([1], outputs([1], DEEPER))
        cache.forget_older()
        cache.flush()
        assert same(cache.get([1]), outputs([1], DEEPER))
    assert [record.message.count("takes no more") for record in caplog.records] == [1]
    assert reopened(tmp_path, caplog) == (0, "")


def test_sentences(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"a cache of at most 1000 bytes holds nothing; allow 1048576 and more"):
        open_cache(tmp_path, most_bytes=1000)
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"cannot be the folder of a cache \(.*\); name one that can be written"):
            open_cache(tmp_path / name)
    assert room._file_system("/proc/self") == "proc"
    here = room._file_system(tmp_path)
    assert here and here not in room._REMOTE
    monkeypatch.setattr(room, "_REMOTE", {here})
    with pytest.raises(
        ValueError, match=rf"lies on a remote file system \({here}\), .*; name one on a disk of the node"
    ):
        open_cache(tmp_path / "remote")
