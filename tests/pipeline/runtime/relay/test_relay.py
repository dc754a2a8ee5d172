"""Weights on the host: the relay computes what `flush` does, with few stages on the device."""

from types import SimpleNamespace

import pytest
import torch

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Instruction, Kind, Lane
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract import trace
from megatron.pipeline.runtime.contract.tensors import ALIGNMENT
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.relay.host_store import FlatLayout, HostStore
from megatron.pipeline.runtime.stages.emulated import EmulatedUpdate
from megatron.pipeline.runtime.stages.module.rank_update import ModuleRelayUpdate
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training

CASE = "tests.pipeline.runtime.relay.relay_cases:run"


def run(num_ranks, training, **options):
    return workers.run(num_ranks, CASE, training=training, timeout=60, **options)


def flush(training, **options):
    (outcome,) = workers.run(
        1,
        "tests.pipeline.runtime.stages.module.module_cases:run",
        preset="flush",
        training=training,
        recompute=True,
        **options,
    )
    return outcome


def assert_same(outcomes, expected, *, exact=True):
    """Every rank has the reports of a run of `flush`, and together they hold its parameters."""
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-7}
    for outcome in outcomes:
        for mine, theirs in zip(outcome.reports, expected.reports, strict=True):
            assert (mine.batch, mine.skipped, mine.learning_rate) == (
                theirs.batch,
                theirs.skipped,
                theirs.learning_rate,
            )
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6, nan_ok=True)
            assert mine.losses == (theirs.losses if exact else pytest.approx(theirs.losses, rel=1e-6))
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], **close)
        assert (outcome.num_unread_sends, outcome.num_saved_at_end, outcome.num_batches_at_end) == (0, 0, 0)
    assert {name for outcome in outcomes for name in outcome.parameters} >= set(expected.parameters)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("num_ranks", "num_virtual_stages", "resident", "host_update"),
    [
        (1, 1, 2, "deferred"),
        (1, 4, 2, "deferred"),
        (1, 8, 2, "eager"),
        (1, 8, 3, "deferred"),
        (1, 8, 1, "eager"),
        (2, 4, 2, "eager"),
        (4, 2, 1, "deferred"),
    ],
)
def test_the_relay_is_ordinary_training(num_ranks, num_virtual_stages, resident, host_update):
    """Losses, norms and parameters after six batches of growing and shrinking size are bit-equal to `flush` with
    recompute in one process, warm-up and dropout included, and so are evaluations after drains.
    """
    training = Training(batches=(4, 1, 2, 8, 3, 2), warmup=3, same_dropout=0.2)
    expected = flush(training, drains=(1, 3), evaluate=3)
    outcomes = run(
        num_ranks,
        training,
        num_virtual_stages=num_virtual_stages,
        resident=resident,
        host_update=host_update,
        drains=(1, 3),
        evaluate=3,
    )
    assert_same(outcomes, expected)
    assert all(outcome.evaluations == expected.evaluations for outcome in outcomes)


@pytest.mark.parametrize(("num_ranks", "num_virtual_stages"), [(1, 8), (2, 4)])
def test_a_stash_on_the_host_changes_no_bit(num_ranks, num_virtual_stages):
    """Batches of 4, 1, 2 and 3 microbatches with dropout and evaluations between: bit-equal to `flush`, and the bytes
    that leave are those of the program; a rank never has more on its device than the checker says.
    """
    training = Training(batches=(4, 1, 2, 3), warmup=3, same_dropout=0.2)
    expected = flush(training, drains=(1,), evaluate=3)
    options = {"num_virtual_stages": num_virtual_stages, "drains": (1,), "evaluate": 3}
    outcomes = run(num_ranks, training, stash="host", **options)
    assert_same(outcomes, expected)
    assert all(outcome.evaluations == expected.evaluations for outcome in outcomes)
    program = Schedule.preset(
        "l2l",
        num_stages=num_ranks * num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        residency=Residency(2, "deferred", "host"),
    ).build(training.batches)
    report = check(program)
    for rank, outcome in enumerate(outcomes):
        offloaded = [report.offloaded_microbatches[stage] for stage in program.stages_of(rank)]
        assert outcome.num_offloaded == sum(offloaded) > 0
        assert outcome.peak_saved_on_rank == report.peak_saved_on_rank[rank]
        assert outcome.peak_saved == {each: report.peak_saved_microbatches[each] for each in program.stages_of(rank)}


