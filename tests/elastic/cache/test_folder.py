"""Whatever lies in the folder: a cache opens, empty or with what it had, and nobody is harmed."""

import logging
import random
import shutil

import pytest

from megatron.elastic.cache import folder as room
from tests.elastic.cache.cases import DEEPER, GENERATION, MOST_BYTES, fill, open_cache, outputs, same
from tests.elastic.cache.children import call

SAMPLES = range(20)
INDEX = f"768-{GENERATION.digest.hex()}.index"


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
    for name in ("new", INDEX):  # as a process that is killed leaves them
        with (place / name).open("ab") as file:
            file.write(b"begun")
    assert reopened(tmp_path, caplog) == (20, "")
    assert reopened(tmp_path, caplog) == (20, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["activations", "cache.lock"]


HEAD = 16 + len(GENERATION.text)
GARBAGE = {
    "text": lambda content: b"somebody's notes\n" * 1000,
    "noise": lambda content: random.Random(1).randbytes(len(content)),
    "empty": lambda content: b"",
    "beginning": lambda content: bytes(16) + content[16:],
    "version": lambda content: content[:8] + b"\1" + content[9:],
    "generation": lambda content: content.replace(b"sentences", b"paragraph"),
}


@pytest.mark.parametrize("how", GARBAGE)
def test_an_index_of_another_kind_is_set_aside(how, tmp_path, caplog):
    """It lies beside the new one; one that was set aside before makes way."""
    for _ in range(2):
        place = fill(tmp_path, SAMPLES)
        broken = GARBAGE[how]((place / INDEX).read_bytes())
        (place / INDEX).write_bytes(broken)
        count, said = reopened(tmp_path, caplog)
        assert count == 0 and "is set aside (its index is none of this generation)" in said and "starts empty" in said
        assert (tmp_path / "activations.damaged").read_bytes() == broken
        assert reopened(tmp_path, caplog) == (0, "")


def test_an_index_of_another_generation_that_nobody_can_read(tmp_path, caplog):
    """It is in nobody's way."""
    place = fill(tmp_path, SAMPLES)
    for number, how in enumerate(GARBAGE):
        (place / f"768-{number:032x}.index").write_bytes(GARBAGE[how]((place / INDEX).read_bytes()))
    assert reopened(tmp_path, caplog) == (20, "")


@pytest.mark.parametrize("name", ["index", "values"])
def test_files_that_are_cut_short(name, tmp_path, caplog):
    """What is left is found."""
    place = fill(tmp_path, SAMPLES)
    file = place / (INDEX if name == "index" else "768.values")
    content = file.read_bytes()
    file.write_bytes(content[: (HEAD if name == "index" else 0) + (len(content) - HEAD * (name == "index")) // 2 + 5])
    count, said = reopened(tmp_path, caplog)
    assert count == 10 and ("its checksum is wrong" in said) == (name == "values")


@pytest.mark.parametrize("part", ["key", "slot", "checksum", "proof", "value"])
def test_any_changed_byte_is_found(part, tmp_path, caplog):
    """Of an entry or of a value: that one value is missed, there is one warning, and it can be written again."""
    offset = {"key": 0, "slot": 16, "checksum": 20, "proof": 24, "value": 100}[part]
    for at in range(offset, offset + 4):
        place = fill(tmp_path, SAMPLES)
        file, begin, size = (place / "768.values", 0, 768) if part == "value" else (place / INDEX, HEAD, 28)
        content = bytearray(file.read_bytes())
        content[begin + 7 * size + at] ^= 1 << at % 8
        file.write_bytes(content)
        count, said = reopened(tmp_path, caplog)
        assert count == 19
        assert ("its checksum is wrong" if part == "value" else "its entry in the index is damaged") in said
        with open_cache(tmp_path) as cache:
            assert sum(each is None for each in cache.get(SAMPLES)) == 1
            cache.put(SAMPLES, outputs(SAMPLES))
            cache.flush()
            assert same(cache.get(SAMPLES), outputs(SAMPLES))
            assert cache.measured.counts["damaged"] == 1
        shutil.rmtree(tmp_path / "activations")


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 600), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_garbled_files(seeds, tmp_path, caplog):
    """Noise in any place of any file, pieces that are moved, cut off or zeroed: what is found is right, no process
    ends, and the cache can be written again."""
    good = fill(tmp_path / "good", SAMPLES)
    for seed in seeds:
        folder, rng = tmp_path / str(seed), random.Random(seed)
        shutil.copytree(good, folder / "activations")
        for file in rng.sample(sorted((folder / "activations").iterdir()), rng.randint(1, 3)):
            content = bytearray(file.read_bytes())
            begin, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
            how = rng.randrange(5)
            piece = [
                bytes(end - begin),
                rng.randbytes(end - begin),
                content[: end - begin],
                b"",
                content[begin:end] * 2,
            ]
            content[begin:end] = piece[how]
            file.write_bytes(content)
        reopened(folder, caplog)
        shutil.rmtree(folder)


def test_another_folder_or_file_in_place(tmp_path, caplog):
    """Files without a state of ours are somebody's: they are kept. So is a file where our folder should be."""
    (tmp_path / "activations").write_text("mine")
    count, said = reopened(tmp_path, caplog)
    assert count == 0 and "it is no folder" in said
    assert (tmp_path / "activations.damaged").read_text() == "mine"
    for content in ("", "[]", "{}", '{"boot": "1", "most_bytes": 8388608, "left": null}'):
        place = fill(tmp_path, SAMPLES)
        (place / "state.json").write_text(content)
        count, said = reopened(tmp_path, caplog)
        assert count == 0 and "it has no state" in said


def test_a_smaller_limit(tmp_path, caplog):
    """The files do not shrink, so they begin anew; under a larger limit they stay."""
    place = fill(tmp_path, range(3000))
    assert (place / "768.values").stat().st_size > 2 << 20
    count, said = reopened(tmp_path, caplog, most_bytes=2 << 20)
    assert count == 0 and "2097152 are allowed" in said
    assert (place / "768.values").stat().st_size < 1 << 20
    assert reopened(tmp_path, caplog, most_bytes=64 << 20)[1] == ""


def read_with_limit(folder, most_bytes):
    """What a process with this limit finds there, and whether it was told of another one."""
    with open_cache(folder, most_bytes=most_bytes) as cache:
        cache.put([200], outputs([200]))
        cache.flush()
        return same(cache.get([1, 200]), outputs([1, 200])), cache._said


def test_the_limit_of_who_is_there_stays(tmp_path):
    """All processes have one limit."""
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        assert call(read_with_limit, tmp_path, MOST_BYTES) == (True, set())
        assert call(read_with_limit, tmp_path, 64 << 20) == (True, {"limit"})
        assert call(read_with_limit, tmp_path, 1 << 20) == (True, {"limit"})
        assert same(cache.get([200]), outputs([200]))


def test_damage_while_the_files_are_open(tmp_path, caplog):
    """What was read of the index goes on being used; the values that are damaged are missed, in this process and the
    next one, and can be written again."""
    with caplog.at_level(logging.WARNING), open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        with (tmp_path / "activations" / "768.values").open("r+b") as file:
            file.write(bytes(5 * 768))
            file.truncate(15 * 768)
        assert sum(each is not None for each in cache.get(SAMPLES)) == 10
        assert cache.measured.counts["damaged"] == 10
        assert [record.message.count("its checksum is wrong") for record in caplog.records] == [1]
        assert call(count_found, tmp_path) == (10, {"value"})
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        assert same(cache.get(SAMPLES), outputs(SAMPLES))
        assert call(count_found, tmp_path) == (20, set())


def count_found(folder):
    with open_cache(folder) as cache:
        return sum(each is not None for each in cache.get(SAMPLES)), cache._said


@pytest.mark.parametrize("how", ["head", "end"])
def test_an_index_that_is_damaged_while_it_is_open(how, tmp_path, caplog):
    """The process that has it open is not harmed; the next one begins that generation anew, or misses what is gone."""
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        with (tmp_path / "activations" / INDEX).open("r+b") as file:
            if how == "head":
                file.write(bytes(100))
            else:
                file.truncate(HEAD + 15 * 28 + 3)
        assert call(count_found, tmp_path) == ((0, {"damaged"}) if how == "head" else (15, set()))
        assert same(cache.get(SAMPLES), outputs(SAMPLES))
        cache.put([50], outputs([50]))
        cache.flush()
        assert same(cache.get([50, *SAMPLES]), outputs([50, *SAMPLES]))
    count, said = reopened(tmp_path, caplog)
    assert (count, said) == (0, "") if how == "head" else count == 15 and "its entry in the index is damaged" in said


def test_a_folder_that_is_removed_in_use(tmp_path, caplog):
    """It is read and written; no other generation can be written there; the next process begins anew."""
    with caplog.at_level(logging.WARNING), open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        shutil.rmtree(tmp_path)
        cache.put([50], outputs([50]))
        cache.flush()
        assert same(cache.get([50, *SAMPLES]), outputs([50, *SAMPLES]))
        cache.deepen(DEEPER)
        cache.put([1], outputs([1], DEEPER))
        cache.flush()
        assert cache.get([1]) == [None] and same(cache.get_older([1]), outputs([1]))
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
