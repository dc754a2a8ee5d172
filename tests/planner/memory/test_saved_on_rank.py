"""What a rank holds where a stage recomputes some microbatches and keeps the others, and where some move."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.extent import Kept
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, synthesize
from megatron.pipeline.synthesis.moved_rows import most_held
from megatron.pipeline.synthesis.seeds import named_words
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Moment, moments_of
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.memory import RankMemory, estimate_memory
from megatron.planner.memory.parameters import TrainingState
from megatron.planner.memory.recompute import Recompute
from megatron.planner.memory.schedule_demand import demand_of
from tests.draws import draws

SHAPE = Architecture.gpt3(num_layers=10, hidden_size=64, num_attention_heads=4, sequence_length=32, vocabulary_size=128)
SETTING = ActivationSetting(micro_batch_size=1)
WHOLE = replace(SETTING, recompute=Recompute(whole_stage=True))
M = 6


def of_row(text: str, kept: tuple[int, ...] = ()) -> tuple[Moment, ...]:
    return moments_of(map(Instruction.parse, text.split()), (0,), keeps=lambda _, microbatch: microbatch in kept)


def test_kept_and_recomputed_microbatches_at_one_moment():
    """No sum of peaks: when two are recomputed, the kept one is gone, and while it is there, one is."""
    row = "0F0 0F1 0F2 0R1 0B0 0R2 0B1 0B2"
    assert of_row(row, (0,)) == (Moment((2,), (0,), (2,), (0,)), Moment((3,), (0,), (1,), (1,)))
    assert of_row(row.replace("0R1 ", "").replace("0R2 ", ""), (0, 1, 2)) == (Moment((3,), (0,)),)


def estimated(program, layers: tuple[int, ...]) -> tuple[RankMemory, ...]:
    demand = demand_of(program, check(program))
    return estimate_memory(SHAPE, WHOLE if program.recompute else SETTING, TrainingState(), demand, layers=layers)


def counted(program, layers: tuple[int, ...]) -> list[float]:
    """Bytes of activations and of what a backward adds to them, counted along each row."""
    saved, workspace, deferred = activations_of(SHAPE, SETTING).by_stage(layers)
    inputs, working, _ = activations_of(SHAPE, WHOLE).by_stage(layers)
    made = [more - less for more, less in zip(working, workspace, strict=True)]
    peaks = []
    for row in program.rows:
        held, most = {}, 0.0
        for each in row:
            key, stage = (each.stage, each.microbatch), each.stage
            again = key[1] is not None and program.is_recomputed(*key)
            if each.kind is Kind.FORWARD:
                held[key] = inputs[stage] if again else saved[stage]
            elif each.kind is Kind.RECOMPUTE:
                held[key] = inputs[stage] + made[stage]
            elif each.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                most = max(most, sum(held.values()) + workspace[stage])
                held[key] = deferred[stage]
                if each.kind is Kind.BACKWARD:
                    del held[key]
            elif each.kind is Kind.BACKWARD_WEIGHT:
                most = max(most, sum(held.values()))
                del held[key]
        peaks.append(most)
    return peaks


@given(
    st.frozensets(st.sampled_from([Kept(stage, at) for stage in range(4) for at in range(M)])), st.integers(0, 20),
    st.booleans(), st.booleans(),
)  # fmt: skip
@draws(60)
def test_the_estimate_is_the_count_along_the_rows(kept: frozenset[Kept], number: int, splits: bool, in_a_v: bool):
    """For any choice of kept microbatches in registered orders. Where ranks have several stages, the estimate adds the
    largest workspace of those that wait for a backward, which may exceed that of the one that computes."""
    placement, layers = ((0, 1, 1, 0), (3, 2, 2, 3)) if in_a_v else ((0, 1, 2, 3), (3, 2, 3, 2))
    problem = Problem(
        rank_of_stage=placement, num_microbatches=M, costs=Costs(), splits=splits, recomputed=frozenset(range(4)),
        kept=tuple(sorted(kept)),
    )  # fmt: skip
    words = [words for _, words in named_words(problem)]
    if not words:
        return
    program = problem.program(words[number % len(words)])
    most = max(activations_of(SHAPE, SETTING).by_stage(layers)[1])
    for rank, count in zip(estimated(program, layers), counted(program, layers), strict=True):
        parts = rank.parts
        found = parts.activations + parts.deferred + parts.workspace
        assert count * (1 - 1e-12) <= found <= count + most * in_a_v + 1e-6


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("placement", "way", "recomputed"),
    [((0, 1, 2, 3), "host", ()), ((0, 1, 1, 0), "host", (2, 3)), ((0, 1, 2, 3), "pair", ())],
    ids=["host", "in a V, recomputed", "pair"],
)  # fmt: skip
def test_what_moves_counts_as_the_search_counts_it(placement, way, recomputed):
    """Until it has left, and again from the time when it may begin to come back; on a pair rank in its own size."""
    layers = (2, 3, 2, 3)
    saved, _, deferred = activations_of(SHAPE, SETTING).by_stage(layers)
    inputs = [each if stage in recomputed else 0.0
              for stage, each in enumerate(activations_of(SHAPE, WHOLE).by_stage(layers)[0])]  # fmt: skip
    sizes = [inputs[stage] + each if stage in recomputed else each for stage, each in enumerate(saved)]
    problem = Problem(
        rank_of_stage=placement, num_microbatches=12, costs=Costs(latency=2.0, swap_out=0.5, evict=0.5), saved=sizes,
        deferred=deferred, stage_input=inputs, recomputed=frozenset(recomputed), limits=3.2 * max(sizes),
    )  # fmt: skip
    found = synthesize(problem, moves=way, rounds=1)
    assert found.moved
    demand = demand_of(found.program, check(found.program))
    assert any(moment.accepted for of_rank in demand.moments for moment in of_rank) == (way == "pair")
    setting = WHOLE if recomputed else SETTING
    memory = estimate_memory(SHAPE, setting, TrainingState(), demand, layers=layers)
    for rank, held in zip(memory, most_held(problem, found.program), strict=True):
        parts = rank.parts
        if recomputed:  # with what recomputes make, and the workspace of an I
            assert held <= parts.activations + parts.deferred + parts.workspace
        else:
            assert parts.activations + parts.deferred == pytest.approx(held)