def test_an_input_that_does_not_come_back_in_time_is_missed():
    """A row that lacks a RELOAD, which the checker refuses, ends where the recompute finds no input."""
    for drop, words in (
        ("1RELOAD1", "must be Tensor, not NoneType (1R1@0)"),
        ("1OFFLOAD1", "has never left stage 1 (1RELOAD1)"),
    ):
        ((message, _),) = workers.run(
            1, "tests.pipeline.runtime.relay.relay_cases:run_mutated", drop=(drop,), stash="host"
        )
        assert words in message


@pytest.mark.parametrize(("num_ranks", "num_virtual_stages"), [(1, 8), (2, 4)])
def test_clipping_uses_the_norm_of_all_stages(num_ranks, num_virtual_stages):
    """Deferred updates clip every batch by the exact global norm, though each stage's gradients leave by themselves. On
    one rank its sum is taken in flush's order.
    """
    training = Training(batches=(4, 4, 8, 2, 4), clip_grad=0.05)
    expected = flush(training)
    assert min(report.grad_norm for report in expected.reports) > training.clip_grad
    outcomes = run(num_ranks, training, num_virtual_stages=num_virtual_stages)
    assert_same(outcomes, expected, exact=num_ranks == 1)


@pytest.mark.parametrize(
    ("num_ranks", "num_virtual_stages", "host_update"), [(1, 4, "eager"), (1, 8, "deferred"), (2, 4, "deferred")]
)
def test_tied_embeddings_get_the_sum_of_both_gradients(num_ranks, num_virtual_stages, host_update):
    """The first and the last stage share a weight: its two gradients are added up on the host, and it counts once."""
    training = Training(batches=(2, 3, 4, 2), tied=True)
    outcomes = run(num_ranks, training, num_virtual_stages=num_virtual_stages, host_update=host_update)
    expected = flush(training)
    expected.parameters[reference.LAST_WEIGHT] = expected.parameters[reference.FIRST_WEIGHT]
    assert_same(outcomes, expected, exact=False)


@pytest.mark.full
def test_tied_embeddings_on_two_ranks_are_updated_eagerly():
    """The update of an end waits for the other rank's gradient, and no other does."""
    training = Training(batches=(2, 3, 4, 2), tied=True)
    outcomes = run(2, training, num_virtual_stages=4, host_update="eager")
    expected = flush(training)
    expected.parameters[reference.LAST_WEIGHT] = expected.parameters[reference.FIRST_WEIGHT]
    assert_same(outcomes, expected, exact=False)


# name: (replicas, pipeline ranks of each, stages of each, host update, hosts, what else)
REPLICAS = {
    "d=2": (2, 1, 4, "deferred", (), {"clip_grad": 0.05}),
    "d=2 p=2": (2, 2, 2, "eager", (), {}),
}
REPLICAS_MATRIX = {
    "d=2 p=2 deferred": (2, 2, 2, "deferred", (), {}),
    "d=2 p=2 dropout": (2, 2, 4, "eager", (), {"same_dropout": 0.1}),
    "d=2 on two hosts": (2, 1, 4, "eager", ("a", "b"), {}),
    "d=4": (4, 1, 4, "eager", (), {}),
    "d=4 on two hosts": (4, 1, 8, "deferred", ("a", "b", "a", "b"), {"clip_grad": 0.05}),
    "d=3 fused": (3, 1, 2, "eager", (), {"fused": True}),
    "d=4 p=2": (4, 2, 4, "eager", ("a", "a", "a", "b"), {}),
}


NORMS = 4096  # a page, of each process


def shared(outcome) -> set[str]:
    """What others may have mapped, too."""
    return {file for file in outcome.mappings if "memfd:" in file}


def num_bytes_apart(outcome) -> int:
    """What is mapped by this process alone."""
    return sum(size for file, size in outcome.mappings.items() if "memfd:" not in file)


