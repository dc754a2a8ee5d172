"""Seconds of a folder."""

import math
import os

import pytest

from megatron.elastic.cache import measure
from tests.elastic.cache.children import call

pytest.importorskip("lmdb")


def test_measure(tmp_path):
    """Larger values take longer; nothing is left there."""
    small, large = measure(tmp_path / "new", 1001), measure(tmp_path / "new", 4 << 20)
    assert 0 < small.read < large.read < 1 and 0 < small.write < large.write < 1 and 0 < small.put < 1
    assert [*(tmp_path / "new").iterdir()] == []


def without_room(folder):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    seconds = measure(folder, 1 << 20)
    return [seconds.read, seconds.write, seconds.put], os.listdir(folder)


def test_no_room(tmp_path):
    """Then reading never pays."""
    assert call(without_room, tmp_path) == ([math.inf] * 3, [])
