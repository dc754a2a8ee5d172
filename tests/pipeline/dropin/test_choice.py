"""The schedule that arguments name, and the batches of a run."""

import pytest

from megatron.pipeline.dropin.choice import batches_of, prove, schedule_of
from tests.pipeline.dropin.arguments import arguments


def test_where_megatron_reduces_the_program_does_not():
    """Flush has no reductions of its own, with replicas and a tied embedding; 2bw has both."""
    words = {}
    for name in ("flush", "2bw"):
        args = arguments(f"--pipeline-schedule {name}", data_parallel_size=2)
        program = schedule_of(args, tied_embeddings=True).build((4, 4))
        words[name] = {instruction.kind.name for row in program.rows for instruction in row}
    assert not words["flush"] & {"REDUCE_GRAD", "REDUCE_EMBED"} and words["2bw"] >= {"REDUCE_GRAD", "REDUCE_EMBED"}


def test_interleaved_takes_their_group_of_microbatches():
    """Stages are dealt out in turn, as Megatron-LM's providers do."""
    args = arguments(
        "--pipeline-schedule interleaved", virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=4
    )
    schedule = schedule_of(args, tied_embeddings=False)
    assert schedule.rank_of_stage == (0, 1, 0, 1) and schedule.microbatch_group_size == 4


def test_batches_that_grow():
    """Each size once, in order, as microbatches of a pipeline."""
    assert batches_of(arguments("", global_batch_size=8)) == [4]
    grows = arguments("", rampup_batch_size=["8", "4", "100"], global_batch_size=16, data_parallel_size=2)
    assert batches_of(grows) == [2, 3, 4]
    prove(schedule_of(arguments("--pipeline-schedule 2bw"), tied_embeddings=False), batches_of(grows))


def test_a_batch_that_the_schedule_does_not_take():
    args = arguments("--pipeline-schedule interleaved", virtual_pipeline_model_parallel_size=2, global_batch_size=6)
    with pytest.raises(ValueError, match="3"):
        prove(schedule_of(args, tied_embeddings=False), batches_of(args))