@pytest.mark.parametrize(
    ("num_replicas", "num_ranks", "num_virtual_stages", "host_update", "hosts", "options"),
    [pytest.param(*row, id=name) for name, row in REPLICAS.items()]
    + [pytest.param(*row, id=name, marks=pytest.mark.full) for name, row in REPLICAS_MATRIX.items()],
)
def test_replicas_share_one_store(num_replicas, num_ranks, num_virtual_stages, host_update, hosts, options):
    """Bit-equal to two replicas of flush; of more, the order of a reduction's sums depends on what is reduced at once,
    so to as many replicas of the relay, of which each has a store of its own. By the system's account, the replicas of
    a host have mapped one store, of the size of one replica's, and besides nothing of their own but a page of norms.
    """
    training = Training(batches=(2, 4, 2, 3), num_replicas=num_replicas, **options)
    expected = workers.run(
        num_replicas * num_ranks,
        "tests.pipeline.runtime.stages.module.module_cases:run",
        preset="flush",
        training=training,
        recompute=True,
    )
    cut = {"num_virtual_stages": num_virtual_stages, "host_update": host_update, "drains": (1,)}
    outcomes = run(num_replicas * num_ranks, training, hosts=hosts, **cut)
    both = expected[0]
    both.parameters |= expected[num_ranks - 1].parameters
    assert_same(outcomes, both, exact=num_replicas == 2)
    if num_replicas > 2:
        apart = run(num_replicas * num_ranks, training, hosts=tuple("abcd"[:num_replicas]), **cut)
        for outcome, other in zip(outcomes, apart, strict=True):
            assert [each.grad_norm for each in outcome.reports] == [each.grad_norm for each in other.reports]
            assert [each.losses for each in outcome.reports] == [each.losses for each in other.reports]
            assert all(torch.equal(each, other.parameters[name]) for name, each in outcome.parameters.items())
    for rank, outcome in enumerate(outcomes):
        replica, stage = divmod(rank, num_ranks)
        hosts = hosts or ("a",) * num_replicas
        beside = [other * num_ranks + stage for other in range(num_replicas) if hosts[other] == hosts[replica]]
        assert all(shared(outcomes[other]) == shared(outcome) for other in beside), rank
        strangers = set().union(*(shared(outcomes[other]) for other in range(len(outcomes)) if other not in beside))
        if len(beside) > 1:
            assert not strangers & shared(outcome) and num_bytes_apart(outcome) == NORMS
        pages = len(outcome.mappings) * 4096  # each is rounded up to whole ones
        assert outcome.host_bytes <= sum(outcome.mappings.values()) <= outcome.host_bytes + pages
        assert outcome.host_bytes == outcomes[stage].host_bytes


@pytest.mark.parametrize(
    ("num_replicas", "num_ranks", "hosts"),
    [
        pytest.param(2, 1, (), id="d=2"),
        pytest.param(2, 2, (), id="d=2 p=2", marks=pytest.mark.full),
        pytest.param(3, 1, (), id="d=3", marks=pytest.mark.full),
        pytest.param(4, 1, ("a", "b", "a", "b"), id="d=4 on two hosts", marks=pytest.mark.full),
    ],
)
def test_replicas_gather_what_each_fetches_a_share_of(num_replicas, num_ranks, hosts):
    """The same bits as with whole stages, evaluations between batches too; each rank has fetched its part, and the
    padding to equal ones.
    """
    training = Training(batches=(2, 4, 2, 3), num_replicas=num_replicas, clip_grad=0.05)
    cut = {"num_virtual_stages": 4, "drains": (1,), "evaluate": 2, "hosts": hosts}
    whole = run(num_replicas * num_ranks, training, **cut)
    shares = run(num_replicas * num_ranks, training, gathers=True, **cut)
    together = num_replicas // len(set(hosts) or "a")
    for one, other in zip(whole, shares, strict=True):
        assert one.reports == other.reports and one.evaluations == other.evaluations
        assert all(torch.equal(tensor, other.parameters[name]) for name, tensor in one.parameters.items())
        padding = together * other.num_bytes_fetched - one.num_bytes_fetched
        assert 0 <= padding < one.num_fetched * together * ALIGNMENT and one.num_fetched == other.num_fetched


def test_the_store_of_two_replicas_is_as_large_as_that_of_one():
    """Weights, gradients and moments."""
    (one,) = run(1, Training(batches=(2, 2)), num_virtual_stages=4)
    first, second = run(2, Training(batches=(2, 2), num_replicas=2), num_virtual_stages=4)
    assert one.host_bytes == first.host_bytes
    counters = 4096  # of who has come to a barrier
    both = {**first.mappings, **second.mappings}
    assert sum(one.mappings.values()) + counters + NORMS == sum(both.values())


