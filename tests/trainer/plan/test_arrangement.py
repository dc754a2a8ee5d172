"""What `args` say is that of their arrangement, also behind a change."""

from dataclasses import replace

import pytest

from megatron import backend

backend.install()  # before anything imports megatron.core

from megatron.elastic.stages import Arrangement
from megatron.trainer.arguments.rules.schedule import behind_frozen
from megatron.trainer.plan.arrangement import arranged
from tests.trainer.arguments.command_line import arguments

FLAGS = (
    "--freeze-training --freeze-interval 2 --elastic-pipeline --untie-embeddings-and-output-weights --num-layers 4 "
    "--pipeline-model-parallel-size 4 --global-batch-size 16"
)


@pytest.mark.parametrize("preset", ["flush", "2bw", "bpipe"])
def test_the_schedule_is_that_of_the_arrangement(preset):
    """At first, with fewer ranks, behind frozen layers, and at first again; one that cannot be leaves it as it was."""
    args = arguments(f"{FLAGS} --pipeline-schedule {preset}", world_size=4)
    first = Arrangement(4, 1, args.micro_batch_size, (1, 1, 1, 1))
    of_flags, moves = args.schedule, args.moves_activations
    assert of_flags.num_ranks == 4 and not of_flags.data_parallel
    args = arranged(replace(args, first_arrangement=first), first)
    assert (args.schedule, args.moves_activations) == (of_flags, moves)
    for wanted in (Arrangement(2, 2, args.micro_batch_size, (3, 1), 2), Arrangement(1, 4, args.micro_batch_size, (4,))):
        args = arranged(args, wanted)
        assert args.schedule == behind_frozen(args, wanted.stages)
        assert args.schedule.num_ranks == wanted.pipeline and args.schedule.num_frozen == wanted.stages.num_frozen
        assert args.schedule.data_parallel and not args.moves_activations
        with pytest.raises(ValueError, match="not divisible"):
            arranged(args, Arrangement(1, 4, 5, (4,)))
    args = arranged(args, first)
    assert (args.schedule, args.moves_activations) == (of_flags, moves)
