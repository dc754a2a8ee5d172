"""Files that LMDB can work with pass; of garbled ones those do not that would end the process."""

import random
import shutil
import struct

import pytest

from megatron.elastic.cache.structure import UnsoundError, require_sound
from tests.elastic.cache.children import ends_by_signal

lmdb = pytest.importorskip("lmdb")
lmdb_verify = pytest.importorskip("lmdb.verify")
PAGE = 4096
NUM_KEYS = 500


def key(number):
    return b"0123456789abcdef" + number.to_bytes(8, "big")


def opened(path):
    return lmdb.open(str(path), map_size=1 << 26, sync=False, metasync=False, meminit=False, lib_version=0)


def work(path):
    """Read all, delete some, write others: what a job would do."""
    try:
        with opened(path) as database:
            with database.begin(buffers=True) as transaction:
                for number in range(NUM_KEYS):
                    bytes(transaction.get(key(number), b""))
            for first in range(0, NUM_KEYS, 50):
                with database.begin(write=True) as transaction:
                    for number in range(first, first + 50):
                        if number % 3:
                            transaction.put(b"z" + key(number), b"q" * 5000)
                        else:
                            transaction.delete(key(number))
    except lmdb.Error:
        pass


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A file with a history: free pages, a tree of two levels, large and small values."""
    path = tmp_path_factory.mktemp("good")
    rng = random.Random(1)
    with opened(path) as database:
        for first in range(0, NUM_KEYS, 20):
            with database.begin(write=True) as transaction:
                for number in range(first, first + 20):
                    transaction.put(key(number), rng.randbytes(rng.choice([100, 5000, 9000])))
                    if number >= 100 and number % 2:
                        transaction.delete(key(number - 100))
    content = (path / "data.mdb").read_bytes()
    pages = {1: [], 2: [], 4: []}
    for page in range(2, len(content) // PAGE):
        number, _, kind = struct.unpack_from("<QHH", content, page * PAGE)
        if number == page and kind in pages:
            pages[kind].append(page)
    assert min(map(len, pages.values())) >= 1
    return content, pages[1] + pages[2], pages[4]


def garbled(good, seed):
    content, tree, runs = good
    rng, broken = random.Random(seed), bytearray(content)
    how = seed % 7
    page = rng.choice(tree)
    if how == 0:
        broken[page * PAGE : (page + 1) * PAGE] = rng.randbytes(PAGE)
    elif how == 1:
        broken[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    elif how == 2:
        broken[page * PAGE + rng.randrange(PAGE)] = rng.randrange(256)
    elif how == 3:
        for _ in range(30):
            broken[rng.choice(tree) * PAGE + rng.randrange(PAGE)] = rng.randrange(256)
    elif how == 4:
        for run in rng.sample(runs, 5):
            broken[run * PAGE : run * PAGE + 16] = rng.randbytes(16)
    elif how == 5:
        other = rng.choice(tree)
        broken[page * PAGE : (page + 1) * PAGE] = content[other * PAGE : (other + 1) * PAGE]
    else:
        del broken[rng.randrange(len(content)) :]
    return broken


def is_sound(path):
    try:
        require_sound(path / "data.mdb")
    except UnsoundError:
        return False
    return True


def is_verified(path):
    try:
        return not lmdb_verify.verify(str(path))
    except lmdb_verify.VerifyError:
        return False


@pytest.mark.parametrize(
    "seeds", [range(70), pytest.param(range(70, 2000), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_garbled_files(good, seeds, tmp_path):
    """What passes ends no process, and passes py-lmdb's verifier, which reads every byte; few others pass that."""
    verdicts = []
    for seed in seeds:
        path = tmp_path / str(seed)
        path.mkdir()
        (path / "data.mdb").write_bytes(garbled(good, seed))
        sound, verified = is_sound(path), is_verified(path)
        if sound:
            assert verified and ends_by_signal(work, path) is None, seed
        verdicts.append((sound, verified))
        shutil.rmtree(path)
    assert min(verdicts.count((False, False)), verdicts.count((True, True))) > 0.1 * len(verdicts)
    assert verdicts.count((False, True)) <= 0.01 * len(verdicts)


def test_garbled_files_can_be_fatal(good, tmp_path):
    """Without a look at it such a file ends the process: there is something to be prevented."""
    (tmp_path / "data.mdb").write_bytes(good[0][: len(good[0]) // 2])
    assert ends_by_signal(work, tmp_path) is not None
    assert not is_sound(tmp_path)


@pytest.mark.parametrize("content", [b"\0" * 8192, b"text", b"\xde\xc0\xef\xbe" * 4096], ids=["zeros", "text", "magic"])
def test_files_of_others(content, tmp_path):
    (tmp_path / "data.mdb").write_bytes(content)
    assert not is_sound(tmp_path)


def test_what_lmdb_writes_is_sound(tmp_path):
    """Empty, fresh, at every commit of random histories, and when all is deleted again."""
    (tmp_path / "data.mdb").write_bytes(b"")
    assert is_sound(tmp_path)
    rng = random.Random(3)
    with opened(tmp_path) as database:
        assert is_sound(tmp_path)
        present = set()
        for _ in range(60):
            with database.begin(write=True) as transaction:
                for number in rng.sample(range(300), 20):
                    if number in present and rng.random() < 0.6:
                        transaction.delete(key(number))
                        present.discard(number)
                    else:
                        transaction.put(key(number), rng.randbytes(rng.choice([10, 1500, 4000, 40_000])))
                        present.add(number)
            assert is_sound(tmp_path)
        with database.begin(write=True) as transaction:
            for number in present:
                transaction.delete(key(number))
        assert is_sound(tmp_path)
    assert is_verified(tmp_path)