def test_an_overflow_leaves_the_batch_out_on_all_replicas():
    """One has it; none steps its share, and they go on alike."""
    training = Training(batches=(2,) * 4, poisoned_microbatch=3, num_replicas=2)
    expected, _ = workers.run(
        2, "tests.pipeline.runtime.stages.module.module_cases:run", preset="flush", training=training, recompute=True
    )
    assert [report.skipped for report in expected.reports] == [False, True, False, False]
    outcomes = run(2, training, num_virtual_stages=4)
    for outcome in outcomes:
        assert [report.skipped for report in outcome.reports] == [False, True, False, False]
        assert all(torch.equal(each, expected.parameters[name]) for name, each in outcome.parameters.items())


@pytest.mark.parametrize("host_update", ["eager", pytest.param("deferred", marks=pytest.mark.full)])
def test_tied_gradients_of_which_each_replica_brought_a_share_are_added_up(host_update):
    """Each reads the whole of both, and writes a share of their sum."""
    training = Training(batches=(2, 3, 4, 2), tied=True, num_replicas=2)
    expected, _ = workers.run(
        2, "tests.pipeline.runtime.stages.module.module_cases:run", preset="flush", training=training, recompute=True
    )
    expected.parameters[reference.LAST_WEIGHT] = expected.parameters[reference.FIRST_WEIGHT]
    outcomes = run(2, training, num_virtual_stages=4, host_update=host_update)
    assert_same(outcomes, expected, exact=False)
    assert [each.num_connections for each in outcomes] == [2, 2], "one for the chain's thread, one for the updates'"


def test_an_overflow_leaves_the_batch_out_at_every_stage():
    """A gradient that is not finite on one stage: no stage is updated, nor the learning rate; training goes on."""
    training = Training(batches=(2,) * 6, poisoned_microbatch=5, warmup=4)
    expected = reference.train(training, delay=0)
    for outcome in run(2, training, num_virtual_stages=2):
        assert [report.skipped for report in outcome.reports] == [batch == 2 for batch in range(6)]
        assert [report.learning_rate for report in outcome.reports] == expected.learning_rates
        for name, tensor in outcome.parameters.items():
            assert torch.equal(tensor, expected.parameters[name])


def test_sums_are_divided_by_what_their_batch_counts():
    """As `flush` does, but with the clip's factor at once; an eager update does not know it."""
    training = Training(batches=(4, 1, 2), clip_grad=0.1, sums=True)
    assert_same(run(1, training, num_virtual_stages=4), flush(training), exact=False)
    with pytest.raises(
        workers.WorkerError, match=r"the losses of batch 0 are sums, and eager .*; use deferred updates"
    ):
        run(1, Training(batches=(2,), sums=True), num_virtual_stages=4, host_update="eager")


def test_an_eager_update_refuses_what_is_not_finite():
    """It cannot leave the batch out, so the run ends and says so."""
    with pytest.raises(workers.WorkerError, match="not finite, and an eager update cannot skip the batch"):
        run(1, Training(batches=(2,) * 4, poisoned_microbatch=3), num_virtual_stages=4, host_update="eager")


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (
            "0FETCH@0",
            "version 0 of stage 0 is not on the device: no FETCH stands before it, or a FREE is between (0R0@0)",
        ),
        (
            "3FETCH@0",
            "version 0 of stage 3 is not on the device: no FETCH stands before it, or a FREE is between (3F0@0)",
        ),
        ("0FREE@0", "stage 0 is on the device already (0FETCH@1)"),
        ("2FREE@0", "stages [2, 1] fill the device (0FETCH@0)"),
    ],
)
def test_a_row_that_lacks_a_word_fails_where_it_shows(drop, message):
    """The checker refuses such rows; the runtime would not compute with them either."""
    ((found, _),) = workers.run(1, "tests.pipeline.runtime.relay.relay_cases:run_mutated", drop=(drop,))
    assert found == message


