"""Appendix A of the BPipe paper: the same pass balances ranks with several stages, on an order written down here."""

from itertools import chain

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules.passes.activations import add_balance, balanced_bounds
from megatron.pipeline.schedules.passes.communication import add_communication
from megatron.pipeline.schedules.passes.updates import add_updates, set_versions
from megatron.pipeline.schedules.pipeline_schedule import ProgramInSegments
from tests.pipeline.schedules.passes.fewest_moves import fewest_evictions
from tests.pipeline.strategies import kinds_of, text


def interleaved(rank: int, p: int, v: int, m: int) -> list[Instruction]:
    """Megatron's order (Narayanan et al., 2021, section 2.2) with groups of p microbatches; p divides m."""

    def computation(kind: Kind, index: int) -> Instruction:
        group, place = divmod(index, p * v)
        chunk = place // p if kind is Kind.FORWARD else v - 1 - place // p
        return Instruction(kind, chunk * p + rank, group * p + place % p)

    total = m * v
    ahead = min(2 * (p - rank - 1) + (v - 1) * p, total)
    row = [computation(Kind.FORWARD, index) for index in range(ahead)]
    for index in range(ahead, total):
        row += [computation(Kind.FORWARD, index), computation(Kind.BACKWARD, index - ahead)]
    return row + [computation(Kind.BACKWARD, index) for index in range(total - ahead, total)]


def balanced(p: int, v: int, m: int) -> Program:
    """A complete flush program of one batch, balanced within the appendix's bound."""
    extent = Extent(tuple(range(p)) * v, (m,), FLUSH, global_norm=False)
    segments_of_rank = [[interleaved(rank, p, v, m), []] for rank in range(p)]
    saved = [p * (v - 1) + 2 * (p - rank - 1) + 1 for rank in range(p)]
    segments_of_rank = add_balance(segments_of_rank, extent, balanced_bounds(saved, extent.pairs))
    segments_of_rank = [
        set_versions(add_updates(segments, rank, extent), extent) for rank, segments in enumerate(segments_of_rank)
    ]
    return ProgramInSegments.join(extent, add_communication(segments_of_rank, extent)).program


def test_figure_10():
    """4 ranks, 2 stages on each, 8 microbatches: two evictions in the warm-up of rank 0, and never more than 9."""
    program = balanced(4, 2, 8)
    row = kinds_of(program.rows[0], Kind.FORWARD, Kind.BACKWARD, Kind.EVICT, Kind.LOAD)
    words = " ".join(f"{each.stage}{each.kind.value}{each.microbatch}" for each in row)
    assert words == (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0EVICT3 0F4 0EVICT4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 "
        "0LOAD3 0B2 0B3 4B4 4B5 4B6 0LOAD4 4B7 0B4 0B5 0B6 0B7"
    )
    requests = kinds_of(program.rows[3], Kind.ACCEPT, Kind.RETURN)
    assert text(requests) == "7ACCEPT3 7ACCEPT4 7RETURN3 7RETURN4"
    assert check(program, max_saved_on_rank=[9] * 4).peak_saved_on_rank == (9, 9, 7, 7)


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_bound_is_kept(p: int, v: int, groups: int):
    """pv+1 microbatches on evictor and acceptor, whatever the timing; no deadlock, every load in time."""
    bounds = [p * v + 1] * p
    if p % 2:
        bounds[p // 2] = p * (v - 1) + p  # between the pairs: what it saves by itself
    report = check(balanced(p, v, groups * p), max_saved_on_rank=bounds)
    unbalanced = 2 * (p - 1) + (v - 1) * p + 1
    assert any(report.evicted_microbatches) == (min(unbalanced, groups * p * v) > p * v + 1)


@pytest.mark.parametrize(("p", "v", "m"), [(3, 2, 3), (3, 2, 6), (4, 2, 4), (4, 2, 8)])
def test_no_program_moves_less(p: int, v: int, m: int):
    """All ways to evict and load within the bound are tried: none moves fewer than the pass, on any rank."""
    counts = balanced(p, v, m).num_evictions
    moved = []
    for rank in range(p // 2):
        row = [(each.kind.value, (each.stage, each.microbatch)) for each in interleaved(rank, p, v, m)]
        moved.append(sum(counts[rank::p]))
        assert moved[-1] == fewest_evictions(row, p * v + 1, {}, at_most=moved[-1])
    assert any(moved) == (m > p)
    assert not any(chain(*(counts[rank::p] for rank in range((p + 1) // 2, p))))
