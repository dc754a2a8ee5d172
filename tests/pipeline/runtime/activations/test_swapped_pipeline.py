"""Saved activations that wait on the host: the same numbers, and fewer bytes on the device, as many as are proved."""

from unittest import mock

import pytest
import torch

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import SWAPS as SWAP_WORDS
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule, Schedule
from tests import workers
from tests.pipeline.brought_programs import SWAPS, swapped
from tests.pipeline.runtime.activations import balance_cases
from tests.pipeline.runtime.stages.module.reference import Training


def of_program(case, program: Program, *arguments, **options) -> balance_cases.Balanced:
    """A run of `balance_cases` under the rows of a program."""
    torch.manual_seed(5)  # of the dropout
    schedule = ProgramSchedule.of(program)
    with mock.patch.object(Schedule, "preset", lambda *_, **__: schedule):
        return case("", *arguments, **options)


def trained(programs: list[Program], training: Training) -> list[balance_cases.Balanced]:
    return [of_program(balance_cases.train, each, training, moves=True, drains=(1, 3)) for each in programs]


def emulated(programs: list[Program], seed: int) -> list[balance_cases.Balanced]:
    return [of_program(balance_cases.emulate, each, (4,) * 4, seed=seed, longest=0.004) for each in programs]


def given_up(program: Program, training: Training) -> list[tuple[int, int]]:
    return of_program(balance_cases.abandon, program, training, rounds=3)


def without_swaps(program: Program) -> Program:
    return program.with_rows(tuple(tuple(each for each in row if each.kind not in SWAP_WORDS) for row in program.rows))


FLUSH = ProgramSchedule.of(Program.from_csv(SWAPS)).program
PROGRAMS = {
    "flush": FLUSH,
    "2bw": swapped(Schedule.preset("2bw", num_stages=2).build((4,) * 4)),
    "halves": swapped(Schedule.preset("zb-h1", num_stages=2).build((4,)), ahead=2),
    "recomputed": swapped(Schedule.preset("gpipe", num_stages=2, recompute=True).build((4,))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_same_numbers(program: Program):
    """Losses, gradients and weights to the last bit, and no more microbatches on a rank than are proved. The second
    half of the run makes no more buffers than the first.
    """
    training, most = Training(batches=(4,) * 4, dropout=0.2), check(program).peak_saved_on_rank
    ranks = workers.run(2, f"{__name__}:trained", programs=[program, without_swaps(program)], training=training)
    for rank, (away, here) in enumerate(ranks):
        assert [each.losses for each in away.reports] == [each.losses for each in here.reports]
        assert all(torch.equal(*pair) for pair in zip(away.gradients, here.gradients, strict=True))
        assert all(torch.equal(each, here.parameters[name]) for name, each in away.parameters.items())
        assert away.peak_on_rank <= most[rank]
        assert len(set(away.num_buffers)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_less_memory_at_any_speed(seed: int):
    """Stages that sleep for times of their own: never more bytes than are proved, and fewer than where all stays."""
    most = check(FLUSH).peak_saved_on_rank
    assert most == (3, 3)
    for rank, (away, here) in enumerate(
        workers.run(2, f"{__name__}:emulated", programs=[FLUSH, without_swaps(FLUSH)], seed=seed)
    ):
        assert away.peak_bytes <= most[rank] * balance_cases.ACTIVATION_BYTES
        assert rank or away.peak_bytes < here.peak_bytes == 4 * balance_cases.ACTIVATION_BYTES


def test_what_is_given_up_leaves_no_thread():
    """Of an engine whose activations wait on the host, time and again."""
    training = Training(batches=(4, 4))
    for counts in workers.run(2, f"{__name__}:given_up", program=FLUSH, training=training, timeout=120):
        assert len({threads for threads, _ in counts}) == 1, counts
