"""The findings of a dry run, as a record, as text and as JSON."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.documents import counted
from megatron.documents.tables import console, plain_table
from megatron.pipeline.check import CheckReport
from megatron.pipeline.placement.placement_report import PlacementReport, tables
from megatron.pipeline.start_up import late_weights
from megatron.pipeline.survivors.losses import COLUMNS
from megatron.planner import GIB, RankMemory, Verdict, device_gib
from megatron.planner.memory.hosted import Hosting
from megatron.planner.memory.memory import memory_as_dict, memory_table
from megatron.planner.memory.node_memory import HostVerdict, LargestModel
from megatron.trainer.arguments.flags.config import TrainConfig, choice_of, schedule_text
from megatron.trainer.dry_run.changes import PlannedChange
from megatron.trainer.dry_run.lost_ranks import LossCosts
from megatron.trainer.plan import from_flags
from megatron.trainer.report.metrics import flops_per_sample

_MOST_NODES = 16  # the number of nodes that are shown


@dataclass(frozen=True, kw_only=True)
class HostedRun:
    """The findings of a dry run about weights on the host.

    Attributes:
        hosting: how the host keeps the weights.
        node_bytes: bytes of host memory that each node with ranks needs.
        verdict, largest: the verdict on --dry-run-host-memory, and the largest model for this memory; None without the
            flag. `largest` is also None if not even one layer per rank fits.
        seconds: the planner's seconds of an iteration; None if no GPU is named.
        lanes: lane -> the seconds that it is busy, on the rank on which it is busy longest; empty if no GPU is named.
    """

    hosting: Hosting
    node_bytes: tuple[float, ...]
    verdict: HostVerdict | None
    largest: LargestModel | None
    seconds: float | None
    lanes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A job, as a dry run has checked it.

    Attributes:
        report: the proof of the largest batches.
        verdict: the verdict on the first pipeline; None if no GPU is named.
        hosted: the findings about weights on the host; None if weights are on the device.
        lost: the cost of lost ranks; None without replicas.
    """

    args: TrainConfig
    report: CheckReport
    num_parameters: int
    memory: tuple[RankMemory, ...]
    verdict: Verdict | None
    placement: PlacementReport
    placement_lines: list[str]
    notes: list[str]
    warnings: list[str]
    hosted: HostedRun | None = None
    lost: LossCosts | None = None
    changes: list[PlannedChange] = field(default_factory=list)

    @property
    def fullest_change(self) -> PlannedChange | None:
        """The change during or after which a rank needs most memory."""
        return max(self.changes, key=lambda each: each.most_bytes, default=None)

    @property
    def verdict_of_changes(self) -> Verdict | None:
        """The verdict on the fullest change; None if nothing changes or no GPU is named."""
        if self.fullest_change is None or self.args.dry_run_gpu is None:
            return None
        return self.fullest_change.judge(device_gib(self.args.dry_run_gpu))

    def moment(self, change: PlannedChange) -> str:
        """The moment at which a change needs most memory, in words."""
        if change.is_fullest_within:
            return f"while the pipeline changes at iteration {change.iteration}"
        return f"from iteration {change.iteration} on"

    def place(self, rank: int) -> str:
        """A rank of the pipeline in words."""
        stages = self.memory[rank].stages
        return f"stage {stages[0]}" if len(stages) == 1 else f"pipeline rank {rank}"


def print_dry_run(result: DryRun, prog: str) -> None:
    """Print to standard output: tables with lines and colours on a terminal, plain tables in a pipe."""
    plain, out = not sys.stdout.isatty(), console()

    def say(*lines: str, style: str = "") -> None:
        for line in lines:
            out.print(line, style="" if plain else style, markup=False, soft_wrap=True)

    def show(title: str, *content: object) -> None:
        say(f"\n{title}", style="bold")
        for part in content:
            out.print(part)

    args, degrees, nodes = result.args, result.placement.degrees, result.placement.topology.nodes
    say(
        f"dry run of {prog}: {counted(args.world_size, 'GPU')} on {counted(len(nodes), 'node')}, tensor "
        f"{degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}",
        *_model_lines(result),
        *(f"note: {note}" for note in result.notes),
    )
    show("program")
    say(*_program_lines(result))
    show("memory of a GPU, estimated, in GiB", memory_table(result.memory, plain=plain))
    say(*_memory_lines(result))
    if result.hosted:
        show("memory of the host, estimated")
        say(*_host_lines(result.hosted, result.memory))
    if args.changes and not args.skip_train:
        show("changes of the pipeline, at most")
        say(*_change_lines(result))
    if result.lost:
        show(_title_of_lost(result.lost), *_table_of_lost(result.lost, plain=plain))
        say(*result.lost.lines)
    for title, table in tables(result.placement, plain=plain, max_nodes=_MOST_NODES):
        show(title, table)
    if len(nodes) > _MOST_NODES:
        say(f"... and {len(nodes) - _MOST_NODES} more nodes; --dry-run-json writes all of them")
    say(*result.placement_lines, *(f"warning: {warning}" for warning in result.warnings))