@pytest.mark.parametrize("stage", range(4))
def test_a_missing_fetch_is_nan(stage):
    """Even where nobody asks whether the weights are there: a stage that is not fetched for its forwards makes the loss
    NaN, as the batch before it, whose row is whole, is not.
    """
    fetches = {0: ("0FETCH@1",) * 2, 1: ("1FETCH@1",) * 2, 2: ("2FETCH@1",), 3: ("3FETCH@1",)}[stage]
    frees = tuple(fetch.replace("FETCH", "FREE") for fetch in fetches)
    ((message, nan),) = workers.run(
        1, "tests.pipeline.runtime.relay.relay_cases:run_mutated", drop=(*fetches, *frees), unchecked=True
    )
    assert (message, nan) == ("", [False, True])


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("host_update", ["eager", "deferred"])
def test_what_runs_is_the_program(host_update, num_replicas):
    """Each rank executes its row, and each lane its words in the order of the row; 2N - K fetches and N stores a batch,
    whatever m is; the measured timeline is that of the program. With deferred updates inputs leave for the host, too.
    """
    stash = "host" if host_update == "deferred" else "device"
    num_virtual_stages, resident, batches = 4, 2, (3, 1, 4)
    training = Training(batches=batches, num_replicas=num_replicas)
    outcomes = run(
        num_replicas,
        training,
        num_virtual_stages=num_virtual_stages,
        host_update=host_update,
        stash=stash,
        tracing=True,
    )
    program = Schedule.preset(
        "l2l",
        num_stages=num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        residency=Residency(resident, host_update, stash),
        data_parallel=num_replicas > 1,
    ).build(batches)
    report = check(program)
    (row,) = program.rows
    stage = reference.split(reference.build_model(), num_virtual_stages)[0]
    bytes_of_stage = FlatLayout(dict(stage.named_parameters())).num_bytes
    for outcome in outcomes:
        assert outcome.executed == [str(instruction) for instruction in row]
        for lane, words in outcome.in_lanes.items():
            due = [str(each) for each in row if each.kind.row.lane.value == lane]
            assert words == due
        assert outcome.num_fetched == report.num_fetches[0] == len(batches) * (2 * num_virtual_stages - resident)
        stores = [each for each in outcome.in_lanes[Lane.D2H.value] if "STORE_GRAD" in each]
        assert len(stores) == len(batches) * num_virtual_stages
        assert outcome.num_bytes_fetched == outcome.num_fetched * bytes_of_stage
    measured = trace.timeline(outcomes[0].traces)
    assert tuple(measured.rows[0]) == row
    spans = list(measured.spans)
    first, second = (
        span for span in spans if span.instruction == Instruction(Kind.FETCH, 1, version=1)
    )  # up, and down again
    assert first.end <= second.start
    for update in (span for span in spans if span.instruction.kind is Kind.UPDATE):
        stage, version = update.instruction.stage, update.instruction.version
        store = next(each for each in spans if each.instruction == Instruction(Kind.STORE_GRAD, stage, version=version))
        assert store.end <= update.start


def test_what_does_not_go_together_is_refused():
    """Eager updates that clip, replicas of one store without a group, an update whose weights are on the device, or
    that was made for another schedule, and moves beside a stash on the host.
    """
    modules = {0: torch.nn.Sequential(torch.nn.Linear(2, 2))}
    store = HostStore({0: dict(modules[0].named_parameters())})
    optimizer = torch.optim.SGD(store.parameters.values(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"made before the norm is known, and gradients are clipped to 1; use deferred"
    ):
        ModuleRelayUpdate(modules, store, residency=Residency(2, "eager"), optimizer=optimizer, clip_grad=1.0)
    schedule = Schedule.preset("l2l", num_stages=1)
    with pytest.raises(ValueError, match=r"EmulatedUpdate has them on the device; give a RelayUpdate"):
        PipelineEngine(schedule, SimpleNamespace(index=0), EmulatedUpdate())
    stashing = Residency(stash="host")
    schedule = Schedule.preset("l2l", num_stages=1, residency=stashing)
    update = ModuleRelayUpdate(modules, store, residency=stashing, optimizer=optimizer)
    with pytest.raises(
        ValueError, match=r"inputs are stashed on the host, and activation_memory handles .*leave it out"
    ):
        PipelineEngine(schedule, SimpleNamespace(index=0), update, activation_memory=ActivationMemory())
    for other, said in ((Residency(2, "eager"), "2 eager"), (Residency(3), "3 deferred")):
        schedule = Schedule.preset("l2l", num_stages=1, residency=other)
        with pytest.raises(
            ValueError, match=rf"residency is {said}, and its update was made for 2 deferred host; make"
        ):
            PipelineEngine(schedule, SimpleNamespace(index=0), update)
    store.is_shared, store.replicas = True, SimpleNamespace(host="here")
    with pytest.raises(ValueError, match=r"replicas on here share the store.*give their data_parallel_group, or each"):
        ModuleRelayUpdate(modules, store, residency=Residency(2), optimizer=optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizer_kernel_is_the_users_choice(fused):
    """With torch's fused AdamW, too, the relay's parameters are bit-equal to flush with the same kernel."""
    training = Training(batches=(2, 3, 4, 2, 3), fused=fused)
    assert_same(run(1, training, num_virtual_stages=4), flush(training))
