"""`--dry-run GPUS`: check a job in one process, as far as that is possible without its cluster.

Problem: a mistake in a job for many GPUs shows on the cluster, after the queue. Most mistakes can be found before: in
the flags, the program, the memory, and the places of the ranks.

Solution: the checks of a start-up, in their order, for a given world size: the flags, megatron.core's configurations
made from them, the files on this machine, and a proof of the programs that the run would execute. Then come an estimate
of each stage's memory and the map of ranks. CUDA with Transformer Engine and missing files are assumed to be on the
cluster, and the dry run says so.

A dry run is often made on a machine without the files. A file on this machine is checked as a run would check it; a
missing file becomes a line for the user.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.documents.files import write_whole
from megatron.pipeline.check import ProgramError
from megatron.pipeline.placement.cost import count_crossing
from megatron.pipeline.placement.mapping import inverse
from megatron.pipeline.placement.placement_report import PlacementReport, make_report
from megatron.pipeline.placement.topology import Bandwidth, Node, Process, Topology, load_topology
from megatron.pipeline.program.instruction import Lane
from megatron.planner import DEVICES, Activations, RankMemory, Verdict, device_gib, estimate_memory, judge
from megatron.planner.job.refusals import refuse_recipe, refuse_units
from megatron.planner.memory.hosted import HOST, Hosting
from megatron.planner.memory.node_memory import crowds, host_bytes, judge_host, largest_model
from megatron.planner.memory.parameters import stage_parameters
from megatron.planner.time.iteration import priced
from megatron.trainer.arguments import resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import TrainConfig, assumed_vocabulary, padded_vocabulary, usual_vocabulary
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.platform import assumed_platform
from megatron.trainer.arguments.rules.programs import data_paths
from megatron.trainer.changes.prefix_cache import missing_cache
from megatron.trainer.checkpoint.checkpoint import with_checkpoint_arguments
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, problem_with_tokenizer
from megatron.trainer.dry_run.changes import planned_changes
from megatron.trainer.dry_run.lost_ranks import lost_ranks
from megatron.trainer.dry_run.text import DryRun, HostedRun, print_dry_run, to_dict
from megatron.trainer.files import conversations
from megatron.trainer.files.indexed_files import blends, check_indexed_dataset
from megatron.trainer.models.core_config import optimizer_config, transformer_config
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.arrangement import cut_model, decide, degrees_of, evictors
from megatron.trainer.plan.from_flags import prove
from megatron.trainer.report.log import packages_not_here

# --- files of data, tokenizer and checkpoint --------------------------------------------------------------------------


def _missing_data(args: TrainConfig) -> list[str]:
    """A line for each data file that is missing here. Raises ValueError for a file that is here and damaged."""
    if args.architecture in CLASSIFIERS:
        named = (path for paths in data_paths(args).values() for path in paths)
        return [f"data {path} is not on this machine" for path in named if not os.path.exists(path)]
    for flag, path in (
        ("--data-args-path", args.data_args_path),
        ("--per-split-data-args-path", args.per_split_data_args_path),
    ):
        if path is not None and not os.path.exists(path):
            return [f"{flag} {path} is not on this machine"]
    blend, per_split = blends(args)
    lines = []
    for prefix in [prefix for each in (blend, *(per_split or ())) if each for prefix in each[0]]:
        files = (prefix,) if args.sft else (f"{prefix}.idx", f"{prefix}.bin")
        if absent := [name for name in files if not os.path.exists(name)]:
            lines.append(f"data file {' and '.join(absent)} is not on this machine")
        else:
            (conversations.read if args.sft else check_indexed_dataset)(prefix)
    return lines


def _missing_checkpoint(args: TrainConfig) -> list[str]:
    """A line for each directory to load from that is missing here."""
    named = (("--load", args.load), ("--pretrained-checkpoint", args.pretrained_checkpoint))
    return [f"{flag} {path} is not on this machine" for flag, path in named if path and not os.path.isdir(path)]


def _rows_of_embedding(args: TrainConfig) -> tuple[int, list[str]]:
    """The number of rows of the embedding, and a line if it is assumed.

    It comes from the tokenizer. If the tokenizer is missing here, it comes from --vocab-size or a usual vocabulary.

    Raises:
        ValueError: the tokenizer is here and cannot be read.
    """
    if args.architecture == "vit":
        return 0, []
    problem = problem_with_tokenizer(args)
    if problem is None and args.tokenizer_model is not None and not os.path.exists(args.tokenizer_model):
        problem = f"--tokenizer-model {args.tokenizer_model} names a hub, which is not asked"
    if problem is None:
        return padded_vocab_size(args, build_tokenizer(args)), []
    name, _ = usual_vocabulary(args)
    rows = padded_vocabulary(args, assumed_vocabulary(args))
    source = "as --vocab-size says" if args.vocab_size else f"as {name}; --vocab-size says another"
    return rows, [f"{problem}; the embedding is taken to have {rows} rows, {source}"]


# --- the dry run ------------------------------------------------------------------------------------------------------

_REFUSED = 1


def run_dry(args: Arguments, prog: str) -> int:
    """Check the job that `args` (parsed, not yet validated) describe; returns the exit status."""
    try:
        result = check_job(args)
        print_dry_run(result, prog)
        if args.dry_run_json is not None:
            write_whole(Path(args.dry_run_json), json.dumps(to_dict(result), indent=1))
        if refused := _refusal(result):
            raise ValueError(refused)
        if result.hosted and (refused := _refusal_of_hosts(result.hosted, args.dry_run_host_memory)):
            raise ValueError(refused)
    except (ValueError, ProgramError) as error:
        sys.stdout.flush()
        sys.stderr.write(f"{prog}: error: {error}\n")
        return _REFUSED
    except OSError as error:
        sys.stderr.write(f"{prog}: error: {error.filename}: {error.strerror}\n")
        return _REFUSED
    return 0


def _refusal(result: DryRun) -> str | None:
    """The reason why the job does not fit on --dry-run-gpu, at first or after a change; None if it fits."""
    if result.verdict is None:
        return None
    gpu = result.args.dry_run_gpu
    there = f"the {device_gib(gpu):g} GiB of --dry-run-gpu {gpu}"
    if not result.verdict.fits:
        place = result.place(result.verdict.rank)
        return f"{place} {_misses(result.verdict, there)}; {_remedy(result)}"
    verdict = result.verdict_of_changes
    if verdict is None or verdict.fits:
        return None
    return (
        f"{result.moment(result.fullest_change)} pipeline rank {verdict.rank} {_misses(verdict, there)}; "
        f"{_remedy_of_change(result.args)}"
    )


def _refusal_of_hosts(run: HostedRun, given: float) -> str | None:
    """The reason why nodes with `given` GiB of memory cannot hold the job; None if they can."""
    if run.verdict is None or run.verdict.fits:
        return None
    return (
        f"node {run.verdict.node} misses {-run.verdict.spare_gib:.1f} GiB of the {given:g} GiB of "
        "--dry-run-host-memory; use fewer layers, fewer replicas on a node, more nodes, or more memory"
    )


def _misses(verdict: Verdict, gib: str) -> str:
    """The missing memory of a GPU, apart from what the CUDA context, the allocator and collectives take."""
    if verdict.free_gib < 0:
        return f"misses {-verdict.free_gib:.1f} GiB of {gib}"
    besides = verdict.free_gib - verdict.spare_gib
    return f"misses {-verdict.spare_gib:.1f} GiB of {gib}, of which no tensor gets {besides:.1f} GiB"


def _remedy_of_change(args: TrainConfig) -> str:
    if args.elastic_schedule is not None:
        return "give more ranks in --elastic-schedule, or leave it out, use smaller microbatches or more GPUs"
    if args.use_distributed_optimizer:
        return "use more GPUs"
    return "use more GPUs, or share the optimizer's state out to replicas (--use-distributed-optimizer)"


def _remedy(result: DryRun) -> str:
    if result.hosted:
        return "use smaller microbatches, fewer of them, smaller stages, or more GPUs"
    return "recompute more, use smaller microbatches or more GPUs, or balance activations (--pipeline-schedule bpipe)"


def check_job(args: Arguments) -> DryRun:
    """Make the dry run's findings. Raises ValueError for anything that a run would refuse."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("--dry-run is one process for the whole job; start it without torchrun or srun")
    args, notes = _complete(args)
    missing = [*_missing_checkpoint(args), *_missing_data(args)]
    rows, assumed = _rows_of_embedding(args)
    args, warnings = replace(args, padded_vocab_size=rows), missing + assumed
    warnings += missing_cache(args) if args.activation_cache is not None else []
    warnings += packages_not_here(args).values()
    config = transformer_config(replace(args, **from_flags.WITHOUT_ENGINE))
    optimizer_config(args)
    report, demand = prove(args)
    layers, hosting = from_flags.layers_of_stages(config), from_flags.hosting_of(args)
    shape = from_flags.architecture(args)
    memory = estimate_memory(
        shape, from_flags.activation_setting(args), from_flags.training_state(args), demand,
        layers=layers, counts_communicators=from_flags.uses_nccl(args) and hosting is None, hosting=hosting,
    )  # fmt: skip
    placement, lines, processes = place(args)
    return DryRun(
        args=args,
        report=report,
        num_parameters=args.tensor_model_parallel_size
        * sum(stage_parameters(shape, args.tensor_model_parallel_size, layers)),
        memory=memory,
        verdict=_judge(args, memory),
        placement=placement,
        placement_lines=lines,
        notes=notes,
        warnings=warnings,
        changes=planned_changes(args, layers, processes) if args.changes and not args.skip_train else [],
        lost=lost_ranks(args, layers, memory),
        hosted=hosting and _hosted_run(args, hosting, memory, layers, placement),
    )