def _model_lines(result: DryRun) -> list[str]:
    args = result.args
    sizes = args.batch_sizes.all_sizes()
    batch = counted(sizes[0], "sample") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} samples"
    return [
        f"model: {result.num_parameters / 1e9:.4g} billion parameters on the GPUs of a replica, "
        f"{flops_per_sample(args) / 1e12:.4g} TFLOP a sample; batches of {batch}, "
        f"microbatches of {args.micro_batch_size}",
        "weights on the host train on CPUs so far: checked as a run there, priced for GPUs"
        if result.hosted
        else f"taken as there on every GPU: CUDA{_engine(args)}",
    ]


def _engine(args: TrainConfig) -> str:
    if args.transformer_impl != "transformer_engine":
        return ", without Transformer Engine (--transformer-impl local)"
    kept = "keeps attention scores" if from_flags.activation_setting(args).saves_scores else "flash attention"
    named = [each.partition("==")[2] for each in args.assume_packages or () if each.startswith("transformer")]
    version = f" {named[0]}" if named and named[0] else ""
    return f" and Transformer Engine{version} ({kept}); --transformer-impl local does without it"


def _program_lines(result: DryRun) -> list[str]:
    report, counts = result.report, sorted(set(result.args.batch_sizes.all_num_microbatches()))
    sizes = (
        counted(counts[0], "microbatch")
        if len(counts) == 1
        else f"{counts[0]} to {counts[-1]} ({len(counts)} sizes) microbatches"
    )
    lines = [
        f"{schedule_text(result.args)}, {counted(report.num_stages, 'stage')} on "
        f"{counted(report.num_ranks, 'rank')}, batches of {sizes}: proved for any number of batches "
        f"({report.num_instructions} instructions in {report.num_batches})",
        f"saved microbatches by rank: {', '.join(map(str, report.peak_saved_on_rank))}; live weight versions: "
        f"{', '.join(map(str, report.live_versions))}",
    ]
    if predictions := late_weights.description(result.args.schedule, choice_of(result.args).name, counts[0]):
        lines.append(predictions)
    if any(report.peak_deferred_microbatches):
        deferred = ", ".join(map(str, report.peak_deferred_microbatches))
        lines.append(f"of them between the halves of their backward, I and W, by stage: {deferred}")
    if any(report.evicted_microbatches):
        lines.append(
            f"evicted microbatches by stage, in {report.num_batches} batches: "
            f"{', '.join(map(str, report.evicted_microbatches))}"
        )
    if any(report.swapped_microbatches):
        most = max(result.memory, key=lambda rank: rank.swapped)
        lines.append(
            f"saved microbatches on the host by rank: {', '.join(map(str, report.peak_on_host))}, at most "
            f"{most.swapped / GIB:.2f} GiB ({result.place(most.rank)})"
        )
    return lines


def _memory_lines(result: DryRun) -> list[str]:
    verdict = result.verdict
    if verdict is None:
        fullest = max(result.memory, key=lambda rank: rank.total)
        return [
            f"{result.place(fullest.rank)} needs most, {fullest.total / GIB:.1f} GiB; --dry-run-gpu says whether that "
            "fits"
        ]
    return _verdict_lines(result, verdict, result.place(verdict.rank))


def _verdict_lines(result: DryRun, verdict: Verdict, where: str) -> list[str]:
    spare = f"{'leaves' if verdict.free_gib >= 0 else 'misses'} {abs(verdict.free_gib):.1f} GiB"
    lines = [f"{result.args.dry_run_gpu}: {verdict.word}; {where} {spare}"]
    if verdict.is_borderline:
        besides = verdict.free_gib - verdict.spare_gib
        lines.append(
            f"the CUDA context, the allocator and what waits for collectives need {besides:.1f} GiB beside tensors: no "
            "run is known that did with less"
        )
    return lines


