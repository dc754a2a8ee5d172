"""Bytes of an iteration, against every SEND and EVICT of the program and against counts by hand."""

from collections import Counter

import pytest

from megatron.pipeline.program.instruction import Kind as Instruction
from megatron.pipeline.schedules import Schedule
from megatron.placement import Degrees, ModelShape, RecomputeScope, TrafficKind, count_transfers, estimate_traffic
from megatron.placement.bandwidth import saved_activation_bytes
from megatron.placement.counts import MessageCounts
from megatron.placement.traffic import point_to_point

SHAPE = ModelShape(
    num_layers=8, num_attention_heads=4, hidden_size=16, sequence_length=32, micro_batch_size=2, pipeline=4, tensor=2
)  # fmt: skip
DEGREES = Degrees(tensor=2, pipeline=4, data=3)
COUNTS = MessageCounts(num_microbatches=5, num_virtual_stages=1, activations=(5, 5, 5, 0), evictions=(2, 0, 0, 0))
ACTIVATION = 2 * 32 * 2 * 16


def test_figure_4():
    """p=4, m=8: stage 0 evicts three microbatches, and each boundary is crossed by eight."""
    counts = count_transfers(Schedule.preset("bpipe", num_stages=4), 8)
    assert counts == MessageCounts(
        num_microbatches=8, num_virtual_stages=1, activations=(8, 8, 8, 0), evictions=(3, 0, 0, 0)
    )
    assert counts.evictors == (0,)


@pytest.mark.parametrize(
    ("preset", "p", "v", "m", "balance"),
    [
        ("gpipe", 3, 1, 5, False),
        ("flush", 4, 1, 8, False),
        ("bpipe", 6, 1, 3, True),
        ("bpipe", 7, 1, 20, True),
        ("2bw", 4, 1, 6, False),
        ("2bw", 6, 1, 9, True),
        ("pipedream", 3, 1, 1, False),
        ("interleaved", 2, 2, 4, False),
        ("interleaved", 4, 2, 8, True),
        ("interleaved", 4, 3, 12, True),
    ],
)
def test_bytes_are_what_the_program_sends(preset, p, v, m, balance):
    """Every SEND and every move of a later batch, from rank to rank; the last rank sends to the first where v > 1."""
    schedule = Schedule.preset(preset, num_stages=p * v, num_virtual_stages=v, balance=balance)
    shape = ModelShape(**{**vars(SHAPE), "num_layers": p * v, "pipeline": p, "num_virtual_stages": v})
    counts = count_transfers(schedule, m)
    traffic = estimate_traffic(shape, Degrees(tensor=2, pipeline=p, data=1), counts, vocabulary_size=9)
    expected = Counter()
    num_batches = 6
    one, more = schedule.build((m,) * num_batches), schedule.build((m,) * (num_batches + 1))
    sizes = {TrafficKind.PIPELINE: ACTIVATION / 2, TrafficKind.PAIR: saved_activation_bytes(shape, RecomputeScope.NONE)}
    step = {Instruction.SEND_F: 1, Instruction.SEND_B: -1}
    for program, sign in ((more, 1), (one, -1)):
        for rank, row in enumerate(program.rows):
            for instruction in row:
                if instruction.kind in step:
                    target = program.rank_of_stage[instruction.stage + step[instruction.kind]]
                    expected[TrafficKind.PIPELINE, rank, target] += sign * sizes[TrafficKind.PIPELINE]
                elif instruction.kind in (Instruction.EVICT, Instruction.RETURN):
                    expected[TrafficKind.PAIR, rank, p - 1 - rank] += sign * sizes[TrafficKind.PAIR]
    found = Counter()
    for edge in point_to_point(traffic):
        if edge.kind in sizes:
            found[edge.kind, edge.first_stage, edge.second_stage] += edge.bytes_each_way
            found[edge.kind, edge.second_stage, edge.first_stage] += edge.bytes_each_way
    assert found == {key: pytest.approx(value) for key, value in expected.items() if value}
    assert counts.evictors == schedule.evicting_ranks((m,))
    assert ((TrafficKind.PIPELINE, p - 1, 0) in found) == (v > 1 or p == 2)


