"""Built programs: every order and policy, over p, m, ramp-ups and places of a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import shifted_row
from megatron.pipeline.program.weight_policies import FLUSH, STASH, TWO_BW, WeightPolicy
from megatron.pipeline.schedules import PRESETS, Schedule
from tests.draws import draws
from tests.pipeline.strategies import Run, kinds_of, runs, text


@draws(60)
@given(runs())
def test_flush_and_gpipe_drain_between_batches(run: Run):
    """Under flush no microbatch is in flight at a STEP; 2bw drains at the end alone, where the last steps stand."""
    program = run.build()
    for stage, row in enumerate(program.rows):
        in_flight, drained = 0, 0
        for instruction in row:
            in_flight += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(instruction.kind, 0)
            if instruction.kind is Kind.STEP:
                drained += in_flight == 0
        if program.weights is FLUSH:
            assert drained == len(run.batches)
        elif stage < run.schedule.num_stages - 1 and program.weights.delay:
            assert drained == min(program.weights.delay, len(run.batches))


@draws(60)
@given(runs(), st.integers(0, 50), st.integers(0, 9))
def test_programs_do_not_depend_on_their_place(run: Run, microbatches: int, batches: int):
    """A later start shifts the program. Only the first batches differ whose version would lie before version 0."""
    if run.schedule.weights.delay and run.first_batch < run.schedule.weights.delay:
        run = Run(run.schedule, run.batches, run.schedule.weights.delay, run.first_microbatch)
    later = Run(run.schedule, run.batches, run.first_batch + batches, run.first_microbatch + microbatches)
    shifted = [shifted_row(row, microbatches=microbatches, versions=batches) for row in run.build().rows]
    assert list(later.build().rows) == shifted


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("1f1b", {}, "there is no schedule '1f1b'; choose from gpipe, flush, 2bw, pipedream, interleaved"),
        ("flush", {"num_stages": 0}, "cannot have 0 stages"),
        ("gpipe", {"extra_warmup": True}, "gpipe has no warm-up that could be extended"),
        ("interleaved", {"extra_warmup": True}, "interleaved has no warm-up that could be extended"),
        ("interleaved", {"num_virtual_stages": 3}, "4 stages cannot be dealt out 3 to a rank"),
        ("interleaved", {"num_virtual_stages": 0}, "4 stages cannot be dealt out 0 to a rank"),
        ("flush", {"num_virtual_stages": 2}, "1f1b has one stage on each rank, not 2; use order interleaved"),
        ("flush", {"microbatch_group_size": 4}, "1f1b takes no groups of microbatches"),
        (
            "interleaved",
            {"num_virtual_stages": 2, "microbatch_group_size": 1},
            "groups of 1 are smaller than the 2 ranks",
        ),
        ("pipedream", {"extra_warmup": True}, r"^pipedream \(stash\) keeps at most p-s weight versions"),
        ("pipedream", {"tied_embeddings": True}, r"^under pipedream \(stash\) .* cannot share an embedding"),
        ("gpipe", {"balance": True}, "gpipe saves a whole batch at every stage, so there is nothing to balance"),
        ("pipedream", {"balance": True}, "may drain after every microbatch, so no eviction can be planned ahead"),
        ("pipedream", {"norm_decides": True}, "steps before the norm of all gradients"),
        ("2bw", {"residency": Residency(), "recompute": True}, "weights on the host have one version, and 2bw needs"),
        ("flush", {"residency": Residency()}, "refers to weights that are gone before the backward; add recompute"),
        (
            "interleaved",
            {"num_virtual_stages": 2, "residency": Residency(), "recompute": True},
            "interleaved comes back to a stage within a batch",
        ),
        ("bpipe", {"residency": Residency(), "recompute": True}, "with weights on the host ranks save alike"),
        (
            "l2l",
            {"num_virtual_stages": 4, "residency": Residency(2, "eager"), "norm_decides": True},
            "an eager update is made before the norm",
        ),
    ],
)
def test_choices_that_do_not_go_together(name: str, flags: dict, message: str):
    """A schedule that makes no sense is refused with the reason."""
    with pytest.raises(ValueError, match=message):
        Schedule.preset(name, **{"num_stages": 4, **flags})


@pytest.mark.parametrize("weights", [TWO_BW, STASH])
def test_orders_that_drain_take_flush_only(weights: WeightPolicy):
    """They drain in every batch, so versions beyond one would buy nothing; an unknown order is refused, too."""
    for order in ("gpipe", "interleaved"):
        with pytest.raises(ValueError, match=f"{order} drains in every batch"):
            Schedule(order=order, weights=weights, num_stages=2)
    with pytest.raises(ValueError, match="there is no order '2f2b'"):
        Schedule(order="2f2b", weights=weights, num_stages=2)


@pytest.mark.parametrize(
    ("name", "flags", "size", "message"),
    [
        ("2bw", {}, 3, "2bw with 4 stages needs batches of at least 4 microbatches"),
        ("2bw", {"extra_warmup": True}, 6, "and extra warm-up needs batches of at least 7 microbatches"),
        ("pipedream", {}, 2, r"^pipedream \(stash\) .* a batch is one microbatch, not 2; give each batch one"),
        ("flush", {}, 0, "cannot have 0 microbatches"),
        ("interleaved", {"num_virtual_stages": 2}, 3, "in groups of 2, which 3 microbatches do not fill"),
    ],
)
def test_batches_that_cannot_be_run(name: str, flags: dict, size: int, message: str):
    """validate, build and stream refuse a batch of a size that the schedule cannot run."""
    schedule = Schedule.preset(name, num_stages=4, **flags)
    for refuse in (schedule.validate, lambda size: schedule.build((size,)), schedule.stream().start_batch):
        with pytest.raises(ValueError, match=message):
            refuse(size)


def test_a_program_needs_a_batch():
    """No batches, no program."""
    with pytest.raises(ValueError, match="a program needs a batch"):
        Schedule.preset("flush", num_stages=2).build(())


def test_weights_may_be_named():
    """The policy's word will do for the policy."""
    assert Schedule(order="1f1b", weights="2bw", num_stages=2) == Schedule.preset("2bw", num_stages=2)
    assert set(PRESETS) >= {"gpipe", "flush", "2bw", "pipedream"}


