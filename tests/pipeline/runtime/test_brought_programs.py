"""Programs that nobody planned, executed: for any order, stages anywhere, and drains at any batch, a run computes what
one process computes, to the last bit.
"""

import random
from unittest import mock

import pytest

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW, WeightPolicy
from megatron.pipeline.schedules import ProgramSchedule, Schedule
from tests import workers
from tests.pipeline.brought_programs import hurried, swapped
from tests.pipeline.made_up_programs import Habits, rows_of
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training

torch = pytest.importorskip("torch")

POLICIES = {0: FLUSH, 1: TWO_BW, 2: WeightPolicy("3bw", delay=2)}
PLACEMENTS = ((0, 1, 1, 0), (1, 0, 0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 0), (1, 0))
NUM_RUN = 8  # batches


def made_up(seed: int, delay: int) -> Program:
    """Computations of a few batches, in an order drawn from the seed, a third with backwards in halves; gradients are
    summed in ascending order.
    """
    draw = random.Random(seed)
    placement, size = draw.choice(PLACEMENTS), draw.randint(1, 4)
    batches = (size,) * (1 if delay == 0 and draw.random() < 0.5 else draw.randint(3, 6))
    most = tuple(draw.randint(1, 4) for _ in placement)
    habits = Habits(seed, most, tuple(range(size)), splits=seed % 3 == 0, rhythm=draw.randint(1, 2))
    extent = Extent(rank_of_stage=placement, batches=batches, weights=POLICIES[delay], recompute=draw.random() < 0.3)
    return Program.of(extent, rows_of(placement, batches, delay, habits))


def run_all(programs: list[Program], drains: list[tuple[int, ...]]) -> list:
    """Each program's run of `NUM_RUN` batches, which drains behind some of them and evaluates there."""
    from tests.pipeline.runtime.stages.module.module_cases import run

    outcomes = []
    for program, where in zip(programs, drains, strict=True):
        schedule = ProgramSchedule.of(program)
        with mock.patch.object(Schedule, "preset", lambda *_, schedule=schedule, **__: schedule):
            training = Training(batches=(program.batches[0],) * NUM_RUN)
            outcomes.append(run("", training, drains=where, evaluate=3, moves_activations=schedule.swaps))
    return outcomes


@pytest.mark.sample(1)
@pytest.mark.parametrize("delay", POLICIES)
def test_any_program_trains_as_one_process(delay):
    """Eight orders, with their receives and steps at places of the passes or earlier, and half of them with activations
    that wait on the host; no message is left over.
    """
    programs, drains = [], []
    for seed in range(8):
        program = ProgramSchedule.of(made_up(100 * delay + seed, delay)).program
        programs.append(_hurried_if_right(program) if seed % 2 else _swapped_if_right(program, ahead=1 + seed % 3))
        drains.append(tuple(sorted(random.Random(seed).sample(range(NUM_RUN), 2))))
    ranks = workers.run(2, f"{__name__}:run_all", programs=programs, drains=drains)
    for program, *outcomes in zip(programs, *ranks, strict=True):
        expected = reference.train(Training(batches=(program.batches[0],) * NUM_RUN), delay=delay)
        for outcome in outcomes:
            assert [report.batch for report in outcome.reports] == list(range(NUM_RUN))
            assert [report.losses["loss"] for report in outcome.reports] == expected.losses
            assert outcome.num_unread_sends == outcome.num_saved_at_end == 0 and len(outcome.evaluations) == 2
            assert all(torch.equal(each, expected.parameters[name]) for name, each in outcome.parameters.items())


def _hurried_if_right(program: Program) -> Program:
    from megatron.pipeline.check import ProgramError, check

    moved = hurried(program)
    try:
        check(moved)
    except ProgramError:
        return program
    return moved


def _swapped_if_right(program: Program, *, ahead: int) -> Program:
    """The program with swaps; without them where its batches do not repeat with every second microbatch."""
    from megatron.pipeline.check import ProgramError

    moved = swapped(program, ahead=ahead)
    try:
        ProgramSchedule.of(moved)
    except ProgramError:
        return program
    return moved