def test_counts_by_hand():
    """Two layers a stage, m=5, activations of 2 x 32 x 2 x 16 bytes."""
    traffic = estimate_traffic(SHAPE, DEGREES, COUNTS, vocabulary_size=100)
    assert traffic.pipeline == (5 * ACTIVATION / 2,) * 3 + (0,)
    assert traffic.pair == (2 * saved_activation_bytes(SHAPE, RecomputeScope.NONE), 0, 0, 0)
    weights = 2 * (12 * 16**2 + 13 * 16) / 2
    assert traffic.data == (4 * (weights + 800), 4 * weights, 4 * weights, 4 * (weights + 800))
    assert traffic.tensor == (5 * 2 * 4 * ACTIVATION,) * 4
    assert traffic.embedding == 4 * 800


def test_options_change_what_they_name():
    """Whole activations, wider elements, no tied embedding, two more reductions where layers are recomputed."""
    base = estimate_traffic(SHAPE, DEGREES, COUNTS, vocabulary_size=100)

    def changed(shape=SHAPE, **options):
        other = estimate_traffic(shape, DEGREES, COUNTS, vocabulary_size=100, **options)
        return {name for name in vars(base) if getattr(base, name) != getattr(other, name)}, other

    names, other = changed(ModelShape(**{**vars(SHAPE), "sequence_parallel": False}))
    assert names == {"pipeline", "pair"} and other.pipeline[0] == 2 * base.pipeline[0]
    names, other = changed(ModelShape(**{**vars(SHAPE), "element_bytes": 4}))
    assert names == {"pipeline", "pair", "tensor"} and other.tensor[0] == 2 * base.tensor[0]
    names, other = changed(gradient_bytes=2)
    assert names == {"data", "embedding"} and other.data[1] == base.data[1] / 2
    assert changed(tied_embeddings=False)[0] == {"embedding"}
    names, other = changed(scope=RecomputeScope.LAYER)
    assert names == {"pair", "tensor"} and other.tensor[0] == 1.5 * base.tensor[0]


def test_single_tensor_rank_reduces_nothing():
    """t=1: no tensor traffic."""
    shape = ModelShape(**{**vars(SHAPE), "tensor": 1})
    degrees = Degrees(tensor=1, pipeline=4, data=1)
    assert estimate_traffic(shape, degrees, COUNTS, vocabulary_size=1).tensor == (0.0,) * 4


def test_bad_numbers_are_refused():
    """No microbatch, or no vocabulary."""
    with pytest.raises(ValueError, match="0 microbatches"):
        count_transfers(Schedule.preset("flush", num_stages=4), 0)
    with pytest.raises(ValueError, match="vocabulary of 0"):
        estimate_traffic(SHAPE, DEGREES, COUNTS, vocabulary_size=0)


def test_behind_a_frozen_prefix():
    """Rank 0 is frozen and rank 1 half: no gradient comes back to either stage, and the ranks that train are paired."""
    schedule = Schedule.preset("bpipe", num_stages=7, num_frozen=2, rank_of_stage=(0, 1, 1, 2, 3, 4, 5))
    counts = count_transfers(schedule, 8)
    assert counts.activations == (4, 8, 8, 8, 8, 0)
    assert counts.pair_of_rank == (0, 5, 4, 3, 2, 1)
    assert counts.evictors == schedule.evicting_ranks((8,)) == (1,)
    shape = ModelShape(**{**vars(SHAPE), "num_layers": 12, "pipeline": 6})
    degrees, trained = Degrees(tensor=2, pipeline=6, data=2), (0, 1, 2, 2, 2, 2)
    traffic = estimate_traffic(shape, degrees, counts, vocabulary_size=100, trained_layers=trained)
    a_layer = saved_activation_bytes(shape, RecomputeScope.NONE) / 2
    assert [(edge.first_stage, edge.second_stage, edge.bytes_each_way) for edge in point_to_point(traffic)
            if edge.kind is TrafficKind.PAIR] == [(1, 5, counts.evictions[1] * a_layer)]  # fmt: skip
    weights = (12 * 16**2 + 13 * 16) / 2
    assert traffic.data == (*(4 * layers * weights for layers in trained[:-1]), 4 * (2 * weights + 800))
