"""Balanced pipelines that run for long."""

from dataclasses import replace

import pytest

from tests import workers
from tests.pipeline.runtime.activations.balance_cases import ACTIVATION_BYTES

NUM_BATCHES, WARMUP = 200, 20
TOLERANCE = 4 << 20
"""Bytes by which the memory of a process may grow after the warm-up: arenas of Python and malloc, of 1 MiB and less,
that fill at another place. If one emulated microbatch a batch were kept, it would be 45 MiB. What the real stages save
is small, so their tensors are counted.
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["emulated", "real"])
def test_nothing_grows_over_200_batches(kind):
    """bpipe on 8 stages: memory, open files, threads, tensors and buffers are after 200 batches what they were after
    20, and between two batches nothing is saved or on its way.
    """
    assert (NUM_BATCHES - WARMUP) * ACTIVATION_BYTES >= 10 * TOLERANCE
    outcomes = workers.run(
        8,
        f"tests.pipeline.runtime.activations.balanced_endurance_cases:{kind}",
        num_batches=NUM_BATCHES,
        warmup=WARMUP,
        timeout=240,
    )
    for before, after in outcomes:
        assert after.resident - before.resident < TOLERANCE
        assert replace(before, resident=0) == replace(after, resident=0)
        assert (after.saved_bytes, after.incomplete) == (0, 0)
    assert sum(after.buffers for _, after in outcomes) > 0
