"""Counts, medians, whether reading pays, and the seconds of a folder."""

import math
import os

import pytest

from megatron.elastic.cache import measure
from megatron.elastic.cache.measured import Measured, reading_pays
from tests.elastic.cache.children import call
from tests.full_disk import largest_file


def test_medians_of_samples():
    """They are of calls with any number of samples; calls that found nothing say nothing about time."""
    measured = Measured()
    assert measured.read_seconds is None and measured.write_seconds is None
    for seconds, count in ((8.0, 2), (0.5, 1), (1e9, 0), (6.0, 6)):
        measured.add_read(seconds, count, 100 * count)
        measured.add_write(2 * seconds, count, 10 * count)
    assert measured.read_seconds == 1.0 and measured.write_seconds == 2.0
    measured.add(hits=3, misses=1)
    measured.add(hits=2)
    assert measured.counts == {"hits": 5, "misses": 1, "written": 9, "bytes_read": 900, "bytes_written": 90}


def test_the_last_calls_count():
    measured = Measured()
    for seconds in [9.0] * 1000 + [1.0] * 256:
        measured.add_read(seconds, 1, 1)
    assert measured.read_seconds == 1.0


def test_reading_pays():
    assert reading_pays(1.0, 2.0) and not reading_pays(2.0, 2.0)
    assert reading_pays(1.0, 2.0, write_seconds=3.0)
    assert reading_pays(1.0, 2.0, write_seconds=3.0, num_readings=4)
    assert not reading_pays(1.0, 2.0, write_seconds=3.0, num_readings=3)
    assert not reading_pays(0.0, 2.0, num_readings=0)
    assert not reading_pays(math.inf, 2.0)
    with pytest.raises(ValueError, match=r"computing a sample cannot take -1 seconds; measure it"):
        reading_pays(1.0, -1.0)
    with pytest.raises(ValueError, match=r"reading a sample cannot take nan seconds"):
        reading_pays(math.nan, 1.0)


def test_measure(tmp_path):
    """Larger values take longer; nothing is left there."""
    small, large = measure(tmp_path / "new", 1001), measure(tmp_path / "new", 4 << 20)
    assert 0 < small.read < large.read < 1 and 0 < small.write < large.write < 1 and 0 < small.put < 1
    assert [*(tmp_path / "new").iterdir()] == []


def without_room(folder):
    with largest_file(1 << 18):
        seconds = measure(folder, 1 << 20)
    return [seconds.read, seconds.write, seconds.put], os.listdir(folder)


def test_no_room(tmp_path):
    """Then reading never pays."""
    assert call(without_room, tmp_path) == ([math.inf] * 3, [])
