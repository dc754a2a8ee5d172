"""What a training sees of the cache: values of its generation, or none, whoever else is there and however it ended."""

import logging
import os
import pickle
import random
import signal
import threading
import time
from concurrent.futures import wait
from dataclasses import replace

import pytest
import torch

from megatron.elastic.cache import ActivationCache
from tests.elastic.cache.cases import DEEPER, DEEPEST, GENERATION, LARGE, fill, open_cache, output, outputs, same
from tests.elastic.cache.children import call, result, start

SAMPLES = range(12)


def settled(cache):
    """Wait until what was asked for ahead is there."""
    wait(cache._opened().window._readings.values())


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits(dtype, in_background, tmp_path):
    """The bits of any values are kept, also of those that are read ahead, of strided tensors and of such with a
    gradient; and counts."""
    generation = replace(GENERATION, dtype=dtype)
    expected = outputs(SAMPLES, generation)
    with open_cache(tmp_path, generation, in_background=in_background) as cache:
        batch = torch.stack(expected, dim=1).requires_grad_()
        cache.put(SAMPLES, [batch[:, index] for index in range(len(SAMPLES))])
        with torch.no_grad():
            batch.zero_()  # what was put is a copy
        cache.flush()
        found = cache.get([*SAMPLES, 99])
        assert same(found, [*expected, None])
        for tensor in found[:-1]:
            tensor.zero_()  # what is got is one, too
        cache.prefetch(SAMPLES)
        settled(cache)
        assert same(cache.get(reversed(SAMPLES)), expected[::-1])
        counts = cache.measured.counts
        assert (counts["hits"], counts["misses"], counts["prefetched"], counts["written"]) == (24, 1, 12, 12)
        assert counts["bytes_read"] == 2 * counts["bytes_written"] == 24 * expected[0].nbytes
        assert cache.measured.read_seconds > 0 and cache.measured.write_seconds > 0
        assert cache.get([]) == []
        cache.put([], [])


def test_another_generation_finds_nothing(tmp_path):
    """Which fields make another one: test_generation.py."""
    fill(tmp_path, SAMPLES)
    with open_cache(tmp_path, replace(GENERATION, data="other sentences")) as cache:
        assert cache.get(SAMPLES) == [None] * 12
    with open_cache(tmp_path, replace(GENERATION)) as cache:
        assert same(cache.get(SAMPLES), outputs(SAMPLES))


def test_deepen(tmp_path):
    """Old values are found as old ones until they are given up; what is older than that is gone."""
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.deepen(GENERATION)
        assert cache.older is None
        cache.deepen(DEEPER)  # while they are being written
        assert cache.generation == DEEPER and cache.older == GENERATION
        cache.flush()
        assert cache.get(SAMPLES) == [None] * 12
        assert same(cache.get_older(SAMPLES), outputs(SAMPLES))
        cache.put([3, 4, 50], outputs([3, 4, 50], DEEPER))
        cache.flush()
        assert same(cache.get([3, 4, 50, 5]), [*outputs([3, 4, 50], DEEPER), None])
        assert same(cache.get_older([3, 4, 50, 5]), [output(3), output(4), None, output(5)])
        assert cache.measured.counts["older_hits"] == 15
        cache.deepen(DEEPEST)
        cache.flush()
        assert same(cache.get_older([3, 5]), [output(3, DEEPER), None])
        cache.forget_older()
        cache.flush()
        assert cache.get_older([3, 5]) == [None, None]
    with open_cache(tmp_path, DEEPER, older=GENERATION) as cache:
        assert cache.get([3, 5]) == cache.get_older([3, 5]) == [None, None]


def test_prefetch_finds_older_ones(tmp_path):
    """Each at the depth at which it is there."""
    fill(tmp_path, SAMPLES)
    with open_cache(tmp_path) as cache:
        cache.prefetch(SAMPLES)
        cache.deepen(DEEPER)
        cache.put([1], outputs([1], DEEPER))
        cache.flush()
        cache.prefetch([1, 2])
        settled(cache)
        assert same(cache.get([1, 2]), [output(1, DEEPER), None])
        assert same(cache.get_older([2]), outputs([2]))
        assert cache.measured.counts["prefetched"] == 2


def test_values_of_another_way_to_compute_are_not_older_ones(tmp_path):
    """Bits would differ from those of computing from the start."""
    fill(tmp_path, SAMPLES)
    rows = replace(DEEPER, microbatch_rows=8)
    with open_cache(tmp_path, rows, older=GENERATION) as cache:
        assert cache.older is None and cache.get_older([1]) == [None]
    with open_cache(tmp_path) as cache:
        cache.deepen(rows)
        cache.flush()
        assert cache.older is None and cache.get_older([1]) == [None]
    with open_cache(tmp_path) as cache:
        assert cache.get([1]) == [None]  # nobody needed it any more


