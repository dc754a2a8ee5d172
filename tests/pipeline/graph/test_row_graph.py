"""The full graph: its order, its independence of who is faster, and for how long it is kept."""

import gc
from dataclasses import replace
from random import Random
from weakref import ref

import pytest

from megatron.pipeline.graph.row_graph import Graph, RowExecution, graph_of
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate import Costs, channel_times, longest_paths, seconds_of
from tests.pipeline.check.hosted import hosted
from tests.pipeline.simulate.programs import build, without_transfers

CASES = {
    "flush": lambda: build("flush", 4, (6, 3), data_parallel=True, tied_embeddings=True),
    "compute-only": lambda: without_transfers(build("2bw", 3, (4, 4))),
    "moves": lambda: build("bpipe", 6, (8, 8)),
    "a frozen prefix": lambda: build("flush", 4, (9, 9), num_frozen=2, data_parallel=True),
    "reports": lambda: build("pipedream", 3, (1,) * 7, data_parallel=True),
    "predictions": lambda: build("2bw", 4, (5, 6, 5), predict=True, provisional_microbatches=1, tied_embeddings=True),
    "lanes": lambda: hosted(2, 4, update="eager", data_parallel=True, tied_embeddings=True).build((3, 3)),
}


def graph(program: Program, *, overlap: bool = True) -> Graph:
    return graph_of(program, refusal=lambda _: AssertionError("it ends"), overlap=overlap)


def times(found: Graph, program: Program, costs: Costs) -> list[list[float]]:
    channels = channel_times(found, *costs.edges(len(program.graph.edges)))
    _, ends = longest_paths(found, seconds_of(program, costs), *channels)
    return [[ends[node] for node in row] for row in found.node_of]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("overlap", [True, False])
def test_nodes_stand_behind_what_they_wait_for(case, overlap):
    """So one pass in their order finds all times; and each instruction has a node."""
    found = graph(CASES[case](), overlap=overlap)
    for node, waits in enumerate(zip(found.befores, found.sources, strict=True)):
        assert all(each < node for each in waits) or node == 0
    assert all(min(row) > 0 for row in found.node_of)


@pytest.mark.parametrize("case", CASES)
def test_no_order_of_execution_changes_a_time(case):
    """Ranks that stop at any borders, and go on from there, come to the end, and find a graph with the same times."""
    program, random = CASES[case](), Random(case)
    ends = [len(row) for row in program.rows]
    links = {"latency": 0.3, "forward_bytes": 1.0, "bandwidth": 2.0, "evict": 0.4, "fetch": 0.6, "store": 0.5}
    costs = Costs(forward=1.5, reduce_grad=0.7, reduce_norm=0.2, update=0.9, **links)
    expected = times(graph(program), program, costs)
    for _ in range(10):
        execution, borders = RowExecution(program), [0] * len(ends)
        while borders != ends:
            borders = [random.randint(border, min(end, border + 9)) for border, end in zip(borders, ends, strict=True)]
            assert all(reached <= border for reached, border in zip(execution.reach(borders), borders, strict=True))
        assert times(execution.graph(), program, costs) == expected


def test_the_graph_of_the_last_program_is_kept():
    """A program is executed once, another one or its copy anew, and what is kept goes with the program."""
    program = CASES["flush"]()
    first = graph(program)
    assert graph(program) is first
    assert graph(program, overlap=False) is not first
    kept = ref(graph(replace(program)))
    gc.collect()
    assert kept() is None