def _host_lines(run: HostedRun, memory: Sequence[RankMemory]) -> list[str]:
    """Lines about weights on the host."""
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


def _change_lines(result: DryRun) -> list[str]:
    if not result.changes:
        return ["nothing changes: no interval freezes a layer or finds a pipeline that is faster"]
    lines = [_change_line(result.args, each) for each in result.changes]
    if verdict := result.verdict_of_changes:
        where = f"{result.moment(result.fullest_change)} pipeline rank {verdict.rank}"
        lines += _verdict_lines(result, verdict, where)
    return lines


def _change_line(args: TrainConfig, change: PlannedChange) -> str:
    now = change.arrangement
    text = (
        f"iteration {change.iteration}: {now.num_frozen} of {args.num_layers} layers frozen, pipeline {now.pipeline} x "
        f"data {now.data}, layers by rank {now}{', the ranks of a pipeline in a row' * now.pipelines_in_a_row}; the "
        f"fullest rank {_size(change.num_bytes)}, while it changes {_size(change.bytes_in_change)}; at most "
        f"{_size(change.bytes_moved)} move between ranks"
    )
    if change.speedup is not None:
        text += f"; batches {change.speedup:.2f} times as fast as without another cut"
    if now.cached and args.activation_cache_use == "auto":
        text += "; whether the cache is read, measured times decide"
    return text


def _title_of_lost(lost: LossCosts) -> str:
    if not lost.losses:
        return "a lost rank"
    unit = "seconds" if lost.seconds else "times of a layer's forward"
    undisturbed = next(each.survivors.undisturbed for each in lost.losses if each.survivors)
    return f"a lost rank, of any replica: batches in {unit}, {undisturbed:.4g} while none is lost"


def _table_of_lost(lost: LossCosts, *, plain: bool) -> list[object]:
    rows = [each.row() for each in lost.losses]
    return [plain_table(COLUMNS, rows, plain=plain, left=COLUMNS[:1])] if rows else []


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.2f} MiB"


def to_dict(result: DryRun) -> dict:
    """The findings for JSON: in bytes, and in GiB where a name says so."""
    report = result.report
    return {
        "world_size": result.args.world_size,
        "schedule": choice_of(result.args).name,
        **({} if result.args.program is None else {"program_sha256": result.args.program.sha256}),
        "num_microbatches": sorted(set(result.args.batch_sizes.all_num_microbatches())),
        "program": {name: getattr(report, name) for name in sorted(vars(report))},
        "memory": [memory_as_dict(rank) for rank in result.memory],
        "verdict": _verdict(result),
        "placement": {**result.placement.to_dict(), "lines": result.placement_lines},
        "changes": [
            {
                "iteration": each.iteration,
                "bytes": each.num_bytes,
                "bytes_in_change": each.bytes_in_change,
                "bytes_moved": each.bytes_moved,
                "speedup": each.speedup,
                **each.arrangement.state_dict(),
            }
            for each in result.changes
        ],
        **(
            {"lost": {"losses": [each.to_dict() for each in result.lost.losses], "lines": list(result.lost.lines)}}
            if result.lost
            else {}
        ),
        "notes": result.notes,
        "warnings": result.warnings,
        **({"host": _host_to_dict(result.hosted, result.memory)} if result.hosted else {}),
    }


def _verdict(result: DryRun) -> dict | None:
    """The verdict on the first pipeline, or on a change if it leaves less memory; `iteration` says which."""
    verdict, change = result.verdict, None
    if verdict is None:
        return None
    if result.verdict_of_changes is not None and result.verdict_of_changes.free_gib < verdict.free_gib:
        verdict, change = result.verdict_of_changes, result.fullest_change
    return {
        "word": verdict.word,
        "rank": verdict.rank,
        "spare_gib": verdict.free_gib,
        "iteration": change and change.iteration,
    }


def _host_to_dict(run: HostedRun, memory: Sequence[RankMemory]) -> dict:
    """The findings about the host, for JSON: in bytes and seconds, and in GiB where a name says so."""
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
