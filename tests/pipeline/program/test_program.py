"""What a program says about its batches, stages and versions."""

import pytest

from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import TWO_BW, weight_policy

PROGRAM = Program(
    rows=((), ()),
    rank_of_stage=(0, 1, 0, 1),
    batches=(4, 6, 2),
    weights=TWO_BW,
    first_batch=3,
    first_microbatch=20,
)


def test_batches_and_microbatches_are_numbered_over_the_run():
    """batch_of and microbatches_of agree, count from the program's place in the run, and refuse what lies outside."""
    assert [list(PROGRAM.microbatches_of(batch)) for batch in (3, 4, 5)] == [
        [20, 21, 22, 23],
        [24, 25, 26, 27, 28, 29],
        [30, 31],
    ]
    for batch in (3, 4, 5):
        assert {PROGRAM.batch_of(microbatch) for microbatch in PROGRAM.microbatches_of(batch)} == {batch}
    for microbatch in (19, 32):
        with pytest.raises(ValueError, match="which has 20 to 31"):
            PROGRAM.batch_of(microbatch)
    for batch in (2, 6):
        with pytest.raises(ValueError, match="which has 3 to 5"):
            PROGRAM.microbatches_of(batch)


def test_extent():
    """Numbers of stages, ranks and microbatches; which stages a rank has; which tensors cross ranks."""
    assert (PROGRAM.num_stages, PROGRAM.num_ranks, PROGRAM.num_microbatches) == (4, 2, 12)
    assert PROGRAM.stages_of(1) == (1, 3)
    assert PROGRAM.crosses(1, 2)
    assert not PROGRAM.crosses(3, 4)
    assert not PROGRAM.crosses(-1, 0)
    assert not PROGRAM.crosses(0, 2)
    assert PROGRAM.graph.is_chain and [PROGRAM.graph.depth(stage) for stage in range(4)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("weights", "first_batch", "versions"),
    [
        ("flush", 0, (0,)),
        ("flush", 5, (5,)),
        ("2bw", 0, (0,)),
        ("2bw", 1, (0, 1)),
        ("2bw", 5, (4, 5)),
        ("stash", 5, (5,)),
    ],
)
def test_entry_versions(weights: str, first_batch: int, versions: tuple[int, ...]):
    """A drained state before batch a has made version a; 2bw has kept the one before, which batch a will use."""
    program = Program((0,), (1,), weight_policy(weights), first_batch=first_batch, rows=())
    assert program.entry_versions == versions
