"""A pipeline's memory, put together, and whether it fits."""

from dataclasses import fields, replace

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.planner import (
    GIB,
    Activations,
    ActivationSetting,
    Architecture,
    MemoryParts,
    RankMemory,
    Recompute,
    TrainingState,
    demand_of,
    device_gib,
    estimate_memory,
    judge,
)
from megatron.planner.job.estimate import LOST
from megatron.planner.memory.memory import _num_sides, memory_as_dict, memory_table

SHAPE = Architecture.gpt3(
    num_layers=8, hidden_size=256, num_attention_heads=4, sequence_length=128, vocabulary_size=1024
)


NOTHING, IN_16_BITS = Recompute(), TrainingState()
NO_BYTES = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "workspace", "transfers"), 0.0)


def estimate(
    name: str, layers=(2, 2, 2, 2), *, recompute=NOTHING, single=False, state=IN_16_BITS, **choices
) -> tuple[RankMemory, ...]:
    schedule = Schedule.preset(name, num_stages=len(layers), **choices)
    program = schedule.build([8, 8])
    demand = demand_of(program, check(program))
    return estimate_memory(
        SHAPE, ActivationSetting(micro_batch_size=1, recompute=recompute), state,
        demand.in_one_buffer if single else demand, layers=layers,
    )  # fmt: skip


def test_equation_1():
    """BPipe's equation 1: M(s) = W + A mu(s), with mu(s) = p - s; only the ends have more."""
    memory = estimate("flush")
    size = Activations(SHAPE, ActivationSetting(micro_batch_size=1)).saved(2, is_first=False, is_last=False)
    assert [rank.saved_microbatches for rank in memory] == [4, 3, 2, 1]
    for rank in memory[1:3]:
        assert rank.parts.activations == size * rank.saved_microbatches
    assert memory[0].parts.activations > 4 * size and memory[-1].parts.activations > size
    assert all(rank.total == sum(getattr(rank.parts, part.name) for part in fields(rank.parts)) for rank in memory)


def test_balance_moves_bytes():
    """bpipe takes a microbatch from the first stage to the last, and pays with the copy of one."""
    flush, balanced = estimate("flush"), estimate("bpipe")
    assert balanced[0].parts.activations == pytest.approx(flush[0].parts.activations * 3 / 4)
    assert balanced[3].saved_microbatches == 3 and balanced[0].parts.transfers > flush[0].parts.transfers
    assert balanced[1] == flush[1] and balanced[2] == flush[2]


def test_accepted_microbatches_have_their_own_size():
    """The last stage holds two microbatches of the first, beside one of its own with its logits. Where the first has
    more layers, what the last accepts of it counts as much."""
    first, *_, last = estimate("bpipe")
    assert last.parts.activations == last.bytes_per_microbatch + 2 * first.bytes_per_microbatch
    even, uneven = estimate("bpipe"), estimate("bpipe", (5, 1, 1, 1))
    assert uneven[3].parts.activations > even[3].parts.activations


def test_two_versions_and_the_flag_that_saves_a_buffer():
    """2bw holds two versions and two gradient buffers, or one with the flag; the optimizer's state exists once."""
    flush, two, single = estimate("flush"), estimate("2bw"), estimate("2bw", single=True)
    assert two[0].parts.weights == 2 * flush[0].parts.weights
    assert two[0].parts.gradients == 2 * flush[0].parts.gradients
    assert two[0].parts.optimizer == flush[0].parts.optimizer
    assert single[0].parts.gradients == flush[0].parts.gradients


def test_predictions_keep_and_copy():
    """The weights of 2bw where masters are the true ones; a gradient buffer more where HOLD stands; and copies of
    masters, moments and gradients while a prediction is made, a chunk at a time.
    """
    plain, stage, reduced = (
        estimate("2bw", **more)
        for more in ({}, {"predict": True}, {"predict": True, "reduce_partial": True, "data_parallel": True})
    )
    for rank in range(4):
        assert plain[rank].parts.weights == stage[rank].parts.weights == reduced[rank].parts.weights
        assert plain[rank].parts.gradients == stage[rank].parts.gradients == reduced[rank].parts.gradients / 3 * 2
        assert plain[rank].parts.optimizer == stage[rank].parts.optimizer
        assert stage[rank].parts.workspace == 16 * stage[rank].num_parameters > plain[rank].parts.workspace
    tied = estimate("2bw", predict=True, tied_embeddings=True)
    more = [each.parts.gradients - other.parts.gradients for each, other in zip(tied, stage, strict=True)]
    assert more == [4 * 1024 * 256, 0, 0, 4 * 1024 * 256]
    many = TrainingState().prediction(10**9, largest=10**8)
    assert many == 4 * (64 * 2**20 + 4 * 10**8) < TrainingState().prediction(10**9, largest=10**9) == 16 * 10**9


def test_on_how_many_sides_a_rank_exchanges_tensors():
    """The ends of a model have one; a stage between others of its rank has none, and another of them counts."""
    for rank_of_stage, sides in (
        ((0, 1, 2), (1, 2, 1)),
        ((0, 1, 0, 1), (1, 1)),
        ((0, 1, 1, 0), (1, 1)),
        ((1, 0, 0, 0), (1, 1)),
        ((2, 1, 0, 0, 0), (1, 2, 1)),
        ((0,), (0,)),
    ):
        stages = stages_by_rank(rank_of_stage)
        assert tuple(_num_sides(each, rank_of_stage) for each in stages) == sides, rank_of_stage


