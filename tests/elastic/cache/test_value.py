"""A value is returned bit for bit, or not at all."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.backend.streams import streams_of
from megatron.elastic.cache.value import HEADER_BYTES, Layout
from tests.elastic.cache.cases import GENERATION, bits, output

SMALL = replace(GENERATION, shape=(3, 2))
CPU = streams_of(torch.device("cpu"))


def stored(generation, sample, tensor=None):
    """Key and bytes of a value."""
    layout = Layout(generation)
    value, place = layout.new_value(CPU)
    place.copy_(output(sample, generation) if tensor is None else tensor)
    key = layout.key(sample)
    return key, bytearray(layout.seal(key, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 3), (2, 3, 4)])
def test_bits(dtype, shape):
    """NaNs, infinities and signed zeros come back as they were; the memory is the caller's and aligned."""
    generation = replace(GENERATION, dtype=dtype, shape=shape)
    tensor = output(1, generation)
    tensor.view(-1)[0] = float("nan")
    key, content = stored(generation, 1, tensor)
    found = Layout(generation).open(key, memoryview(content))
    assert bits(found) == bits(tensor)
    assert found.data_ptr() % 64 == 0
    content[HEADER_BYTES:] = bytes(len(content) - HEADER_BYTES)
    assert bits(found) == bits(tensor)


def test_any_changed_byte_is_found():
    key, content = stored(SMALL, 1)
    layout = Layout(SMALL)
    for index in range(len(content)):
        for change in (1, 128, 255):
            broken = bytearray(content)
            broken[index] ^= change
            if 92 <= index < HEADER_BYTES:  # behind checksum and shape there is nothing
                continue
            assert isinstance(layout.open(key, memoryview(broken)), str), index


@given(st.data())
def test_torn_and_foreign_values_are_found(data):
    """Cut off, extended, mixed from two values, of another key, or anything."""
    layout = Layout(SMALL)
    key, content = stored(SMALL, 1)
    other_key, other = stored(SMALL, 2)
    cut = data.draw(st.integers(0, len(content) - 1))
    within = data.draw(st.integers(HEADER_BYTES, len(content) - 1))
    for broken in (content[:cut], content + b"\0", content[:cut] + bytes(len(content) - cut), data.draw(st.binary())):
        assert bytes(broken) == bytes(content) or isinstance(layout.open(key, memoryview(broken)), str)
    mixed = content[:within] + other[within:]
    assert mixed == content or isinstance(layout.open(key, memoryview(mixed)), str)
    assert isinstance(layout.open(other_key, memoryview(content)), str)
    assert bits(layout.open(other_key, memoryview(other))) == bits(output(2, SMALL))


@pytest.mark.parametrize("change", [{"shape": (2, 3)}, {"shape": (6,)}, {"dtype": torch.float16}, {"depth": 3}])
def test_values_of_another_layout_are_found(change):
    """As many bytes as expected do not make it the value."""
    generation = replace(SMALL, **change)
    _, content = stored(generation, 1)
    assert isinstance(Layout(SMALL).open(Layout(SMALL).key(1), memoryview(content)), str)


def test_names_of_samples():
    """Numbers of any kind, and texts of any length; each has a key of its own that LMDB takes."""
    layout = Layout(GENERATION)
    assert layout.key(3) == layout.key(torch.tensor(3)) != layout.key("3")
    names = [0, 1, 255, 256, 2**64 - 1, "", "a", "ä", "x" * 255, "x" * 256, "x" * 300, "x" * 10_000]
    keys = [layout.key(name) for name in names]
    assert len(set(keys)) == len(names) and max(map(len, keys)) <= 511
    assert all(key.startswith(layout.prefix) for key in keys)


@pytest.mark.parametrize("name", [-1, 2**64, 1.5, None, (1, 2)])
def test_what_cannot_be_a_name(name):
    with pytest.raises(ValueError, match=r"cannot be named in the cache; name it by a whole number"):
        Layout(GENERATION).key(name)


def test_sentences():
    with pytest.raises(ValueError, match=r"takes 4294967296 bytes, and the cache holds values of 2 GiB"):
        Layout(replace(GENERATION, shape=(1 << 31,)))
    with pytest.raises(ValueError, match=r"an output of \(16, 24\) in torch.float32 does not belong"):
        Layout(GENERATION).require(torch.zeros(16, 24))
    with pytest.raises(ValueError, match=r"an output of \(16,\) in torch.bfloat16 does not belong"):
        Layout(GENERATION).require(torch.zeros(16, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_bits_from_a_device():
    """Copied while the host goes on, to pinned memory."""
    streams = streams_of(torch.device("cuda"))
    layout = Layout(GENERATION)
    value, place = layout.new_value(streams)
    assert value.is_pinned()
    place.copy_(output(1).cuda(), non_blocking=True)
    streams.finish(streams.record())
    key = layout.key(1)
    assert bits(layout.open(key, layout.seal(key, value))) == bits(output(1))
