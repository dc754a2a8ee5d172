"""The critical path bounds the makespan: it has no gaps, and costs on it, and only these, make a run longer."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import SHARED_REDUCTIONS, UPDATES, Kind
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.critical_path import critical_path
from tests.draws import draws
from tests.pipeline.simulate.programs import build, without_transfers


def path_of(program, costs):
    return critical_path(simulate(program, costs), costs)


def test_the_path_of_a_flush_goes_down_and_up():
    """4 stages, 4 microbatches: the first forward goes down; the last stage computes; the last backward goes up."""
    path = path_of(build("flush", 4, (4,)), Costs())
    words = [str(span.instruction).split("@")[0] for span in path]
    assert words == ["0F0", "1F0", "2F0", "3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3", "2B3", "1B3", "0B3"]
    assert sum(span.end - span.start for span in path) == 21.0


def test_a_timeline_on_other_costs_is_refused():
    """The path of a measured timeline, or with the wrong costs, is none: said with the start that is unclear."""
    program, costs = build("2bw", 4, (4, 4)), Costs(latency=0.1)
    with pytest.raises(ValueError, match="give a simulated timeline, and the costs"):
        critical_path(simulate(program, costs), Costs(latency=0.2))
    with pytest.raises(ValueError, match="starts at"):
        critical_path(simulate(program, costs).shifted(1.0), costs)


# --- against the derivative of the makespan

PER_STAGE = ("forward", "backward", "recompute", "step", "predict", "hold", "reduce_grad", "evict", "load")
PER_EDGE = ("latency", "forward_bytes", "backward_bytes")
STEP = 1e-6
CASES = (
    ("gpipe", 3, (4, 5), {}),
    ("flush", 4, (6, 3), {"data_parallel": True, "tied_embeddings": True}),
    ("flush", 4, (6, 6), {"recompute": True}),
    ("2bw", 4, (5, 6, 5), {"data_parallel": True, "tied_embeddings": True}),
    ("2bw", 4, (7, 7), {"extra_warmup": True, "recompute": True}),
    ("2bw", 5, (7, 7), {"balance": True}),
    ("bpipe", 6, (8, 8), {}),
    ("2bw", 4, (5, 6, 5), {"predict": True, "provisional_microbatches": 1, "tied_embeddings": True}),
    ("2bw", 3, (4, 4, 4), {"predict": True, "reduce_partial": True, "data_parallel": True, "tied_embeddings": True}),
    ("pipedream", 3, (1,) * 7, {"data_parallel": True}),
    ("interleaved", 6, (6, 3), {"num_virtual_stages": 2, "data_parallel": True}),
    ("interleaved", 8, (8,), {"num_virtual_stages": 2, "balance": True}),
    ("bpipe", 5, (6, 6), {"num_frozen": 1}),
    ("2bw", 5, (6, 6), {"num_frozen": 1, "rank_of_stage": (0, 0, 1, 2, 3), "balance": True}),
    ("flush", 2, (9, 9), {"num_frozen": 1, "data_parallel": True}),
    ("flush", 4, (7, 9), {"num_frozen": 3, "data_parallel": True}),
)


@pytest.mark.parametrize("num_frozen", [1, 2, 3])
def test_a_send_that_waits_until_it_is_read(num_frozen):
    """A prefix fills its bound during a long reduction; then the batch waits for it, and so for the reduction that let
    the first of its outputs be read."""
    num_stages = num_frozen + 1
    program = build("flush", num_stages, (40, 40), num_frozen=num_frozen, data_parallel=True)
    forward = [0.5] * (num_frozen - 1) + [1.0, 0.4]
    costs = Costs(forward=forward, backward=[0.4] * num_stages, reduce_grad=[10.0] * num_stages)
    path = path_of(program, costs)
    assert sum(span.end - span.start for span in path) == pytest.approx(simulate(program, costs).end)
    assert Kind.REDUCE_GRAD in {span.instruction.kind for span in path}


@draws(40)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**32), lowered=st.booleans(), overlap=st.booleans())
def test_the_makespan_grows_with_what_is_on_the_path(case, seed, lowered, overlap):
    """Only one chain of generic costs is the longest. So the derivative of the makespan by a cost is the number of
    times that it stands on the path: of a computation by stage, of a latency by edge, of all.
    """
    random = Random(seed)
    name, num_stages, batches, flags = case
    program = build(name, num_stages, batches, **flags)
    program = program if lowered or flags.get("balance") or name == "bpipe" else without_transfers(program)
    values = {each: [random.uniform(0.2, 2.0) for _ in range(num_stages)] for each in PER_STAGE}
    values |= {each: [random.uniform(0.1, 1.0) for _ in range(num_stages - 1)] for each in PER_EDGE}
    values |= {"reduce_embed": random.uniform(0.2, 2.0), "reduce_norm": random.uniform(0.2, 2.0)}
    shared = {"bandwidth": 1.0, "overlap": overlap}

    costs = Costs(**values, **shared)
    timeline = simulate(program, costs)
    path = critical_path(timeline, costs)
    assert path[0].start == 0 and path[-1].end == timeline.end
    assert all(first.end == pytest.approx(second.start, abs=1e-9) for first, second in pairwise(path))

    counted = Counter()
    for span in path:
        _count(counted, span, program.rank_of_stage, values, flags.get("num_frozen", 0))
    name = random.choice((*PER_STAGE, *PER_EDGE))
    index = random.randrange(len(values[name]))
    grown = {**values, name: [each + STEP * (place == index) for place, each in enumerate(values[name])]}
    longer = simulate(program, Costs(**grown, **shared)).end - timeline.end
    assert longer / STEP == pytest.approx(counted[name, index], abs=1e-3)
    for name in ("reduce_embed", "reduce_norm"):
        grown = {**values, name: values[name] + STEP}
        longer = simulate(program, Costs(**grown, **shared)).end - timeline.end
        assert longer / STEP == pytest.approx(counted[name, 0], abs=1e-3)


NAMES = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.RECOMPUTE: "recompute", Kind.STEP: "step",
    Kind.REDUCE_GRAD: "reduce_grad", Kind.REDUCE_EMBED: "reduce_embed", Kind.REDUCE_NORM: "reduce_norm",
    Kind.EVICT: "evict", Kind.LOAD: "load", Kind.ACCEPT: "evict", Kind.RETURN: "load",
    Kind.PREDICT: "predict", Kind.HOLD: "hold", Kind.REDUCE_PARTIAL: "reduce_grad",
    Kind.REDUCE_PARTIAL_EMBED: "reduce_embed",
}  # fmt: skip


def _count(counted, span, rank_of_stage, values, num_frozen):
    kind, stage = span.instruction.kind, span.instruction.stage
    num_stages = len(rank_of_stage)
    if kind in (Kind.SEND_F, Kind.SEND_B):
        edge = stage if kind is Kind.SEND_F else stage - 1
        name = "forward_bytes" if kind is Kind.SEND_F else "backward_bytes"
        counted[name, edge] += 1
        counted["latency", edge] += span.end - span.start > values[name][edge] + 1e-9
    elif kind in UPDATES - SHARED_REDUCTIONS:  # a rank's, for all its stages that are trained
        for each in range(num_frozen, num_stages):
            counted[NAMES[kind], each] += rank_of_stage[each] == span.rank
    elif kind in SHARED_REDUCTIONS:
        counted[NAMES[kind], 0] += 1
    else:
        evictor = num_stages - 1 - (stage - num_frozen) if kind in (Kind.ACCEPT, Kind.RETURN) else stage
        counted[NAMES[kind], evictor] += 1