def test_several_stages_on_a_rank():
    """An interleaved rank holds the parameters of its stages and what all of them save together."""
    memory = estimate("interleaved", (1,) * 8, num_virtual_stages=2)
    assert [rank.stages for rank in memory] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert sum(rank.num_parameters for rank in memory) == sum(rank.num_parameters for rank in estimate("flush"))
    one = Activations(SHAPE, ActivationSetting(micro_batch_size=1)).saved(1, is_first=False, is_last=False)
    assert memory[1].parts.activations == one * memory[1].saved_microbatches


def test_recomputation_trades_activations_for_workspace():
    """From scope to scope less is saved and more is recomputed at once; a whole stage keeps its input only."""
    scopes = [
        NOTHING, Recompute(modules=frozenset({"core_attn"})), Recompute(method="uniform"), Recompute(whole_stage=True)
    ]  # fmt: skip
    parts = [estimate("flush", recompute=scope)[1].parts for scope in scopes]
    assert [each.activations for each in parts] == sorted((each.activations for each in parts), reverse=True)
    assert [each.workspace for each in parts] == sorted(each.workspace for each in parts)
    assert parts[0].workspace == 0 and parts[3].activations == 3 * 2 * 256 * 128
    assert [scope.scope for scope in scopes] == ["none", "attention", "layer", "stage"]
    # Where there is nothing to gain, a layer's saved input is not counted twice.
    single = [estimate("flush", (8,), recompute=scope)[0].total for scope in scopes[:3]]
    assert single == sorted(single, reverse=True)
    one = [estimate("flush", (1, 3, 3, 1), recompute=scope)[3].total for scope in scopes[:3]]
    assert one[0] == pytest.approx(one[2])


def test_verdict():
    """The fullest rank decides; what tensors do not get is borderline."""
    memory = estimate("flush")
    needed = max(rank.total for rank in memory) / GIB
    verdicts = [judge(memory, needed * factor) for factor in (0.9, 1.01, 1.2)]
    assert [verdict.word for verdict in verdicts] == ["out of memory", "borderline", "fits"]
    assert verdicts[0].rank == verdicts[2].rank and verdicts[0].free_gib == pytest.approx(-0.1 * needed)
    assert verdicts[2].spare_gib == pytest.approx((1.2 * (1 - LOST) - 1) * needed)


def test_a_verdict_is_of_the_fullest_rank_where_that_does_not_fit():
    """One rank leaves least beside what is lost, and another one does not fit in its step."""
    first, second = (replace(rank, parts=MemoryParts(**{**NO_BYTES, **parts})) for rank, parts in zip(
        estimate("flush"), ({"activations": 76 * GIB}, {"weights": 60 * GIB, "step": 22 * GIB}), strict=False
    ))  # fmt: skip
    verdict = judge([first, second], 80.0)
    assert verdict.word == "out of memory" and verdict.rank == second.rank and verdict.free_gib == pytest.approx(-2)
    assert verdict.spare_gib == verdict.free_gib  # of that rank, which misses it in its step


def test_copies_of_the_step_do_not_meet_activations():
    """FP32 copies of 16-bit gradients: made in the step, or kept; where batches overlap, they meet."""
    for schedule, keeps, meets in (("flush", False, False), ("flush", True, True), ("2bw", False, True)):
        state = TrainingState(gradient_bytes=2, keeps_gradient_copies=keeps)
        for rank in estimate(schedule, state=state):
            copies = 4 * rank.num_parameters
            assert rank.parts.step == (0 if meets else copies)
            moving = rank.parts.activations + rank.parts.workspace + rank.parts.transfers
            assert rank.total == rank.parts.held - min(rank.parts.step, moving)


def test_names_of_gpus():
    """A GPU is named, or its memory given."""
    assert device_gib("A100-80") > 79 and device_gib("24") == 24
    for text in ("P100", "-1", "0", "inf", "nan", ""):
        with pytest.raises(ValueError, match="is no GPU; give A100-80, "):
            device_gib(text)


@pytest.mark.parametrize("plain", [True, False])
def test_table_and_dictionary(plain):
    """Both hold every rank and part."""
    memory = estimate("interleaved", (1,) * 8, num_virtual_stages=2)
    table = memory_table(memory, plain=plain)
    assert table.row_count == 4 and table.columns[0].header == "rank: stages"
    found = memory_as_dict(memory[0])
    assert found["total_bytes"] == memory[0].total
    assert (
        sum(value for name, value in found.items() if name.endswith("_bytes") and name != "total_bytes")
        == (found["total_bytes"])
    )


def test_a_pair_behind_a_frozen_stage_has_the_size_of_its_partner():
    """Stages of 1 (frozen), 2, 2, 2, 1 layers on four ranks: the last accepts what the first trained one saves."""
    layers = (1, 2, 2, 2, 1)
    choices = {"rank_of_stage": (0, 0, 1, 2, 3), "num_frozen": 1}
    memory = estimate("bpipe", layers, **choices)
    activations = Activations(SHAPE, ActivationSetting(micro_batch_size=1))
    of_the_pair = activations.saved(2, is_first=False, is_last=False)
    assert memory[-1].parts.activations == memory[-1].saved_microbatches * of_the_pair  # the largest are counted first


def test_a_frozen_stage_needs_no_workspace_of_a_backward():
    """Under whole-stage recompute a trained stage of 6 layers holds them all at once, a frozen one a layer."""
    recompute = Recompute(whole_stage=True)
    trained = estimate("flush", (6, 2), recompute=recompute)
    frozen = estimate("flush", (6, 2), recompute=recompute, num_frozen=1)
    assert frozen[0].parts.workspace == pytest.approx(trained[0].parts.workspace / 6, rel=0.05)
    assert frozen[0].bytes_per_microbatch == 0 and frozen[0].parts.activations == 0
