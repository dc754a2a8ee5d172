"""Bytes of an iteration, against Algorithm 1 as printed and against counts by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.placement import Degrees, ModelShape, RecomputeScope, estimate_traffic
from megatron.placement.bandwidth import saved_activation_bytes
from megatron.placement.pairs import transferring_stages
from megatron.placement.traffic import Kind, count_evictions, point_to_point

SHAPE = ModelShape(
    num_layers=8, num_attention_heads=4, hidden_size=16, sequence_length=32, micro_batch_size=2, pipeline=4, tensor=2
)  # fmt: skip
DEGREES = Degrees(tensor=2, pipeline=4, data=3)


def algorithm_1(p: int, s: int, m: int) -> list[int]:
    """The microbatches that Algorithm 1 evicts, line by line, on the computations of stage s without bubbles."""
    warmup = min(p - s, m)
    computations = [("forward", index) for index in range(warmup - 1)]
    for index in range(m):
        if warmup - 1 + index < m:
            computations.append(("forward", warmup - 1 + index))
        computations.append(("backward", index))
    bound = math.ceil((p + 2) / 2)
    evicted, evictions = set(), []
    for i, (kind, index) in enumerate(computations):
        if kind == "forward":
            if bound - 1 <= index < bound - 1 + warmup - bound:
                evictions.append(computations[i - 1][1])
                evicted.add(evictions[-1])
        elif index in evicted:
            evicted.remove(index)
            if computations[i - 1][0] == "forward":
                evictions.append(computations[i - 3][1])
                evicted.add(evictions[-1])
    return evictions


def test_figure_4():
    """p=4, m=8: stage 0 evicts microbatches 1, 3 and 5, the others nothing."""
    assert algorithm_1(4, 0, 8) == [1, 3, 5]
    assert [count_evictions(4, stage, 8) for stage in range(4)] == [3, 0, 0, 0]


@settings(deadline=None)
@given(st.integers(1, 20).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p - 1), st.integers(1, 60))))
def test_evictions_are_those_of_algorithm_1(case):
    """Whatever p, s and m; and only the stages of section 3.3 evict."""
    p, s, m = case
    assert count_evictions(p, s, m) == len(algorithm_1(p, s, m))
    assert s in transferring_stages(p) or count_evictions(p, s, m) == 0
    assert s not in transferring_stages(p) or count_evictions(p, s, 2 * p) > 0


def test_counts_by_hand():
    """Two layers a stage, m=5, activations of 2 x 32 x 2 x 16 bytes."""
    traffic = estimate_traffic(SHAPE, DEGREES, num_microbatches=5, vocabulary_size=100)
    activation = 2 * 32 * 2 * 16
    assert traffic.pipeline == 5 * activation / 2
    assert traffic.pair == (count_evictions(4, 0, 5) * saved_activation_bytes(SHAPE, RecomputeScope.NONE), 0, 0, 0)
    weights = 2 * (12 * 16**2 + 13 * 16) / 2
    assert traffic.data == (4 * (weights + 800), 4 * weights, 4 * weights, 4 * (weights + 800))
    assert traffic.tensor == (5 * 2 * 4 * activation,) * 4
    assert traffic.embedding == 4 * 800


def test_options_change_what_they_name():
    """No pairs, whole activations, no tied embedding, two more reductions where layers are recomputed."""
    base = estimate_traffic(SHAPE, DEGREES, num_microbatches=5, vocabulary_size=100)

    def changed(**options):
        other = estimate_traffic(SHAPE, DEGREES, num_microbatches=5, vocabulary_size=100, **options)
        return {name for name in vars(base) if getattr(base, name) != getattr(other, name)}, other

    assert changed(balances_activations=False)[0] == {"pair"}
    assert changed(sequence_parallel=False)[0] == {"pipeline"}
    assert changed(tied_embeddings=False)[0] == {"embedding"}
    names, other = changed(num_virtual_stages=3, balances_activations=False)
    assert names == {"pair", "pipeline", "wraparound"}
    assert (other.pipeline, other.wraparound) == (3 * base.pipeline, 2 * base.pipeline)
    ring = [edge for edge in point_to_point(other) if edge.kind is Kind.PIPELINE]
    assert [(edge.first_stage, edge.second_stage) for edge in ring] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert ring[3].bytes_each_way == other.wraparound
    names, other = changed(scope=RecomputeScope.LAYER)
    assert names == {"pair", "tensor"} and other.tensor[0] == 1.5 * base.tensor[0]


def test_single_tensor_rank_reduces_nothing():
    """t=1: no tensor traffic."""
    shape = ModelShape(**{**vars(SHAPE), "tensor": 1})
    degrees = Degrees(tensor=1, pipeline=4, data=1)
    assert estimate_traffic(shape, degrees, num_microbatches=1, vocabulary_size=1).tensor == (0.0,) * 4


def test_bad_numbers_are_refused():
    """No microbatch, or no vocabulary."""
    with pytest.raises(ValueError, match="0 microbatches"):
        estimate_traffic(SHAPE, DEGREES, num_microbatches=0, vocabulary_size=1)