def test_another_process_needs_older_ones(tmp_path):
    """Until it has deepened, too."""
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        (waits, go), (done, says) = os.pipe(), os.pipe()
        child = start(hold, tmp_path, waits, says)
        os.read(done, 1)
        cache.deepen(DEEPER)
        cache.deepen(DEEPEST)
        cache.flush()
        os.write(go, b"x")
        assert result(*child) == 12
        with open_cache(tmp_path) as late:
            assert late.get(SAMPLES) == [None] * 12
        for each in (waits, go, done, says):
            os.close(each)


def hold(folder, waits, says):
    with open_cache(folder) as cache:
        os.write(says, b"x")
        os.read(waits, 1)
        count = sum(each is not None for each in cache.get(SAMPLES))
        cache.deepen(DEEPER)
        cache.deepen(DEEPEST)
        cache.flush()
        return count


def write_until_killed(folder, seed, ready):
    """Write samples in any order, some again, and deepen now and then."""
    rng = random.Random(seed)
    cache = open_cache(folder, LARGE, 64 << 20, in_background=rng.random() < 0.5)
    deeper = replace(LARGE, depth=3, weights="deeper")
    os.write(ready, b"\0\0")
    while True:
        samples = rng.sample(range(100), rng.randint(1, 8))
        cache.put(samples, outputs(samples, cache.generation))
        if rng.random() < 0.3:
            cache.flush()
            os.write(ready, bytes(each for sample in samples for each in (cache.generation.depth, sample)))
        if rng.random() < 0.05:
            cache.deepen(deeper)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.full)])
def test_killed_writers(rounds, tmp_path, caplog):
    """Ten processes are killed while they write: all that was reported as written is there, whatever is found is
    right, nothing is taken for damaged, and one may go on."""
    num_found = num_reported = 0
    for turn in range(rounds):
        ready, says = os.pipe()
        children = [start(write_until_killed, tmp_path, 100 * turn + seed, says) for seed in range(10)]
        for _ in children:
            os.read(ready, 2)
        time.sleep(0.3)
        for child, file in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(file)
            time.sleep(0.02)
        os.close(says)
        with os.fdopen(ready, "rb") as file:
            told = file.read()
        reported = {(depth, sample) for depth, sample in zip(told[::2], told[1::2], strict=True) if depth}
        for generation in (LARGE, replace(LARGE, depth=3, weights="deeper")):
            with open_cache(tmp_path, generation, 64 << 20) as cache:
                found = cache.get(range(100))
                here = [sample for sample in range(100) if found[sample] is not None]
                assert same([found[sample] for sample in here], outputs(here, generation))
                assert cache.measured.counts["damaged"] == 0
                assert {sample for depth, sample in reported if depth == generation.depth} <= {*here}
                num_reported += len(reported)
                cache.put([200], outputs([200], generation))
                cache.flush()
                assert same(cache.get([200]), outputs([200], generation))
                num_found += len(here)
    assert num_found > 20 * rounds and num_reported > 20 * rounds and caplog.records == []


def in_child(cache):
    """A forked process reads, writes and deepens by itself."""
    assert threading.active_count() == 1
    found = same(cache.get(SAMPLES), outputs(SAMPLES))
    cache.prefetch(SAMPLES)
    cache.put([50], outputs([50]))
    found = found and same(cache.get(SAMPLES), outputs(SAMPLES))
    counts = cache.measured.counts
    cache.close()
    return found, counts["hits"], threading.active_count()


def test_fork(tmp_path):
    """With both threads at work in the parent, which goes on; an end of the child is none of the parent."""
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        for number in range(100, 105):
            cache.put([number], outputs([number]))
            cache.prefetch(SAMPLES)
            assert call(in_child, cache) == (True, 24, 1)
        cache.flush()
        assert same(cache.get([50, *SAMPLES]), outputs([50, *SAMPLES]))
        assert same(cache.get(range(100, 105)), outputs(range(100, 105)))


class Cached(torch.utils.data.Dataset):
    """Values, for the workers of a loader."""

    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.cache.get([index])[0].view(torch.int16).clone()


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_of_a_loader(how, tmp_path):
    with open_cache(tmp_path) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.flush()
        loader = torch.utils.data.DataLoader(
            Cached(cache), batch_size=None, num_workers=2, multiprocessing_context=how, persistent_workers=True
        )
        for _ in range(2):
            assert same([each.view(torch.bfloat16) for each in loader], outputs(SAMPLES))
        del loader


