"""Prove that a pipeline program is right before any rank executes it.

A schedule that deadlocks does so on the cluster, after the queue; one that uses the wrong weights does not even do
that, but trains to another result. Both are properties of the program's text, so they are proved from the text. One
proof a file:

    compact        every instruction is known, on the rank that owns its stage, on a microbatch of the program
    computations   each (stage, microbatch) has one forward, then one backward, with all they need before them
    transfers      sends and receives pair up in order on every channel
    balance        evicted activations come back before their backward; both ends of a move agree
    updates        each batch's gradients are reduced and applied once, in order, after its last backward
    predictions    where a policy predicts: from the gradients that the program says, before the batch begins
    versions       each computation uses the version that the policy says and finds it live; few are live
    horizons       and is predicted, where the policy says so, just up to the version of its backward
    unstepped      or stepped, with just the gradients that no STEP has taken yet
    residency      where weights live on the host: each computation finds its own on the device; few are there
    host_updates   and each stage's gradients come to the host complete, and are applied there once
    stash          where inputs are stashed there: each comes back before its recompute; few are on the device
    memory         saved activations stay within their bound; and what a split backward defers is counted
    waiting        and how many tensors wait between two stages of one rank
    progress       no deadlock, even where a send completes only once its receive is posted
    periods        the same for fill + n periods + drain, for every n

Every proof is one pass over the rows: the time grows linearly with the number of instructions. Two more ask about a job
and its GPUs, so they are called by themselves:

    hardware_queues     no deadlock where streams share FIFO hardware queues, at given tensor and data parallel degrees
    queue_environment   the environment gives a job over NCCL as many of these queues as it needs

What is not proved: that the tensors are those that the stages expect, that the replicas of a pipeline run the same
program, and anything about a rank that fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.pipeline.check.balance import prove_balance
from megatron.pipeline.check.compact import CompactProgram, ProgramError, compact
from megatron.pipeline.check.computations import prove_computations
from megatron.pipeline.check.memory import Peaks, prove_memory
from megatron.pipeline.check.periods import Periodic, PeriodOrigin, prove_periods, prove_repetition
from megatron.pipeline.check.predictions import prove_horizons, prove_predictions, prove_unstepped
from megatron.pipeline.check.progress import prove_progress, prove_transfers
from megatron.pipeline.check.residency import prove_host_updates, prove_residency, require_residency
from megatron.pipeline.check.stash import count_waiting, prove_boundaries, prove_stash
from megatron.pipeline.check.updates import prove_updates
from megatron.pipeline.check.versions import prove_evaluation, prove_versions
from megatron.pipeline.program.program import Program

__all__ = ["CheckReport", "ProgramError", "check", "check_periodic"]


@dataclass(frozen=True)
class CheckReport:
    """Facts about a program that has been proved.

    Attributes:
        num_ranks, num_stages, num_batches, num_microbatches, num_instructions: its extent.
        communicates: whether it contains transfers; those of a compute-only program are taken to happen by themselves.
        versioned: whether it names weight versions and updates weights. Without, nothing is said about either.
        peak_saved_microbatches: per stage, the largest number of microbatches between their forward and the end of
            their backward, less those evicted, more those accepted, at the worst timing.
        peak_saved_on_rank: per rank, the same over all its stages at once; a microbatch counts once at each of them.
        peak_recomputed_microbatches: per stage, the largest number between their recompute and the end of their
            backward, or of its input half.
        peak_deferred_microbatches: per stage, the largest number between the two halves of their backward, I and W, of
            which a stage holds what W needs. They are among the saved ones.
        peak_waiting_on_rank: per rank, the most activations, or gradients of them, that one of its stages has made and
            another one has not taken yet.
        live_versions: per stage, the largest number of weight versions that are live at once; empty where the program
            is not versioned.
        num_fetches: per rank, how often it fetches the weights of a stage from the host; empty where they live on the
            device.
        peak_resident_stages: per rank, the most stages whose weights are on the device at once; likewise.
        offloaded_microbatches: per stage, how many microbatches leave their input to the host and take it back.
        peak_boundaries_on_rank: where weights live on the host, per rank the most tensors between stages that are on
            its device at once, at the worst timing: those that wait between two of its stages, and inputs that are kept
            for a recompute. Empty where weights live on the device.
        evicted_microbatches: per stage, how many microbatches move to the pair stage and back.
    """

    num_ranks: int
    num_stages: int
    num_batches: int
    num_microbatches: int
    num_instructions: int
    communicates: bool
    versioned: bool
    peak_saved_microbatches: tuple[int, ...]
    peak_saved_on_rank: tuple[int, ...]
    peak_recomputed_microbatches: tuple[int, ...]
    peak_deferred_microbatches: tuple[int, ...]
    peak_waiting_on_rank: tuple[int, ...]
    live_versions: tuple[int, ...]
    num_fetches: tuple[int, ...]
    peak_resident_stages: tuple[int, ...]
    evicted_microbatches: tuple[int, ...]
    offloaded_microbatches: tuple[int, ...]
    peak_boundaries_on_rank: tuple[int, ...]


def check(
    program: Program, *, max_saved: Sequence[int] | None = None, max_saved_on_rank: Sequence[int] | None = None
) -> CheckReport:
    """Prove that a program is right.

    Args:
        program: a complete program, or a compute-only one, whose tensors are then taken to move by themselves between
            ranks. Where nothing in it names a weight version, nothing is proved about versions and updates. One that
            evaluates (`forward_only`) runs on drained stages, with the newest version, and saves nothing.
        max_saved: the largest number of saved microbatches that each stage may hold. None bounds nothing; the peaks are
            reported.
        max_saved_on_rank: the same for each rank, over all its stages; a microbatch counts once at each of them.

    Returns:
        What the program needs and holds.

    Raises:
        ProgramError: the first claim that does not hold, with rank, position, instruction and reason.
    """
    return _prove(compact(program), max_saved, max_saved_on_rank)


def _prove(
    compacted: CompactProgram, max_saved: Sequence[int] | None, max_saved_on_rank: Sequence[int] | None
) -> CheckReport:
    """Every proof of one program. Each may rely on those before it."""
    evaluates = compacted.program.forward_only
    live_versions: tuple[int, ...] = ()
    nothing = (0,) * compacted.num_stages
    peaks = Peaks(nothing, (0,) * len(compacted.codes), nothing, nothing)
    require_residency(compacted)
    prove_computations(compacted)
    prove_transfers(compacted)
    prove_balance(compacted)
    if compacted.versioned and evaluates:
        live_versions = prove_evaluation(compacted)
    elif compacted.versioned:
        prove_updates(compacted)
        prove_predictions(compacted)
        live_versions = prove_unstepped(compacted, prove_horizons(compacted, prove_versions(compacted)))
        prove_host_updates(compacted)
    num_fetches, peak_resident = prove_residency(compacted)
    prove_stash(compacted)
    peak_boundaries = prove_boundaries(compacted)
    if not evaluates:
        peaks = prove_memory(compacted, max_saved, max_saved_on_rank)
    prove_progress(compacted)
    return CheckReport(
        num_ranks=len(compacted.codes),
        num_stages=compacted.num_stages,
        num_batches=len(compacted.program.batches),
        num_microbatches=compacted.num_microbatches,
        num_instructions=compacted.num_instructions,
        communicates=compacted.communicates,
        versioned=compacted.versioned,
        peak_saved_microbatches=peaks.saved,
        peak_saved_on_rank=peaks.on_rank,
        peak_recomputed_microbatches=peaks.recomputed,
        peak_deferred_microbatches=peaks.deferred,
        peak_waiting_on_rank=count_waiting(compacted),
        live_versions=live_versions,
        num_fetches=num_fetches,
        peak_resident_stages=peak_resident,
        evicted_microbatches=compacted.program.num_evictions if compacted.moves else nothing,
        offloaded_microbatches=compacted.program.num_offloads if compacted.program.residency else nothing,
        peak_boundaries_on_rank=peak_boundaries,
    )


def check_periodic(
    periodic: Periodic, *, max_saved: Sequence[int] | None = None, max_saved_on_rank: Sequence[int] | None = None
) -> CheckReport:
    """Prove that fill + n periods + drain is right for every n >= 0.

    Args:
        periodic: rows of the fill, of one period and of the drain, and a way to unroll them.
        max_saved, max_saved_on_rank: as for `check`.

    Returns:
        The report of one period with its fill and drain; peaks and live versions are those of every n >= 1, and bound
        those of n = 0.

    Raises:
        ProgramError: what does not hold in fill + period + drain, or how the state after the period differs from the
            state before it.
    """
    one, two = periodic.unroll(1), periodic.unroll(2)
    fill, period = [len(row) for row in periodic.fill], [len(row) for row in periodic.period]
    shift = PeriodOrigin(
        microbatch=two.num_microbatches - one.num_microbatches, batch=len(two.batches) - len(one.batches)
    )
    compacted = compact(one)
    report = _prove(compacted, max_saved, max_saved_on_rank)
    prove_repetition(one, two, fill=fill, period=period, shift=shift)
    prove_periods(compacted, fill=fill, period=period, shift=shift)
    if compacted.moves:
        peaks = prove_memory(compact(two), max_saved, max_saved_on_rank)
        report = replace(report, peak_saved_microbatches=peaks.saved, peak_saved_on_rank=peaks.on_rank)
    return report
