"""The times of asynchronous pipelines with several stages on each rank, beside the work of their busiest rank.

    python -m papers.ftpipe.asynchronous                    # about 6 minutes; a table
    python -m papers.ftpipe.asynchronous --json result.json

Problem: overlap shows on many ranks, and a computer with two cores cannot compute on many.
Solution: emulated stages sleep instead of computing, while engine, transfers (1 MiB over each edge) and steps are real,
between real processes. Where transfers have times, too, few bytes travel and arrive when they are due (PacedLink).

busiest rank   ranks with two stages each, in random places, and edges that skip stages: seconds of a microbatch over
               the seconds that the busiest rank computes, and over the simulated seconds
figure 4       the paper's model of six encoder layers and six decoder layers, which are 5.5 times as fast; a device
               holds four layers. The sequential partition of megatron.partition over the mixed one; 880/520 = 1.69 at
               best
gpipe          four ranks with a stage each, m = p = 4: `gpipe` over asynchronous batches, which never wait for a drain;
               (m+p-1)/m = 1.75 at best
"""

import gc
import random
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.common.paced_links import PacedLink
from benchmarks.common.processes import run_group
from benchmarks.common.results import parser_of, write
from megatron.partition import Graph, Partition, compete, parse_graph
from megatron.partition.graph import in_order, stage_graph, tensors
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedGraphStage, EmulatedStageUpdates, EmulatedTimes
from megatron.pipeline.runtime.transport.links import LINKS
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs


@dataclass(frozen=True)
class Contender:
    """A schedule with its costs.

    Attributes:
        forward, backward: by stage, the seconds of each; a backward includes a recompute.
        num_microbatches: number of microbatches of a batch.
        num_batches: number of timed batches.
        num_before: number of untimed batches before them.
        transfer: by edge, the seconds of an activation or of its gradient; empty: as fast as the real links are.
        step: by stage, seconds that only the simulator counts; empty: none.
    """

    name: str
    schedule: Schedule
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    num_microbatches: int
    num_batches: int
    num_before: int
    transfer: tuple[float, ...] = ()
    step: tuple[float, ...] = ()

    def scaled(self, factor: float) -> "Contender":
        """The same with all times multiplied by `factor`."""
        names = ("forward", "backward", "transfer", "step")
        return replace(self, **{name: tuple(factor * each for each in getattr(self, name)) for name in names})


PACED = "paced"
"""The backend whose links take the time that a contender says."""


@dataclass(frozen=True)
class Job:
    contenders: tuple[Contender, ...]
    payload_bytes: int
    repeats: int

    @property
    def world_size(self) -> int:
        return self.contenders[0].schedule.num_ranks


def measure(contender: Contender, payload_bytes: int) -> float:
    """Measure the seconds of a batch on this rank, from start to start of batches, without fill and drain."""
    schedule, rank = contender.schedule, dist.get_rank()
    graph = schedule.graph
    stages = [
        EmulatedGraphStage(
            index=stage, graph=graph, payload_bytes=payload_bytes,
            times=EmulatedTimes(contender.forward[stage], contender.backward[stage]),
        )
        for stage in schedule.stages_of(rank)
    ]  # fmt: skip
    job = dist.new_group(list(range(dist.get_world_size())))
    update = EmulatedStageUpdates(job_group=job)
    edges = [(edge.source, edge.target) for edge in graph.edges]
    LINKS[PACED, "cpu"] = partial(
        PacedLink, edges=edges, forward=contender.transfer, backward=contender.transfer, latency=[0.0] * len(edges)
    )
    backend = PACED if any(contender.transfer) else "gloo"
    engine = PipelineEngine(schedule, stages, update, timeout=timedelta(seconds=60), backend=backend)
    dist.barrier()
    m = contender.num_microbatches
    for _ in range(contender.num_before):
        engine.run_batch(m, m)
    start = time.perf_counter()
    for _ in range(contender.num_batches):
        engine.run_batch(m, m)
    seconds = (time.perf_counter() - start) / contender.num_batches
    engine.drain()
    dist.barrier()
    engine.close()
    dist.destroy_process_group(job)
    return seconds


