"""Prove that a pipeline program is correct before any rank executes it.

A schedule with a deadlock hangs only on the cluster, after waiting in its queue; a schedule that uses the wrong weights
does not fail at all, but trains to another result. Both errors are properties of the program's text, so the text is
enough to prove their absence. Each proof is about one claim:

    compact        each instruction is known, is in the row of its stage's rank, and names a microbatch of the program
    computations   each (stage, microbatch) has one forward, then one backward, each after everything that it needs
    transfers      sends and receives pair up in order on every channel
    balance        moved activations come back before their backward; both ends of a move agree
    updates        each batch's gradients are reduced and applied once, in order, after its last backward
    validations    an optimistic step is validated by all ranks at one cut, and a refused one can be undone
    predictions    predicted weights are made from the gradients that the program names, before their batch begins
    versions       each computation uses the version that the policy demands, which is live; few versions are live
    horizons       a predicted forward is predicted up to the version of its backward
    unstepped      a provisionally stepped forward uses exactly the gradients that no STEP has applied yet
    residency      with weights on the host, each computation finds its weights on the device; few are there at once
    host_updates   with weights on the host, each stage's gradients reach the host complete and are applied once
    stash          with inputs on the host, each comes back before its recompute; few are on the device at once
    memory         saved activations stay within their bound; deferred microbatches of split backwards are counted
    waiting        the tensors that wait between two stages of one rank are counted
    progress       no deadlock occurs, even if a send completes only once its receive is posted
    periods        all of this holds for fill + n periods + drain, for every n

Every proof is one pass over the rows, so its time is linear in the number of instructions. Further proofs depend on the
job and its GPUs and are called separately:

    hardware_queues     no deadlock if streams share FIFO hardware queues, at given tensor and data parallel degrees,
                        and the environment gives a job over NCCL as many hardware queues as it needs

The proofs do not cover the contents of tensors, the agreement of the programs of several replicas, and failures of
ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.pipeline.check.compact import CompactProgram, ProgramError, compact
from megatron.pipeline.check.computations import prove_balance, prove_computations
from megatron.pipeline.check.memory import (
    Peaks,
    count_on_host,
    count_waiting,
    prove_boundaries,
    prove_memory,
    prove_stash,
)
from megatron.pipeline.check.periods import Periodic, PeriodOrigin, prove_periods, prove_repetition
from megatron.pipeline.check.predictions import prove_horizons, prove_predictions, prove_unstepped
from megatron.pipeline.check.progress import prove_progress, prove_transfers
from megatron.pipeline.check.residency import prove_host_updates, prove_residency, require_residency
from megatron.pipeline.check.updates import prove_evaluation, prove_updates, prove_versions
from megatron.pipeline.check.validations import prove_validations, without_refused
from megatron.pipeline.program.program import Program

__all__ = ["CheckReport", "ProgramError", "check", "check_periodic"]


@dataclass(frozen=True)
class CheckReport:
    """Facts about a proved program.

    Attributes:
        num_ranks, num_stages, num_batches, num_microbatches, num_instructions: the size of the program.
        communicates: whether the program contains transfers. The tensors of a compute-only program are assumed to move
            without transfers.
        versioned: whether the program names weight versions and updates weights. If not, nothing is proved about
            versions and updates.
        peak_saved_microbatches: per stage, the largest number of microbatches between their forward and the end of
            their backward, less evicted ones, plus accepted ones, at the worst timing.
        peak_saved_on_rank: per rank, the largest sum over its stages; a microbatch counts once at each stage.
        peak_recomputed_microbatches: per stage, the largest number of microbatches between their recompute and the end
            of their backward (of I, if it is split).
        peak_deferred_microbatches: per stage, the largest number of microbatches between the halves I and W of their
            backward, for which the stage keeps only the tensors that W needs. They are included in the saved ones.
        peak_waiting_on_rank: per rank, the largest number of activations and gradients that one of its stages has
            produced and another of its stages has not consumed yet.
        live_versions: per stage, the largest number of weight versions that are live at once; empty if the program is
            not versioned.
        num_fetches: per rank, the number of fetches of a stage's weights from the host; empty if weights live on the
            device.
        peak_resident_stages: per rank, the largest number of stages whose weights are on the device at once; empty if
            weights live on the device.
        offloaded_microbatches: per stage, the number of microbatches whose input moves to the host and back.
        peak_boundaries_on_rank: per rank, the largest number of tensors between stages on its device at the worst
            timing: tensors that wait between two of its stages, and inputs kept for a recompute. Empty if weights live
            on the device.
        evicted_microbatches: per stage, the number of microbatches that move to the pair stage and back.
        peak_unvalidated_steps: per rank, the largest number of steps that are not validated. For each of them the rank
            keeps a copy of the state that the step has changed. Empty if steps are not optimistic.
        swapped_microbatches: per stage, the number of microbatches whose saved activations move to the host and back.
        peak_on_host: per rank, the largest number of microbatches whose saved activations are on the host, over all its
            stages.
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
    swapped_microbatches: tuple[int, ...]
    peak_on_host: tuple[int, ...]
    offloaded_microbatches: tuple[int, ...]
    peak_boundaries_on_rank: tuple[int, ...]
    peak_unvalidated_steps: tuple[int, ...]


