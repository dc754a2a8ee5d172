"""Pipelines of a small MLP against single-process references."""

from types import SimpleNamespace

import pytest
import torch

from megatron.pipeline.check import check
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training

CASE = "tests.pipeline.runtime.stages.module.module_cases:run"


def run(num_ranks, preset, training, **options):
    return workers.run(num_ranks, CASE, preset=preset, training=training, timeout=60, **options)


def assert_same(ranks, expected, *, exact=True):
    """Every rank reports the reference's losses, and together they hold its parameters."""
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for outcome in ranks:
        assert [report.batch for report in outcome.reports] == list(range(len(expected.losses)))
        assert [report.losses["loss"] for report in outcome.reports] == pytest.approx(expected.losses, rel=1e-6)
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], **close)
    assert {name for outcome in ranks for name in outcome.parameters} == set(expected.parameters)


@pytest.mark.parametrize("preset", ["gpipe", "flush"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_flushing_schedules_are_ordinary_training(preset, num_ranks):
    """Losses and parameters are bit-equal to one process for every p, with m = p and m = 2p and warm-up."""
    training = Training(batches=(4, 4, 8, 8, 4, 4), warmup=3)
    outcomes = run(num_ranks, preset, training)
    assert_same(outcomes, reference.train(training, delay=0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_2bw_applies_gradients_of_the_version_before(num_ranks):
    """W(t+1) = W(t) - update(g(W(t-1))), bit-equal over nine batches of ramped-up size, drains in between included."""
    training = Training(batches=(4, 4, 4, 8, 8, 12, 4, 4, 4), warmup=4)
    expected = reference.train(training, delay=1)
    assert_same(run(num_ranks, "2bw", training), expected)
    drained = run(num_ranks, "2bw", training, drains=(1, 4, 5), evaluate=3)
    assert_same(drained, expected)
    assert len(drained[0].evaluations) == 3
    assert all(outcome.evaluations == drained[0].evaluations for outcome in drained)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("preset", "delay"), [("flush", 0), ("2bw", 1)])
def test_clipping_uses_the_exact_global_norm(preset, delay, num_ranks):
    """The norm spans all stages, and a norm that clips every batch gives the reference's parameters."""
    training = Training(batches=(4, 4, 8, 4, 4, 4, 4, 4), clip_grad=0.05)
    expected = reference.train(training, delay=delay)
    assert min(expected.grad_norms) > training.clip_grad
    outcomes = run(num_ranks, preset, training)
    assert_same(outcomes, expected, exact=False)
    for outcome in outcomes:
        assert [report.grad_norm for report in outcome.reports] == pytest.approx(expected.grad_norms, rel=1e-5)


@pytest.mark.parametrize(("preset", "delay"), [("flush", 0), ("2bw", 1)])
def test_replicas_average_their_gradients(preset, delay):
    """d=2, p=2 equals one process on all data; both replicas hold the same weights."""
    training = Training(batches=(2, 2, 4, 4, 2, 2, 2, 2), clip_grad=0.05, num_replicas=2)
    expected = reference.train(training, delay=delay)
    outcomes = run(4, preset, training)
    assert_same(outcomes, expected, exact=False)
    for first, second in ((0, 2), (1, 3)):
        for name, tensor in outcomes[first].parameters.items():
            assert torch.equal(tensor, outcomes[second].parameters[name])


@pytest.mark.parametrize("preset", ["gpipe", "flush", "2bw"])
def test_recompute_repeats_the_forward(preset):
    """With dropout, recomputing restores the random state: bit-equal to keeping the activations."""
    training = Training(batches=(2, 4, 4, 2, 2, 2, 2, 2), dropout=0.2)
    kept = run(2, preset, training)
    recomputed = run(2, preset, training, recompute=True)
    for one, other in zip(kept, recomputed, strict=True):
        assert [report.losses for report in one.reports] == [report.losses for report in other.reports]
        for name, tensor in one.parameters.items():
            assert torch.equal(tensor, other.parameters[name])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_pipedream_uses_the_newest_weights_at_each_stage(num_ranks):
    """Stage s of p trains on weights that are p-1-s updates old, also after drains; p-s versions are alive."""
    training = Training(batches=(1,) * 12)
    drains = (4, 9)
    expected = reference.train_stash(training, num_stages=num_ranks, drains=drains)
    outcomes = run(num_ranks, "pipedream", training, drains=drains)
    assert_same(outcomes, expected)
    assert [outcome.peak_versions for outcome in outcomes] == [num_ranks - stage for stage in range(num_ranks)]
    for outcome in outcomes:
        assert all(report.grad_norm > 0 for report in outcome.reports)


def test_pipedream_with_replicas_steps_without_waiting_for_the_norm():
    """Replicas with the same data change nothing; reports are complete though their norms follow the steps."""
    outcomes = run(4, "pipedream", Training(batches=(1,) * 10, num_replicas=2))
    for first, second in ((0, 2), (1, 3)):
        for name, tensor in outcomes[first].parameters.items():
            assert torch.equal(tensor, outcomes[second].parameters[name])
    reports = [outcome.reports for outcome in outcomes]
    assert all(report == reports[0] for report in reports[1:])
    assert all(report.grad_norm > 0 and report.losses["loss"] > 0 for report in reports[0])


def test_a_norm_after_its_step_holds_up_no_later_step():
    """Under stash the norm of a batch may last until after the next batch's gradients were reduced and stepped with."""
    reports = workers.run(
        2, "tests.pipeline.runtime.stages.module.module_cases:reports_with_a_late_norm", num_batches=5
    )
    assert reports == [list(range(5))] * 2


def test_an_overflow_skips_the_step_on_every_stage():
    """A gradient that is not finite on one stage makes the next version an alias everywhere; training goes on."""
    training = Training(batches=(2,) * 8, poisoned_microbatch=7, warmup=4)
    expected = reference.train(training, delay=1)
    outcomes = run(2, "2bw", training)
    for outcome in outcomes:
        assert [report.skipped for report in outcome.reports] == [batch == 3 for batch in range(8)]
        assert [report.nan for report in outcome.reports] == [batch == 3 for batch in range(8)]
        assert [report.learning_rate for report in outcome.reports] == expected.learning_rates
        for name, tensor in outcome.parameters.items():
            assert torch.equal(tensor, expected.parameters[name])


@pytest.mark.parametrize(
    ("preset", "options"),
    [("gpipe", {}), ("flush", {}), ("2bw", {}), ("2bw", {"extra_warmup": True}), ("2bw", {"recompute": True})],
)
def test_what_runs_is_the_program(preset, options):
    """Executed instructions, saved activations and live versions are those of the program that the checker proved."""
    batches = (8, 8, 12, 8)
    outcomes = run(4, preset, Training(batches=batches), tracing=True, **options)
    program = Schedule.preset(preset, num_stages=4, **options).build(batches)
    report = check(program)
    for rank, outcome in enumerate(outcomes):
        computed, reduced = outcome.executed
        assert computed == [str(instruction) for instruction in program.rows[rank]]
        assert reduced == [text for text in computed if "REDUCE" in text]
        assert outcome.peak_saved == {rank: report.peak_saved_microbatches[rank]}
        assert outcome.peak_versions == report.live_versions[rank]
        assert outcome.num_saved_at_end == 0
        assert outcome.num_unread_sends == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("num_ranks", "num_virtual_stages"), [(1, 2), (2, 2), (2, 4)])
def test_several_stages_on_a_rank_are_ordinary_training(num_ranks, num_virtual_stages):
    """interleaved is bit-equal to one process, also drained, with evaluations in between, and runs its program."""
    batches = (4, 4, 8, 2, 4)
    options = {"num_virtual_stages": num_virtual_stages}
    outcomes = run(
        num_ranks,
        "interleaved",
        Training(batches=batches, warmup=3),
        drains=(1, 3),
        evaluate=3,
        tracing=True,
        **options,
    )
    assert_same(outcomes, reference.train(Training(batches=batches, warmup=3), delay=0))
    assert all(outcome.evaluations == outcomes[0].evaluations for outcome in outcomes)
    (plain,) = run(1, "flush", Training(batches=batches, warmup=3), drains=(1, 3), evaluate=3)
    assert outcomes[0].evaluations == plain.evaluations
    program = Schedule.preset("interleaved", num_stages=num_ranks * num_virtual_stages, **options).build(batches)
    report = check(program)
    for rank, outcome in enumerate(outcomes):
        assert outcome.executed[0] == [str(instruction) for instruction in program.rows[rank]]
        saved = {stage: report.peak_saved_microbatches[stage] for stage in program.stages_of(rank)}
        assert outcome.peak_saved == saved
        assert (outcome.num_saved_at_end, outcome.num_unread_sends, outcome.peak_versions) == (0, 0, 1)


def test_an_engine_takes_the_stages_that_the_schedule_puts_on_its_rank():
    """Too few ranks or stages are said before anything is connected."""
    schedule = Schedule.preset("interleaved", num_stages=2, num_virtual_stages=2)
    with pytest.raises(ValueError, match=r"puts stages \[0, 1\] on this rank; give these in this order, not \[1, 0\]"):
        PipelineEngine(schedule, [SimpleNamespace(index=1), SimpleNamespace(index=0)], None)
    with pytest.raises(ValueError, match="is for 2 ranks, and the pipeline has 1; give it 1 stage"):
        PipelineEngine(Schedule.preset("flush", num_stages=2), SimpleNamespace(index=0), None)


def test_several_stages_on_a_rank_share_norm_reduction_and_overflow():
    """One norm over all stages clips, replicas average all of them, and one overflow skips the rank's only step."""
    training = Training(batches=(2, 4, 2, 2, 4), clip_grad=0.05, num_replicas=2)
    expected = reference.train(training, delay=0)
    outcomes = run(2, "interleaved", training, num_virtual_stages=2)
    assert_same(outcomes, expected, exact=False)
    for outcome in outcomes:
        assert [report.grad_norm for report in outcome.reports] == pytest.approx(expected.grad_norms, rel=1e-5)
    training = Training(batches=(2,) * 5, poisoned_microbatch=5, warmup=2)
    expected = reference.train(training, delay=0)
    for outcome in run(2, "interleaved", training, num_virtual_stages=2):
        assert [report.skipped for report in outcome.reports] == [batch == 2 for batch in range(5)]
        for name, tensor in outcome.parameters.items():
            assert torch.equal(tensor, expected.parameters[name])


def test_several_stages_on_a_rank_recompute():
    """With dropout, each stage's recompute restores its random state: bit-equal to keeping the activations."""
    training = Training(batches=(2, 4, 2), dropout=0.2)
    kept, recomputed = (
        run(2, "interleaved", training, num_virtual_stages=2, recompute=recompute) for recompute in (False, True)
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert [report.losses for report in one.reports] == [report.losses for report in other.reports]
        assert all(torch.equal(tensor, other.parameters[name]) for name, tensor in one.parameters.items())


def test_sent_outputs_are_freed_once_they_are_read():
    """An output's storage lives until the next stage has read it and no longer, though its backward is yet to come."""
    held_before, held_after = workers.run(2, "tests.pipeline.runtime.stages.module.module_cases:hold_of_a_sent_output")[
        0
    ]
    assert held_before and not held_after


def test_stop_requests_of_any_rank_reach_all():
    """The union of the ranks' stop requests comes with the report of the batch that they travelled with."""
    stop_requests = workers.run(
        2, "tests.pipeline.runtime.stages.module.module_cases:stop_requests_by_batch", num_batches=6, stop_request_at=3
    )
    assert stop_requests[0] == stop_requests[1]
    assert stop_requests[0][:2] == [0, 0] and stop_requests[0][-3:] == [0b101] * 3


def test_an_unknown_instruction_is_refused_before_anything_runs():
    """The executor never skips what it has no method for."""
    message = workers.run(1, "tests.pipeline.runtime.stages.module.module_cases:message_of_unknown_instruction")[0]
    assert message == "the executor has no method for 0EVICT1 (EVICT); executed before it: 0"
