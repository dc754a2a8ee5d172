"""Norms that wait on the host: they come back as they were, in one order, once."""

import pytest
import torch

from megatron.pipeline.runtime.relay.norms_on_host import NormsOnHost


def scalars(**values):
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}


def test_they_come_back_in_order():
    """In whichever order stages note theirs, with gaps and one by one; the last that was noted counts."""
    norms = NormsOnHost("abcde", dtype=torch.float32)
    norms.note(4, scalars(e=0.1, d=0.7))
    norms.note(4, {})
    norms.note(4, scalars(a=3.0, c=1.5))
    norms.note(4, scalars(d=0.3))
    assert norms.take(4) == scalars(a=3.0, c=1.5, d=0.3, e=0.1) and list(norms.take(4)) == []


def test_batches_are_apart():
    """What one has noted another does not get, and one has to be taken before the next begins."""
    norms = NormsOnHost("ab", dtype=torch.float32)
    norms.note(1, scalars(a=1.0))
    with pytest.raises(AssertionError, match="of version 1 are there, and 2 notes some"):
        norms.note(2, scalars(b=2.0))
    with pytest.raises(AssertionError, match="of version 1 are there, and not of 2"):
        norms.take(2)
    taken = norms.take(1)
    norms.note(2, scalars(a=5.0, b=2.0))
    assert taken == scalars(a=1.0), "what was taken is not written again"
    assert norms.take(2) == scalars(a=5.0, b=2.0)


def test_nothing_to_count():
    """A replica that counts nothing."""
    norms = NormsOnHost((), dtype=torch.float32)
    norms.note(1, {})
    assert norms.take(1) == {}