def _complete(args: Arguments) -> tuple[TrainConfig, list[str]]:
    """Complete the flags as a run on `--dry-run` GPUs would; return the configuration and the notes of the rules.

    The cluster's machines are assumed to have CUDA and the packages of `--assume-packages`.

    Raises:
        ValueError: a rule refuses the flags, or `--use-checkpoint-args` names a checkpoint that is not on this machine.
    """
    if args.use_checkpoint_args:
        if args.load is not None and not os.path.isdir(args.load):
            raise ValueError(
                f"--use-checkpoint-args takes the model from --load {args.load}, which is not on this machine; for a "
                "dry run here give the model's flags in its place"
            )
        args = with_checkpoint_arguments(args)
    platform, notes = assumed_platform(args.assume_packages), []
    if args.pipeline_schedule == AUTO:
        from megatron.trainer.plan import auto_program

        made = auto_program.make(args, world_size=args.dry_run, platform=platform)
        args, notes = auto_program.with_program(args, made), list(made.lines)
    notes += validate_args(args, world_size=args.dry_run)
    notes += resolve_platform(args, platform)
    if args.fp8 is not None and (device := DEVICES.get(args.dry_run_gpu)) is not None:
        refuse_units(args.dry_run_gpu, device)
        refuse_recipe(args.fp8_recipe, args.dry_run_gpu, "--fp8-recipe")
    return TrainConfig.of(args), notes