def check(
    program: Program, *, max_saved: Sequence[int] | None = None, max_saved_on_rank: Sequence[int] | None = None
) -> CheckReport:
    """Prove that a program is correct.

    Args:
        program: a complete program, or a compute-only program, whose tensors are assumed to move between ranks without
            transfers. If no instruction names a weight version, nothing is proved about versions and updates. A program
            that evaluates (`forward_only`) runs on drained stages with the newest version, and saves nothing. If a
            program has ROLLBACKs, the report describes the program without the instructions that they drop.
        max_saved: the largest number of saved microbatches that each stage may hold; None sets no bound.
        max_saved_on_rank: the same bound for each rank, over all its stages; a microbatch counts once at each stage.

    Returns:
        The facts about the program, with its peaks.

    Raises:
        ProgramError: for the first claim that does not hold, with rank, position, instruction and reason.
    """
    return _prove(compact(without_refused(program)), max_saved, max_saved_on_rank)


def _prove(
    compacted: CompactProgram, max_saved: Sequence[int] | None, max_saved_on_rank: Sequence[int] | None
) -> CheckReport:
    """Run every proof of one program in order; a proof may rely on the proofs before it."""
    evaluates = compacted.program.forward_only
    live_versions: tuple[int, ...] = ()
    unvalidated: tuple[int, ...] = ()
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
        unvalidated = prove_validations(compacted)
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
        **peaks._asdict(),
        peak_waiting_on_rank=count_waiting(compacted),
        live_versions=live_versions,
        num_fetches=num_fetches,
        peak_resident_stages=peak_resident,
        evicted_microbatches=compacted.program.num_evictions if compacted.moves else nothing,
        swapped_microbatches=compacted.program.num_offloads if compacted.swaps else nothing,
        peak_on_host=count_on_host(compacted),
        offloaded_microbatches=compacted.program.num_offloads if compacted.program.residency else nothing,
        peak_boundaries_on_rank=peak_boundaries,
        peak_unvalidated_steps=unvalidated,
    )


def check_periodic(
    periodic: Periodic, *, max_saved: Sequence[int] | None = None, max_saved_on_rank: Sequence[int] | None = None
) -> CheckReport:
    """Prove that fill + n periods + drain is correct for every n >= 0.

    Args:
        periodic: rows of the fill, of one period and of the drain, and a way to unroll them.
        max_saved, max_saved_on_rank: as for `check`.

    Returns:
        The report of fill + one period + drain. Its peaks and live versions hold for every n >= 1, and are upper bounds
        for n = 0.

    Raises:
        ProgramError: for a claim that does not hold in fill + period + drain, or a difference between the states before
            and after the period.
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
        report = replace(
            report,
            peak_saved_microbatches=peaks.peak_saved_microbatches,
            peak_saved_on_rank=peaks.peak_saved_on_rank,
        )
    return report