def test_bpipe_is_flush_balanced():
    """The preset and the flag are one schedule; fewer than 4 stages, or small batches, leave nothing to balance."""
    assert Schedule.preset("bpipe", num_stages=8) == Schedule.preset("flush", num_stages=8, balance=True)
    assert Schedule.preset("bpipe", num_stages=8).evicting_ranks((4, 7)) == (0, 1, 2)
    assert Schedule.preset("flush", num_stages=8).evicting_ranks((8,)) == ()
    for num_stages, size in ((3, 9), (4, 3), (8, 5)):
        schedule = Schedule.preset("bpipe", num_stages=num_stages)
        assert schedule.evicting_ranks((size,)) == ()
        assert schedule.build((size,)) == Schedule.preset("flush", num_stages=num_stages).build((size,))
        assert schedule.max_saved_microbatches((size,)) == tuple(min(p, size) for p in range(num_stages, 0, -1))


@draws(30)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 5), st.sampled_from(["gpipe", "flush", "2bw", "pipedream"]))
def test_evaluation(num_stages: int, num_microbatches: int, version: int, name: str):
    """An evaluation is forwards of every microbatch at every stage with the newest version, and is proved."""
    schedule = Schedule.preset(name, num_stages=num_stages)
    program = schedule.build_evaluation(num_microbatches, version=version, first_microbatch=30)
    assert program.forward_only
    assert max(program.entry_versions) == version
    check(program)
    for row in program.rows:
        forwards = kinds_of(row, Kind.FORWARD)
        assert [(each.microbatch, each.version) for each in forwards] == [
            (30 + index, version) for index in range(num_microbatches)
        ]
        assert {each.kind for each in row} <= {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F}


def test_evaluation_prefetches():
    """Receives of an evaluation are posted ahead, too; without microbatches there is none."""
    schedule = Schedule.preset("flush", num_stages=2)
    assert text(schedule.build_evaluation(2, version=0).rows[1]) == "1RECV_F0 1RECV_F1 1F0@0 1F1@0"
    with pytest.raises(ValueError, match="cannot have 0 microbatches"):
        schedule.build_evaluation(0, version=0)
