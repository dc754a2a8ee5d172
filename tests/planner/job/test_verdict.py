"""What a GPU has to leave beside tensors is counted alike, whatever is known of a pipeline."""

import pytest

from megatron.planner import Architecture
from megatron.planner.job.estimate import FEWEST, LOST, OPERANDS_OF_LAYER, judge_fullest, lost_gib, waiting_gib
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.memory import GIB

SHAPE = Architecture.gpt3(
    num_layers=4, hidden_size=1024, num_attention_heads=16, sequence_length=2048, vocabulary_size=51200
)


def setting(**changes) -> ActivationSetting:
    return ActivationSetting(**{"tensor": 2, "micro_batch_size": 4, "sequence_parallel": True, **changes})


def test_operands_that_wait():
    """Of as many layers as wait at least: 16-bit numbers of all tokens of a microbatch. None where nothing is split."""
    assert waiting_gib(SHAPE, setting()) * GIB == FEWEST * OPERANDS_OF_LAYER * 4 * 2048 * 1024 * 2
    assert waiting_gib(SHAPE, setting(sequence_parallel=False)) == 0
    assert waiting_gib(SHAPE, setting(tensor=1)) == 0


@pytest.mark.parametrize(("waiting", "word"), [(0.0, "fits"), (5.0, "borderline"), (20.0, "borderline")])
def test_the_fullest_rank_alone(waiting, word):
    """It leaves what is lost and what waits, or is borderline; it is out of memory by its tensors alone."""
    verdict = judge_fullest(70 * GIB, 80.0, rank=3, waiting=waiting)
    assert (verdict.word, verdict.rank, verdict.free_gib) == (word, 3, 10)
    assert verdict.spare_gib == pytest.approx(10 - 80 * LOST - waiting) and not verdict.slowed
    assert verdict.free_gib - verdict.spare_gib == pytest.approx(lost_gib(80.0, waiting=waiting))
    assert judge_fullest(81 * GIB, 80.0, rank=3, waiting=waiting).word == "out of memory"
