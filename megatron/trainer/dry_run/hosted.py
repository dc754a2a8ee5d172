"""What a dry run says where weights live on the host: the memory of nodes, the largest model for it, and the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.placement_report import PlacementReport
from megatron.pipeline.program.instruction import Lane
from megatron.planner import DEVICES, GIB, Activations, Cluster, Configuration, RankMemory
from megatron.planner.memory.hosted import HOST, Hosting
from megatron.planner.memory.node_memory import HostVerdict, LargestModel, crowds, host_bytes, judge_host, largest_model
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import priced
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.plan import from_flags

_LANES = {Lane.COMPUTE: "device", Lane.H2D: "to device", Lane.D2H: "from device", Lane.HOST: "host optimizer"}


@dataclass(frozen=True, kw_only=True)
class HostedRun:
    """Attributes:
    hosting: how.
    node_bytes: of the memory of each node that has ranks.
    verdict, largest: for the memory of --dry-run-host-memory; None where it was not given, or not a layer fits.
    seconds: of an iteration, by the planner; lanes: of each lane, what it is busy for on the rank where it is longest;
        empty where no GPU was named.
    """

    hosting: Hosting
    node_bytes: tuple[float, ...]
    verdict: HostVerdict | None
    largest: LargestModel | None
    seconds: float | None
    lanes: dict[str, float]


def hosted_run(
    args: TrainConfig,
    hosting: Hosting,
    memory: Sequence[RankMemory],
    layers: Sequence[int],
    placement: PlacementReport,
) -> HostedRun:
    """The findings of a dry run about weights that live on the host."""
    experts = from_flags.expert_degrees(args)
    nodes = crowds(placement.degrees, placement.mapping, placement.topology.node_of_slot, experts)
    shape, state, given = from_flags.architecture(args), from_flags.training_state(args), args.dry_run_host_memory
    largest = None
    if given is not None:
        boundary = Activations(shape, from_flags.activation_setting(args)).boundary
        largest = largest_model(
            shape, state, nodes, given, tensor=args.tensor_model_parallel_size, num_ranks=args.schedule.num_ranks,
            stash_of_layer=hosting.num_microbatches * boundary if hosting.stash == HOST else 0.0,
            experts=experts,
        )  # fmt: skip
    seconds, lanes = _times(args, hosting, layers)
    return HostedRun(
        hosting=hosting,
        node_bytes=tuple(host_bytes(memory, nodes)),
        verdict=None if given is None else judge_host(memory, nodes, given),
        largest=largest,
        seconds=seconds,
        lanes=lanes,
    )


def lines(run: HostedRun, memory: Sequence[RankMemory]) -> list[str]:
    """The report for people, line by line."""
    parts = [rank.host for rank in memory]
    fullest = max(parts, key=lambda each: each.total)
    said = [
        f"of its host a rank takes {fullest.total / GIB:.2f} GiB: weights {fullest.weights / GIB:.2f}, gradients "
        f"{fullest.gradients / GIB:.2f}, optimizer {fullest.optimizer / GIB:.2f}, inputs {fullest.stash / GIB:.2f}; "
        f"the fullest node {max(run.node_bytes) / GIB:.2f} GiB"
    ]
    if run.verdict is None:
        said.append("--dry-run-host-memory says whether nodes have it, and the largest model for it")
    else:
        word = "leaves" if run.verdict.fits else "misses"
        said.append(
            f"host: {'fits' if run.verdict.fits else 'out of memory'}; node {run.verdict.node} {word} "
            f"{abs(run.verdict.spare_gib):.1f} GiB"
        )
        said.append(
            "not even a layer on each rank fits into the host's memory"
            if run.largest is None
            else f"the largest model of this shape for it: {run.largest.num_layers} layers, "
            f"{run.largest.num_parameters / 1e9:.4g} billion parameters"
        )
    if run.seconds is not None:
        busy = ", ".join(f"{name} {100 * each / run.seconds:.0f}%" for name, each in run.lanes.items())
        said.append(f"an iteration is estimated at {run.seconds:.3g} s, of which lanes are busy: {busy}")
    return said


def to_dict(run: HostedRun, memory: Sequence[RankMemory]) -> dict:
    """The report for JSON: bytes and seconds, and GiB where the name says so."""
    verdict, largest = run.verdict, run.largest
    return {
        "resident_stages": run.hosting.stages,
        "stash": run.hosting.stash,
        "node_bytes": list(run.node_bytes),
        "rank_bytes": [{**vars(rank.host), "total": rank.host.total} for rank in memory],
        "verdict": verdict and {"node": verdict.node, "fits": verdict.fits, "spare_gib": verdict.spare_gib},
        "largest_model": largest and {"num_layers": largest.num_layers, "num_parameters": largest.num_parameters},
        "iteration_seconds": run.seconds,
        "lane_seconds": run.lanes,
    }


def refusal(run: HostedRun, given: float) -> str | None:
    """The reason why nodes with so many GiB cannot hold the job, in a sentence."""
    if run.verdict is None or run.verdict.fits:
        return None
    return (
        f"node {run.verdict.node} misses {-run.verdict.spare_gib:.1f} GiB of the {given:g} GiB of "
        "--dry-run-host-memory; use fewer layers, fewer replicas on a node, more nodes, or more memory"
    )


def _times(args: TrainConfig, hosting: Hosting, layers: Sequence[int]) -> tuple[float | None, dict[str, float]]:
    """Seconds of an iteration and of its lanes, on GPUs of a name as if all were in one node; else None and none."""
    if args.dry_run_gpu not in DEVICES:
        return None, {}
    schedule = args.schedule
    residency, p = schedule.residency, schedule.num_ranks
    # Ranks with different numbers of stages have no configuration, and beside hosted weights neither shared sequences
    # nor experts have a price.
    if schedule.num_stages % p or args.context_parallel_size > 1 or args.num_experts is not None:
        return None, {}
    configuration = Configuration(
        tensor=args.tensor_model_parallel_size, pipeline=p, data=args.data_parallel_size,
        virtual=schedule.num_stages // p, micro_batch_size=args.micro_batch_size,
        global_batch_size=hosting.num_microbatches * args.micro_batch_size * args.data_parallel_size,
        schedule=args.pipeline_schedule, sequence_parallel=args.sequence_parallel, layers=tuple(layers),
        resident_stages=residency.stages, host_update=residency.update, stash=hosting.stash,
        gathers_fetch=args.l2l_fetch == "shares",
    )  # fmt: skip
    cluster = Cluster(gpu=args.dry_run_gpu, nodes=1, gpus_per_node=args.world_size)
    costs = FirstPrinciples(from_flags.architecture(args), cluster, from_flags.software(args)).costs(
        configuration, layers
    )
    seconds = costs.seconds(schedule.num_stages)
    few = min(hosting.num_microbatches, 2 * p)  # all microbatches take alike
    lanes: dict[str, float] = {}
    for row in schedule.build((few,)).rows:
        busy = dict.fromkeys(_LANES.values(), 0.0)
        for each in row:
            if each.kind.row.lane in _LANES and each.kind in seconds:
                times = 1 if each.microbatch is None else hosting.num_microbatches / few
                busy[_LANES[each.kind.row.lane]] += times * seconds[each.kind][each.stage]
        lanes = {name: max(value, lanes.get(name, 0.0)) for name, value in busy.items()}
    return priced(costs, configuration, schedule).seconds, lanes
