"""The duration of a program, found by executing its instructions on a table of costs.

A closed formula is valid for one schedule. The simulator accepts any program, with the meaning that the runtime gives
to the instructions, so its result changes with the program. `megatron.pipeline.graph` determines the waits, and the
time of a node is the longest path to it:

- a computation or a STEP takes its time on its rank;
- a transfer occupies its channel for bytes / bandwidth and arrives `latency` later. Transfers overlap with
  computation, or with `Costs.overlap` False occupy their sender, too;
- a move of saved activations takes its time on the pair, a reduction on its members, and a word to or from the host on
  its lane; FREE takes no time.

A compute-only program, without transfers, is timed as if each tensor were sent as soon as it exists, to a receive that
was posted in time.
"""

import math
from operator import itemgetter

from megatron.pipeline.graph.execution import LANES, MOVES, START, SimulationError
from megatron.pipeline.graph.row_graph import Graph, RowExecution, graph_of
from megatron.pipeline.program.instruction import (
    AWAITS_REDUCTIONS,
    HOST_WORDS,
    SENDS,
    SHARED_REDUCTIONS,
    UPDATES,
    Kind,
    Tensor,
)
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Span, Timeline

__all__ = ["Costs", "SimulationError", "Span", "Timeline", "simulate"]


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Execute `program` on `costs`. By default a forward takes 1, a backward 2, and everything else 0, as in the paper.

    Returns:
        The timeline, which begins at 0, with a span for every instruction of the program.

    Raises:
        ValueError: for a cost that is out of range.
        SimulationError: for an unknown kind of instruction, ends of a channel that do not pair up, or a deadlock (the
            errors of `check` say more), and for times that overflow.
    """
    costs = costs or Costs()
    seconds = seconds_of(program, costs)
    edges = costs.edges(len(program.graph.edges))
    graph = graph_of(program, refusal=refusal, overlap=costs.overlap)
    starts, ends = longest_paths(graph, seconds, *channel_times(graph, *edges))
    if not all(math.isfinite(ends[node]) for node in graph.last):
        raise SimulationError("the times of the program are more than a number can hold; give smaller costs")
    starts_of_row, ends_of_row = ([_of_row(times, row) for row in graph.node_of] for times in (starts, ends))
    for queue, row in zip(graph.moves, starts_of_row, strict=True):  # the two ends of a move are posted separately
        free_at = 0.0
        for (requested, position, _), node in zip(queue.requested, queue.nodes, strict=True):
            row[position], free_at = max(ends[requested], free_at), ends[node]
    return Timeline(
        program.rows, tuple(starts_of_row), tuple(ends_of_row), tuple(program.rank_of_stage), tuple(program.batches),
        program.first_batch, program.first_microbatch, "simulated", program.edges, program.copies,
    )  # fmt: skip


def _of_row(times: list[float], nodes: list[int]) -> list[float]:
    return list(itemgetter(*nodes)(times)) if len(nodes) > 1 else [times[node] for node in nodes]


def seconds_of(program: Program, costs: Costs) -> dict[Kind, list[float]]:
    """Kind -> seconds at each stage. An update takes the sum over the trained stages that step together."""
    seconds = costs.seconds(program.num_stages)
    of_stages = HOST_WORDS | ({Kind.REDUCE_GRAD} if program.residency else set())
    is_frozen = program.graph.is_forward_only
    owned = (stages for rank in range(program.num_ranks) for stages in program.owners(rank))
    together = [stages for stages in owned if len(stages) > 1 or is_frozen(stages[0])]
    for kind in UPDATES - SHARED_REDUCTIONS - of_stages if together else ():
        of_kind = seconds[kind] = list(seconds[kind])
        for stages in together:  # which step together; the update stands at the lowest
            of_rank = math.fsum(of_kind[each] for each in stages if not is_frozen(each))
            for stage in stages:
                of_kind[stage] = of_rank
    return seconds


def channel_times(
    graph: Graph, forward: list[float], backward: list[float], latency: list[float]
) -> tuple[list[float], list[float]]:
    """Occupation and latency of each channel in seconds; 0 within a rank. The arguments come from `Costs.edges`."""
    of = {Tensor.ACTIVATION: forward, Tensor.GRADIENT: backward}
    occupation = [of[channel.tensor][channel.edge] * channel.crosses for channel in graph.channels]
    return occupation, [latency[channel.edge] * channel.crosses for channel in graph.channels]


def longest_paths(
    graph: Graph, seconds: dict[Kind, list[float]], occupation: list[float], latency: list[float]
) -> tuple[list[float], list[float]]:
    """The start and the end of each node, by its number, in seconds. `occupation`, `latency`: of each channel."""
    takes = [0.0]
    for kind, stages in graph.takes[1:]:
        of_stage = occupation if kind in SENDS else seconds[kind]
        takes.append(max([of_stage[stage] for stage in stages]))
    free_at, occupation, latency = [0.0] * len(occupation), occupation[::-1], latency[::-1]  # ~c: from the end
    starts, ends = [0.0], [0.0]
    add_start, add_end = starts.append, ends.append
    nodes = zip(graph.befores, graph.sources, graph.takes_of, strict=True)
    next(nodes)  # the start node
    for before, source, take in nodes:
        time = ends[before]
        made = ends[source]
        if made > time:
            time = made
        if take >= 0:
            add_start(time)
            add_end(time + takes[take])
        else:
            if free_at[take] > time:
                time = free_at[take]
            add_start(time)
            free_at[take] = time = time + occupation[take]
            add_end(time + latency[take])
    return starts, ends


def refusal(execution: RowExecution) -> SimulationError:
    """The error for a rank that does not reach the end of its row, or for a node that lacks a member."""
    rows = execution.executed.rows
    for rank, (position, wait) in enumerate(execution.waits):
        if wait is None:
            continue
        instruction = rows[rank][position]
        what = "the reductions of its version" if instruction.kind in AWAITS_REDUCTIONS else "its input or gradient"
        what = {MOVES: "the moves that it waits for", LANES: "the copies to and from the host that it waits for"}.get(
            wait, what
        )
        return execution.error(rank, position, instruction, f"a deadlock: {what} can never come")
    rank, nodes = next((rank, nodes) for rank, nodes in enumerate(execution.node_of) if START in nodes)
    position = nodes.index(START)
    return execution.error(rank, position, rows[rank][position], "the other members never post it")
