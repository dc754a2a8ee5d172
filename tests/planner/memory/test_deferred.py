"""What waits for W: its bytes, and the moment at which a rank holds most."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.schedules import ORDERS, Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves
from megatron.planner import Activations, ActivationSetting, Architecture, demand_of
from megatron.planner.memory.demand import Moment, largest_moments, moments_of, most
from megatron.planner.memory.memory import estimate_memory
from megatron.planner.memory.parameters import TrainingState
from megatron.planner.memory.recompute import Recompute, RecomputeScope
from megatron.planner.memory.schedule_demand import closed_form_demand, proved_demand, schedule_demand
from tests.draws import draws
from tests.pipeline.runtime import made_up_orders

H, S, V = 64, 32, 128
SHAPE = Architecture.gpt3(num_layers=16, hidden_size=H, num_attention_heads=4, sequence_length=S, vocabulary_size=V)


IN_A_V = "zbv", "v-half", "v-min"
HALVES = "zb-h1", "zb-h2", "interleaved-zb", *IN_A_V


def schedule_of(name: str, p: int) -> Schedule:
    if name == "2bw-zb-h1":
        return Schedule(order="zb-h1", weights="2bw", num_stages=p)
    v = 2 if name in ORDERS and ORDERS[name].interleaves else 1
    return Schedule(
        order=name, weights="flush", num_stages=p * v,
        rank_of_stage=(*range(p), *reversed(range(p))) if name in IN_A_V else None, num_virtual_stages=v,
    )  # fmt: skip


def test_bytes_of_a_layer_by_hand():
    """16 bits: inputs of 4 linears are h, h, h and 4h wide, the gradients behind them 3h, h, 4h and h: 32 h bytes a
    token. The head has its input and the gradient of the logits. (A test of the runtime finds as many bytes there.)"""
    deferred = Activations(SHAPE, ActivationSetting(micro_batch_size=2)).deferred
    assert deferred(3, is_first=True, is_last=False) == 3 * 32 * H * 2 * S
    assert deferred(1, is_first=False, is_last=True) == (32 * H + 2 * (H + V)) * 2 * S


def test_bytes_over_tensor_ranks():
    """What is cut by heads or columns is divided. Of the rest, with split sequences, inputs wait in parts until W
    gathers them, or gathered, as Transformer Engine keeps them; gradients that I has gathered are whole."""
    cut, whole = (7 + 9 - 4) * H, 2 * H
    for split in (False, True):
        setting = ActivationSetting(micro_batch_size=1, tensor=4, sequence_parallel=split)
        inputs = 2 * H / (4 if split else 1)
        found = Activations(SHAPE, setting).deferred(1, is_first=False, is_last=False)
        assert found == pytest.approx(2 * S * (cut / 4 + inputs + whole))
        gathered = Activations(SHAPE, replace(setting, defers_gathered=True)).deferred(1, is_first=False, is_last=False)
        assert gathered == pytest.approx(2 * S * (cut / 4 + 2 * H + whole))


@draws(15)
@given(
    st.sampled_from([*HALVES, "2bw-zb-h1", "split-late", "split-in-part", "split-interleaved"]),
    st.integers(1, 5), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_the_peak_is_that_of_both_together(name: str, p: int, groups: int, recompute: bool):
    """Of any order with halves: activations and what is deferred, at the moment that the simulator finds in the
    program, also where recomputation saves less than W needs. It is no sum of two peaks."""
    with made_up_orders.registered():
        schedule = schedule_of(name, p)
        m = groups * 4 * p
        program = schedule.build((m,) * (1 if schedule.weights.drains else 3))
        demand = demand_of(program, check(program))
        layers = [1 + stage % 2 for stage in range(schedule.num_stages)]
        shape = Architecture(**{**vars_of(SHAPE), "num_layers": sum(layers)})
        setting = ActivationSetting(micro_batch_size=1, recompute=recomputed(recompute))
        activations, last = Activations(shape, setting), len(layers) - 1
        ends = [{"is_first": stage == 0, "is_last": stage == last} for stage in range(len(layers))]
        sizes = MemorySizes(
            activations=[activations.saved(count, **end) for count, end in zip(layers, ends, strict=True)],
            deferred=[activations.deferred(count, **end) for count, end in zip(layers, ends, strict=True)],
        )
        curves = memory_curves(simulate(program, Costs()), sizes, schedule.weights)
        for rank, curve in zip(
            estimate_memory(shape, setting, TrainingState(), demand, layers=layers), curves, strict=True
        ):
            assert rank.parts.activations + rank.parts.deferred == pytest.approx(curve.peak)
            assert rank.parts.deferred <= max(curve.parts["deferred"])


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_nothing_is_recomputed_in_a_w(name: str):
    """With tensor ranks of split sequences W needs more than a microbatch saves, so that all wait for W at the peak:
    what an I recomputes adds only what it exceeds that by, and recomputing more takes no more memory."""
    schedule = schedule_of(name, 4)
    demand, last = closed_form_demand(schedule, 8), schedule.num_stages - 1
    totals = []
    for scope in RecomputeScope:
        setting = ActivationSetting(
            micro_batch_size=1, tensor=4, sequence_parallel=True, saves_scores=False, recompute=Recompute.of(scope)
        )
        layers = (16 // schedule.num_stages,) * schedule.num_stages
        found = estimate_memory(SHAPE, setting, TrainingState(), demand, layers=layers)
        totals.append([rank.total for rank in found])
        activations = Activations(SHAPE, setting)
        for rank in found:
            ends = [{"is_first": stage == 0, "is_last": stage == last} for stage in rank.stages]
            most = max(activations.workspace(layers[0], **each) for each in ends)
            assert 0 <= rank.parts.workspace <= most
    for less, more in pairwise(totals):
        assert all(high >= low for high, low in zip(less, more, strict=True))


def vars_of(shape: Architecture) -> dict:
    return {field.name: getattr(shape, field.name) for field in fields(shape)}


def recomputed(layers: bool) -> Recompute:
    return Recompute.of(RecomputeScope.LAYER if layers else RecomputeScope.NONE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["zb-h1", "zbv", "2bw-zb-h1"])
def test_the_closed_form_is_that_of_proved_programs(name: str):
    """Of zb-h1 and zbv, in every number, but for receives that two ranks use at once, and batches that do not fill the
    pipeline, which `schedule_demand` proves."""
    for p in (1, 2, 3, 4, 6):
        for m in range(p, 3 * p + 2):
            schedule = schedule_of(name, p)
            exact, closed, chosen = (each(schedule, m) for each in (proved_demand, closed_form_demand, schedule_demand))
            for field in fields(exact):
                values = [getattr(each, field.name) for each in (exact, closed, chosen)]
                if field.name == "receives_ahead":
                    assert all(a <= b <= a + 1 for a, b in zip(values[0], values[1], strict=True))
                    continue
                assert values[2] == values[0], (p, m, field.name)
                if m >= 2 * p:
                    assert values[1] == values[0], (p, m, field.name)


def moment(numbers: Sequence[int]) -> Moment:
    """Of a rank with one stage."""
    return Moment(*((each,) for each in numbers))


def test_moments():
    """Only what no other moment exceeds is kept; a run of several programs has the moments of all."""
    assert largest_moments(map(moment, ([1, 0], [2, 0], [1, 1], [2, 0], [0, 1]))) == (moment((1, 1)), moment((2, 0)))
    split, plain = (proved_demand(Schedule.preset(name, num_stages=2), 6) for name in ("zb-h1", "flush"))
    assert split.moments == ((moment((1, 1)), moment((2, 0))), (moment((0, 2)), moment((1, 1))))
    assert plain.moments == ()
    assert most([split, plain]).moments == most([plain, split]).moments == split.moments
    assert most([plain, plain]).moments == ()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0F1 0R0 0I0 0W0 0R1 0I1 0W1", ((1, 1, 0), (2, 0, 1))),
        ("0F0 0F1 0R0 0R1 0I0 0W0 0I1 0W1", ((1, 1, 1), (2, 0, 2))),
    ],
)
def test_recomputed_activations_count_from_their_recompute_on(row, expected):
    """A W beside which nothing is recomputed holds none of them; two that are recomputed at once count twice."""
    assert moments_of(map(Instruction.parse, row.split()), (0,)) == tuple(map(moment, expected))
    for name in ("zb-h1", "zbv"):
        schedule = replace(schedule_of(name, 2), recompute=True)
        assert closed_form_demand(schedule, 6).moments == proved_demand(schedule, 6).moments


def test_whole_backwards_defer_nothing():
    demand = proved_demand(Schedule.preset("flush", num_stages=4), 8)
    memory = estimate_memory(SHAPE, ActivationSetting(micro_batch_size=1), TrainingState(), demand, layers=(4, 4, 4, 4))
    assert all(rank.parts.deferred == 0 for rank in memory)