def run(job: Job) -> dict[str, list[float]]:
    """Run a job on one rank. Returns contender -> the seconds of each repeat on the slowest rank."""
    gc.collect()
    gc.freeze()  # as in training
    found: dict[str, list[float]] = {contender.name: [] for contender in job.contenders}
    for _ in range(job.repeats):
        for contender in job.contenders:
            seconds = torch.tensor([measure(contender, job.payload_bytes)], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found[contender.name].append(seconds.item())
    return found


MIB = 1 << 20


def mixed(num_ranks: int, seed: int, mean: float) -> Contender:
    """A contender with two stages on each rank, in random places. Every stage sends to the next stage, and every third
    also to a later one."""
    choose, num_stages = random.Random(seed), 2 * num_ranks
    edges = [Edge(stage, stage + 1) for stage in range(num_stages - 1)]
    edges += [Edge(stage, choose.randrange(stage + 2, num_stages)) for stage in range(0, num_stages - 2, 3)]
    forward = tuple(mean * choose.uniform(0.6, 1.4) for _ in range(num_stages))
    schedule = Schedule(
        order="async", weights="stale", num_stages=num_stages, edges=tuple(sorted(edges)),
        rank_of_stage=tuple(choose.sample([*range(num_ranks)] * 2, num_stages)),
        work=tuple((each, 2 * each) for each in forward),
    )  # fmt: skip
    return Contender(f"{num_ranks} ranks", schedule, forward, _twice(forward), 1, 40, 3 * num_stages)


def _twice(seconds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(2 * each for each in seconds)


def chain(name: str, mean: float, num_stages: int = 4) -> Contender:
    """A contender with one stage on each rank, and batches of as many microbatches as stages."""
    order, weights = ("gpipe", "flush") if name == "gpipe" else ("async", "stale")
    schedule = Schedule(order=order, weights=weights, num_stages=num_stages)
    forward = (mean,) * num_stages
    return Contender(name, schedule, forward, _twice(forward), num_stages, 12, 4)


ENCODER, DECODER = 5.5, 1.0  # relative times of a layer
LAYERS, DEVICES, LAYERS_ON_A_DEVICE = 6, 3, 4  # layers of each kind; devices; layers of both kinds that fit on a device


def figure_4(decoder: float) -> Graph:
    """The graph of Figure 4. `decoder`: seconds of a decoder layer, recompute included. Each decoder layer attends to
    the last encoder layer."""
    layers = [("Encoder", ENCODER)] * LAYERS + [("Decoder", DECODER)] * LAYERS
    nodes = [
        {
            "id": place, "scope": f"Model/{kind}[{place % LAYERS}]", "block": kind, "fwd_ms": 250 * decoder * time,
            "bwd_ms": 750 * decoder * time, "params": 1, "mem_bytes": 0, "out_bytes": 0,
        }
        for place, (kind, time) in enumerate(layers)
    ]  # fmt: skip
    last = LAYERS - 1
    edges = [[place, place + 1] for place in range(2 * LAYERS - 1)]
    edges += [[last, place] for place in range(last + 2, 2 * LAYERS)]
    return parse_graph(
        {
            "nodes": nodes, "edges": edges, "num_devices": DEVICES, "bandwidth_gigabytes_per_second": 10,
            "memory_limit_bytes": LAYERS_ON_A_DEVICE, "weight_bytes_per_parameter": 1, "special_block": "Encoder",
        }
    )  # fmt: skip


def of_figure_4(method: str, decoder: float) -> Contender:
    """The contender for Figure 4 with the best partition of a method."""
    graph = figure_4(decoder)
    partition = compete(graph, methods=(method,), max_stages_per_device=2).choice.partition
    return contender_of(f"figure 4, {method}", graph, partition)


def contender_of(
    name: str, graph: Graph, partition: Partition, *, order: str = "async", num_microbatches: int = 1,
    scale: float = 1.0, step_milliseconds: float = 0.0,
) -> Contender:  # fmt: skip
    """A partition as a pipeline, with the times of its graph.

    Args:
        order: `async`, under which stages at the end do not recompute, or `gpipe`, under which all stages do.
        scale: factor on all times.
        step_milliseconds: of the optimizer step, for each parameter.
    """
    stages = stage_graph(graph, partition)
    computes = {partition.stage_of_node[node.id] for node in graph.nodes if not node.input}
    place = in_order(stages.subgraph(computes))
    number = {stage: index for index, stage in enumerate(sorted(place, key=place.__getitem__))}
    forward, backward, step = ([0.0] * len(number) for _ in range(3))
    seconds = scale / 1000
    for node in (each for each in graph.nodes if not each.input):
        stage = number[partition.stage_of_node[node.id]]
        plain = node.has_plain and order == "async" and not stages.out_degree(partition.stage_of_node[node.id])
        forward[stage] += seconds * (node.fwd_plain_ms if plain else node.fwd_ms)
        backward[stage] += seconds * (node.bwd_plain_ms if plain else node.bwd_ms)
        step[stage] += seconds * step_milliseconds * node.params
    for shared in graph.shared_parameters:
        step[number[partition.stage_of_node[graph.owner(shared)]]] += seconds * step_milliseconds * shared.params
    sent = {(number[a], number[b]): 0.0 for a, b in stages.edges}
    for source, num_bytes, consumers in tensors(graph):
        start = number[partition.stage_of_node[source]]
        for end in {number[partition.stage_of_node[node]] for node in consumers} - {start}:
            sent[start, end] += num_bytes
    devices = tuple(partition.device_of_stage[stage] for stage in number)
    common = {"num_stages": len(number), "rank_of_stage": devices, "edges": tuple(Edge(*pair) for pair in sorted(sent))}
    if order == "async":
        work = tuple(zip(forward, backward, strict=True))
        schedule = Schedule(order=order, weights="stale", work=work, **common)
    else:
        schedule = Schedule.preset(order, **common)
    transfer = tuple(
        0.0 if devices[a] == devices[b] else seconds * graph.milliseconds_of(sent[a, b]) for a, b in sorted(sent)
    )
    before, timed = -(-max(18, 3 * len(number)) // num_microbatches), max(4, 30 // num_microbatches)
    return Contender(
        name, schedule, tuple(forward), tuple(backward), num_microbatches, timed, before, transfer, tuple(step)
    )


def of_busiest_rank(contender: Contender) -> float:
    """The seconds for which the busiest rank computes on a microbatch."""
    schedule = contender.schedule
    return max(
        sum(contender.forward[stage] + contender.backward[stage] for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    )


def simulated(contender: Contender) -> float:
    """The simulated seconds of a microbatch in the steady state."""
    costs = Costs(
        forward=contender.forward, backward=contender.backward, step=contender.step or 0.0, bandwidth=1.0,
        forward_bytes=contender.transfer or 0.0,
    )  # fmt: skip
    short, long = (
        simulate(contender.schedule.build((contender.num_microbatches,) * count), costs).makespan
        for count in (contender.num_before, contender.num_before + contender.num_batches)
    )
    return (long - short) / contender.num_batches / contender.num_microbatches


def measured(job: Job) -> dict[str, list[float]]:
    return run_group(job.world_size, run, job)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, json="also write all seconds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="pipeline ranks (default: 4 8)")
    parser.add_argument("--forward", type=float, default=0.02, help="mean seconds of a forward (default: 0.02)")
    parser.add_argument("--payload", type=int, default=MIB, help="bytes over each edge (default: 1 MiB)")
    parser.add_argument("--repeats", type=int, default=5, help="each is measured so often (default: 5)")
    options = parser.parse_args(argv)
    found: dict[str, list[float]] = {}
    table = Table("", "seconds a microbatch", "of the busiest rank", "of the simulator", title="two stages a rank")
    for num_ranks in options.ranks:
        contender = mixed(num_ranks, num_ranks, options.forward)
        found |= measured(Job((contender,), options.payload, options.repeats))
        seconds = median(found[contender.name])
        table.add_row(
            contender.name, f"{seconds:.4f}", f"{seconds / of_busiest_rank(contender):.3f}",
            f"{seconds / simulated(contender):.3f}",
        )  # fmt: skip
    cuts = tuple(of_figure_4(method, options.forward) for method in ("sequential", "mixed"))
    found |= measured(Job(cuts, options.payload, options.repeats))
    chains = tuple(chain(name, options.forward) for name in ("gpipe", "ftpipe"))
    found |= measured(Job(chains, options.payload, options.repeats))
    console = Console()
    console.print(table)
    one, other = (found[contender.name] for contender in cuts)
    ratio, best = median(a / b for a, b in zip(one, other, strict=True)), [of_busiest_rank(each) for each in cuts]
    console.print(
        f"figure 4: in a row takes {ratio:.3f} times as long as mixed ({best[0] / best[1]:.2f} at best); mixed "
        f"{median(other) / best[1]:.3f} of its busiest rank"
    )
    ratio = median(one / other for one, other in zip(found["gpipe"], found["ftpipe"], strict=True))
    console.print(f"gpipe takes {ratio:.3f} times as long as ftpipe, m = p = 4 (1.75 at best)")
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
