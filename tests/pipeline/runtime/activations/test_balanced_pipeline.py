"""Balanced schedules across processes: the same numbers, within the bound that the checker proves."""

import pytest
import torch

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import MOVES, Kind
from megatron.pipeline.runtime.activations.saved_tensors import ALIGNMENT
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime.activations import balance_cases
from tests.pipeline.runtime.stages.module.reference import Training

CASES = "tests.pipeline.runtime.activations.balance_cases"
BPIPE, TWO_BW = ("bpipe", {}), ("2bw", {"balance": True})
INTERLEAVED = ("interleaved", {"balance": True, "num_virtual_stages": 2})
UNBALANCED = {"bpipe": "flush", "2bw": "2bw", "interleaved": "interleaved"}


def num_buffers(row) -> int:
    """The most buffers in use, were every move posted as soon as the row requests it and none were late."""
    loaded, lent, most = set(), 0, 0
    for each in row:
        key = each.stage, each.microbatch
        lent += (each.kind is Kind.ACCEPT) - (each.kind is Kind.RETURN)
        loaded |= {key} if each.kind is Kind.LOAD else set()
        loaded -= {key} if each.kind is Kind.BACKWARD else set()
        most = max(most, lent, len(loaded) + (each.kind is Kind.EVICT))
    return most


def train(num_ranks, preset, training, *, moves, **options):
    return workers.run(
        num_ranks, f"{CASES}:train", preset=preset, training=training, moves=moves, timeout=120, **options
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("p", "preset", "options", "training"),
    [
        (4, *BPIPE, Training(batches=(8, 4, 12), dropout=0.2)),
        (4, *INTERLEAVED, Training(batches=(8, 4, 8), dropout=0.2)),
        (8, *BPIPE, Training(batches=(16, 8, 11), dropout=0.2)),
        (8, "bpipe", {"recompute": True}, Training(batches=(16, 9), dropout=0.2)),
        (4, *BPIPE, Training(batches=(8, 6), dropout=0.2, clip_grad=0.05, num_replicas=2)),
        (8, *TWO_BW, Training(batches=(8, 8, 16, 9), dropout=0.2)),
        pytest.param(4, "bpipe", {"recompute": True}, Training(batches=(8, 6), dropout=0.2), marks=pytest.mark.full),
        pytest.param(4, *TWO_BW, Training(batches=(4, 8, 5, 8), dropout=0.2), marks=pytest.mark.full),
        pytest.param(
            4, "2bw", {"balance": True, "recompute": True}, Training(batches=(4, 8, 5)), marks=pytest.mark.full
        ),
        pytest.param(
            4,
            "interleaved",
            {"balance": True, "num_virtual_stages": 2, "recompute": True},
            Training(batches=(8, 8), dropout=0.2),
            marks=pytest.mark.full,
        ),
    ],
)
def test_moved_activations_change_no_bit(p, preset, options, training):
    """Losses, norms, gradients and parameters are those of the same schedule without moves, drained in between or not;
    every rank stays within its bound of microbatches and of bytes.
    """
    world = p * training.num_replicas
    drains = tuple(range(1, len(training.batches)))
    kept = train(world, UNBALANCED[preset], training, moves=False, **options | {"balance": False})
    moved = train(world, preset, training, moves=True, drains=drains, **options)
    schedule = Schedule.preset(preset, num_stages=p * options.get("num_virtual_stages", 1), **options)
    assert len(schedule.evicting_ranks(training.batches)) > 0
    by_stage, by_rank = (
        schedule.max_saved_microbatches(training.batches),
        schedule.max_saved_on_rank(training.batches),
    )
    for rank, (one, other) in enumerate(zip(kept, moved, strict=True)):
        assert one.reports == other.reports
        assert len(one.gradients) == len(other.gradients) == len(training.batches)
        assert all(torch.equal(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))
        assert one.parameters.keys() == other.parameters.keys()
        assert all(torch.equal(tensor, other.parameters[name]) for name, tensor in one.parameters.items())
        assert other.num_incomplete == 0
        assert all(peak <= by_stage[stage] for stage, peak in other.peak_saved.items())
        assert other.peak_on_rank <= by_rank[rank % p]
        assert other.peak_bytes <= by_rank[rank % p] * (other.microbatch_bytes + ALIGNMENT)
    fullest_kept, fullest = (max(each.peak_on_rank for each in run) for run in (kept, moved))
    assert fullest < fullest_kept
    assert max(each.peak_bytes for each in moved) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("p", "preset", "options", "bound"),
    [
        (8, *BPIPE, 5),
        (8, *TWO_BW, 5),
        (8, *INTERLEAVED, 8 * 2 + 1),
        pytest.param(4, *BPIPE, 3, marks=pytest.mark.full),
        pytest.param(4, *TWO_BW, 3, marks=pytest.mark.full),
        pytest.param(4, *INTERLEAVED, 4 * 2 + 1, marks=pytest.mark.full),
    ],
)
def test_no_rank_exceeds_its_bound_however_the_ranks_drift(p, preset, options, bound):
    """Stages of uneven speed move real bytes: the right ones come back, all that runs is the program, moves end in
    the program's order, neither microbatches nor bytes are ever more than the bound, and the buffers are as many as the
    program can need.
    """
    batches = (2 * p, 3 * p, p, 3 * p)
    outcomes = workers.run(
        p, f"{CASES}:emulate", preset=preset, batches=batches, seed=p, longest=0.006, timeout=120, **options
    )
    schedule = Schedule.preset(preset, num_stages=p * options.get("num_virtual_stages", 1), **options)
    stream, rows = schedule.stream(), [[] for _ in range(p)]
    for batch, num_microbatches in enumerate(batches):
        segments = [stream.start_batch(num_microbatches), stream.drain() if batch else ((),) * p]
        for row, *parts in zip(rows, *segments, strict=True):
            row += [instruction for part in parts for instruction in part]
    report = check(schedule.build(batches[:2]))
    assert max(report.peak_saved_on_rank) <= bound
    for rank, (outcome, row) in enumerate(zip(outcomes, rows, strict=True)):
        assert outcome.executed == [str(instruction) for instruction in row]
        assert outcome.moves == [str(instruction) for instruction in row if instruction.kind in MOVES]
        for stage, peak in outcome.peak_saved.items():
            assert 0 < peak <= report.peak_saved_microbatches[stage]
        assert outcome.peak_on_rank <= report.peak_saved_on_rank[rank] <= bound
        assert outcome.peak_bytes <= outcome.peak_on_rank * balance_cases.ACTIVATION_BYTES
        assert outcome.num_buffers[-1] == num_buffers(row)
        assert outcome.num_incomplete == 0
    assert sum(len(outcome.moves) for outcome in outcomes) > 0


def test_what_is_given_up_leaves_no_thread_and_no_file():
    """Of an engine whose moves wait for a rank that is lost, time and again."""
    training = Training(batches=(8, 8))
    for counts in workers.run(4, f"{CASES}:abandon", preset="bpipe", training=training, rounds=3, timeout=120):
        first, *later = counts
        assert all(each <= first for each in later), counts
