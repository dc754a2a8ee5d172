"""Programs and torch.distributed.pipelining: its files load here, ours load there."""

import csv
import io
from collections.abc import Callable

import pytest

from megatron.pipeline.check import ProgramError, check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

Actions = dict[int, list]


def interleaved(num_ranks: int, stages_per_rank: int, num_microbatches: int, *, zero_bubble: bool) -> Actions:
    """What torch's own builders give, without the stages and processes that their constructors ask for."""
    name = "ScheduleInterleavedZeroBubble" if zero_bubble else "ScheduleInterleaved1F1B"
    schedule = object.__new__(getattr(torch_schedules, name))
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, stages_per_rank
    schedule._n_microbatches, schedule.microbatches_per_round = num_microbatches, num_ranks
    schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    if zero_bubble:
        schedule.pipeline_order = schedule._add_bubbles_to_actions(num_ranks * stages_per_rank)
    return schedule.pipeline_order


def dump(actions: Actions) -> str:
    """As torch writes its files."""
    file = io.StringIO()
    writer = csv.writer(file)
    for rank in actions:
        writer.writerow(actions[rank])
    return file.getvalue()


def load(content: str) -> Actions:
    """As torch reads its files."""
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(content)))
    }


@pytest.mark.parametrize("zero_bubble", [False, True])
@pytest.mark.parametrize(("num_ranks", "stages_per_rank", "num_microbatches"), [(2, 1, 4), (2, 2, 4), (4, 2, 8)])
def test_torchs_files_load(num_ranks: int, stages_per_rank: int, num_microbatches: int, zero_bubble: bool):
    """Files of torch's interleaved orders load, are proved, and are exported as torch wrote them, less blanks."""
    actions = interleaved(num_ranks, stages_per_rank, num_microbatches, zero_bubble=zero_bubble)
    program = Program.from_csv(dump(actions))
    assert program.batches == (num_microbatches,)
    assert program.rank_of_stage == tuple(range(num_ranks)) * stages_per_rank
    check(program)
    without_blanks = {rank: [action for action in row if action is not None] for rank, row in actions.items()}
    assert load(program.to_torch_csv()) == without_blanks


def single(name: str, num_stages: int, num_microbatches: int) -> Actions:
    """The same for torch's orders with one stage on each rank, which end in a reduction of gradients."""
    schedule = object.__new__(getattr(torch_schedules, name))
    schedule._num_stages, schedule._n_microbatches = num_stages, num_microbatches
    return schedule._get_pipeline_order()


@pytest.mark.parametrize(("name", "preset"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "flush")])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 2), (2, 4), (4, 8)])
def test_torchs_own_gpipe_and_1f1b_load(name: str, preset: str, num_stages: int, num_microbatches: int):
    """They compute what our presets do; torch's mark that gradients are complete stands for nothing here.

    Torch's 1F1B numbers the forwards of its last rank from 1, which the checker tells.
    """
    program = Program.from_csv(dump(single(name, num_stages, num_microbatches)))
    ours = Schedule.preset(preset, num_stages=num_stages).build((num_microbatches,))
    rows = list(zip(program.rows, ours.rows, strict=True))
    if preset == "flush" and program.rows[-1][0].microbatch == 1:
        with pytest.raises(ProgramError, match=f"no {num_stages - 1}F0 stands before it"):
            check(program)
        rows.pop()
    else:
        check(program)
    for row, expected in rows:
        computations = [(each.kind, each.microbatch) for each in expected if each.kind.is_computation]
        assert [(each.kind, each.microbatch) for each in row] == computations


def test_a_reduction_ahead_of_a_backward_is_refused():
    """Where torch's mark stands too early, the file is wrong."""
    with pytest.raises(ValueError, match=r"column 4: 0B1 adds to gradients that column 3 reduces"):
        Program.from_csv("0F0,0F1,0REDUCE_GRAD,0B1,0B0")


@pytest.mark.parametrize("name", ["gpipe", "flush", "2bw"])
def test_torch_reads_ours(name: str):
    """Compute-only: torch parses every cell, accepts the order, lowers it, and its simulator runs it to the end."""
    program = Schedule.preset(name, num_stages=4, recompute=True).build((4, 5), first_batch=2, first_microbatch=9)
    actions = load(program.to_torch_csv())
    torch_schedules._validate_schedule(actions, 4, 4, 9)
    expected = [
        [
            f"{each.stage}{each.kind.value}{each.microbatch - 9}"
            for each in row
            if each.kind in (Kind.FORWARD, Kind.BACKWARD)
        ]
        for row in program.rows
    ]
    assert [list(map(str, actions[rank])) for rank in range(4)] == expected
    rank_of_stage: Callable[[int], int] = lambda stage: stage  # noqa: E731
    lowered = torch_schedules._add_send_recv(actions, stage_to_rank=rank_of_stage, num_stages=4)
    torch_schedules._simulate_comms_compute(lowered, stage_to_rank=rank_of_stage, num_stages=4)


def test_torch_reads_our_transfers():
    """With communication every cell is an action of torch's: computations, transfers and the reduction of gradients."""
    program = Schedule.preset("flush", num_stages=2, data_parallel=True).build((2,))
    actions = load(program.to_torch_csv(communication=True))
    assert [" ".join(map(str, actions[rank])) for rank in range(2)] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