def _judge(args: TrainConfig, memory: tuple[RankMemory, ...]) -> Verdict | None:
    return (
        None
        if args.dry_run_gpu is None
        else judge(
            memory, device_gib(args.dry_run_gpu), from_flags.architecture(args), from_flags.activation_setting(args)
        )
    )


# --- weights on the host ----------------------------------------------------------------------------------------------

_LANES = {Lane.COMPUTE: "device", Lane.H2D: "to device", Lane.D2H: "from device", Lane.HOST: "host optimizer"}


def _hosted_run(
    args: TrainConfig, hosting: Hosting, memory: Sequence[RankMemory], layers: Sequence[int], placement: PlacementReport
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


def _times(args: TrainConfig, hosting: Hosting, layers: Sequence[int]) -> tuple[float | None, dict[str, float]]:
    """Seconds of an iteration and of its lanes on known GPUs, as if all were in one node; otherwise None and {}."""
    if args.dry_run_gpu not in DEVICES:
        return None, {}
    schedule = args.schedule
    residency, p = schedule.residency, schedule.num_ranks
    # Ranks with different numbers of stages have no configuration. With weights on the host, the planner has no price
    # for context parallelism or experts.
    if schedule.num_stages % p or args.context_parallel_size > 1 or args.num_experts is not None:
        return None, {}
    configuration = from_flags.configuration_of(
        args, layers, global_batch_size=hosting.num_microbatches * args.micro_batch_size * args.data_parallel_size,
        resident_stages=residency.stages, host_update=residency.update, stash=hosting.stash,
        gathers_fetch=args.l2l_fetch == "shares",
    )  # fmt: skip
    costs = from_flags.costs_by_arithmetic(args, configuration)
    seconds = costs.seconds(schedule.num_stages)
    few = min(hosting.num_microbatches, 2 * p)  # all microbatches take the same time
    lanes: dict[str, float] = {}
    for row in schedule.build((few,)).rows:
        busy = dict.fromkeys(_LANES.values(), 0.0)
        for each in row:
            if each.kind.row.lane in _LANES and each.kind in seconds:
                times = 1 if each.microbatch is None else hosting.num_microbatches / few
                busy[_LANES[each.kind.row.lane]] += times * seconds[each.kind][each.stage]
        lanes = {name: max(value, lanes.get(name, 0.0)) for name, value in busy.items()}
    return priced(costs, configuration, schedule).seconds, lanes


# --- placement --------------------------------------------------------------------------------------------------------


def place(args: TrainConfig) -> tuple[PlacementReport, list[str], list[Process]]:
    """The processes by rank, and lines about their places and the traffic between nodes. Raises ValueError."""
    given = load_topology(args.rank_topology) if args.rank_topology else None
    nodes = _nodes(args.world_size, given, args.dry_run_gpus_per_node)
    processes = [Process(node.name, slot) for node in nodes for slot in range(node.gpus)]
    ranks, lines = decide(args, processes)
    degrees = degrees_of(args)
    # Without a topology the report has no traffic and no times, so these bandwidths are never read.
    bandwidth = given.bandwidth if given else Bandwidth(within_node=1, between_nodes=1)
    topology, moving = Topology(nodes=nodes, bandwidth=bandwidth), evictors(args)
    report = make_report(args.rank_mapping, tuple(ranks), degrees, topology, evictors=moving)
    if given is None and moving and not count_crossing(report.mapping, degrees, [node.gpus for node in nodes], moving):
        num_bytes = max(cut_model(args).moved_bytes[rank] for rank in moving)
        lines.append(
            f"pairs move {num_bytes / 1e9:.3g} GB for a microbatch; the bandwidth that hides it is that over the time "
            "of a forward (BPipe, appendix B): give --rank-topology with teraflops_per_gpu to compare"
        )
    return report, lines, [processes[slot] for slot in inverse(ranks)]


def _nodes(world_size: int, topology: Topology | None, gpus_per_node: int) -> tuple[Node, ...]:
    """The nodes that the job fills, in order."""
    if topology is None:
        full, rest = divmod(world_size, gpus_per_node)
        return tuple(
            Node(name=f"node{index}", gpus=count)
            for index, count in enumerate([gpus_per_node] * full + [rest])
            if count
        )
    nodes, left = [], world_size
    for node in topology.nodes:
        if left:
            nodes.append(Node(name=node.name, gpus=min(node.gpus, left)))
            left -= nodes[-1].gpus
    if left:
        raise ValueError(
            f"--dry-run {world_size} needs more GPUs than the {topology.num_slots} of --rank-topology; add nodes to "
            "the file, or leave it out"
        )
    return tuple(nodes)