def test_pickled(tmp_path):
    """It is opened anew with all that it was given."""
    with open_cache(tmp_path, window=3, in_background=False) as cache:
        cache.put(SAMPLES, outputs(SAMPLES))
        cache.deepen(DEEPER)
        with pickle.loads(pickle.dumps(cache)) as other:
            assert isinstance(other, ActivationCache)
            assert (other.generation, other.older, other.folder) == (DEEPER, GENERATION, tmp_path)
            assert other._options == cache._options
            assert same(other.get_older(SAMPLES), outputs(SAMPLES))


def test_two_of_a_process(tmp_path):
    """They share the files; each is closed by itself."""
    with open_cache(tmp_path) as first:
        with open_cache(tmp_path, DEEPER) as second:
            first.put(SAMPLES, outputs(SAMPLES))
            second.put(SAMPLES, outputs(SAMPLES, DEEPER))
            first.flush()
            second.flush()
            assert same(second.get(SAMPLES), outputs(SAMPLES, DEEPER))
        assert same(first.get(SAMPLES), outputs(SAMPLES))


def test_nothing_is_left_over(tmp_path):
    """30 times opened, deepened and closed: as many files and threads as before."""
    generations = [replace(GENERATION, depth=depth, weights=str(depth)) for depth in range(1, 5)]
    counts = []
    for _ in range(30):
        with open_cache(tmp_path, generations[0]) as cache:
            for generation in generations:
                cache.deepen(generation)
                cache.put(SAMPLES, outputs(SAMPLES, generation))
                cache.prefetch(SAMPLES)
                cache.get(SAMPLES)
            cache.flush()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(set(counts)) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cache")]
    assert {path.name for path in (tmp_path / "activations").iterdir()} == {
        "state.json",
        "768.values",
        *(f"768-{each.digest.hex()}.index" for each in generations[2:]),
    }


def stop_while_writing(folder, ready):
    """Hold the lock of writers."""
    with open_cache(folder)._opened().store._folder.locked(10.0):
        os.write(ready, b"x")
        time.sleep(60)


def test_a_writer_that_falls_behind(tmp_path, caplog, monkeypatch):
    """Another process is in its way: samples are given up after a while, once said, and reading goes on."""
    monkeypatch.setattr("megatron.elastic.cache.activation_cache.PUT_PATIENCE", 0.05)
    fill(tmp_path, SAMPLES)
    with caplog.at_level(logging.WARNING), open_cache(tmp_path, most_waiting=2) as cache:
        ready, says = os.pipe()
        child, file = start(stop_while_writing, tmp_path, says)
        os.read(ready, 1)
        for sample in range(100, 106):
            cache.put([sample], outputs([sample]))
        assert cache.measured.counts["not_written"] == 3
        assert same(cache.get(SAMPLES), outputs(SAMPLES))
        assert ["takes too long" in record.message for record in caplog.records] == [True]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        cache.flush()
        assert same(cache.get([100, 101, 102]), outputs([100, 101, 102]))
    for each in (file, ready, says):
        os.close(each)


def test_it_ends_while_another_process_is_in_the_way(tmp_path, caplog, monkeypatch):
    """For good: close gives up what it could not write, and says so; the next process finds what there is."""
    monkeypatch.setattr("megatron.elastic.cache.store.WRITE_PATIENCE", 0.1)
    fill(tmp_path, SAMPLES)
    with caplog.at_level(logging.WARNING), open_cache(tmp_path) as cache:
        ready, says = os.pipe()
        child, file = start(stop_while_writing, tmp_path, says)
        os.read(ready, 1)
        cache.put([100], outputs([100]))
    assert cache.measured.counts["not_written"] == 1
    assert ["takes too long" in record.message for record in caplog.records] == [True]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for each in (file, ready, says):
        os.close(each)
    with open_cache(tmp_path) as cache:
        assert same(cache.get([*SAMPLES, 100]), [*outputs(SAMPLES), None])


def test_sentences(tmp_path):
    with open_cache(tmp_path) as cache:
        with pytest.raises(ValueError, match=r"does not belong to a generation of \(16, 24\) in torch.bfloat16"):
            cache.put([1], [torch.zeros(16, 24)])
        for act in (lambda: cache.get([1.5]), lambda: cache.put([None], outputs([1])), lambda: cache.prefetch([-1])):
            with pytest.raises(ValueError, match=r"cannot be named in the cache"):
                act()
