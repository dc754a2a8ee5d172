"""The runtime on the stand-in for CUDA: nothing is found, and what would be missing is."""

import pytest

from megatron.pipeline.program.lane_order import Residency
from tests import workers
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.stages.module import provisional_reference, reference
from tests.pipeline.runtime.stages.module.reference import Training
from tests.pipeline.runtime.test_graph import SHARES

CASES = "tests.pipeline.runtime.cuda.recorded_cases"
TRAINING = Training(batches=(4, 4, 8, 4), clip_grad=0.05)
SWAPS = {"moves_activations": True, "most_on_device": 3}
FULL = pytest.mark.full
ONE_EACH = Training(batches=(1,) * 8)
REPLICATED = Training(batches=(4, 4, 4, 4), num_replicas=2)


def gpt(num_ranks, **options):
    options = {"layers": max(2, options.get("p", 1) * options.get("v", 1))} | options  # more only repeat operations
    return workers.run(num_ranks, f"{CASES}:train_gpt", **options)


def module(num_ranks, preset, training=TRAINING, **options):
    return workers.run(num_ranks, f"{CASES}:train_module", preset=preset, training=training, **options)


def relay(num_ranks, training, **options):
    return workers.run(num_ranks, f"{CASES}:train_relay", training=training, **options)


def assert_in_order(accounts, *, moves=False):
    """Nothing is found; and each thread was watched, and has a stream of its own where it needs one."""
    for rank, account in enumerate(accounts):
        assert not account.findings, f"rank {rank}: {account.findings}"
        assert "compute" in account.threads["MainThread"]
        assert account.threads["pipeline chain"] and "compute" not in account.threads["pipeline chain"]
    if moves:
        movers = [account.threads["pipeline moves"] for account in accounts if "pipeline moves" in account.threads]
        assert len(movers) >= 2 and not any("compute" in streams for streams in movers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(1, {"schedule": "2bw", "dtype": "float16", "overflow_batches": (1, 2),
         "drains": (2,)}, marks=FULL),
        (2, {"schedule": "gpipe", "p": 2, "clip": 1.0}),
        (2, {"schedule": "flush", "p": 2, "clip": 1.0, "tied": True, "drains": (1,)}),
        pytest.param(2, {"schedule": "flush", "t": 2, "sequence_parallel": True}, marks=FULL),
        pytest.param(2, {"schedule": "2bw", "p": 2, "clip": 1.0, "tied": True}, marks=FULL),
        (2, {"schedule": "2bw", "p": 2, "recompute": True, "dropout": 0.1, "dtype": "bfloat16", "extra_warmup": True}),
        (2, {"schedule": "2bw", "p": 2, "dtype": "float16", "overflow_batches": (2,), "drains": (1,)}),
        pytest.param(2, {"schedule": "2bw", "t": 2, "clip": 1.0, "sequence_parallel": True}, marks=FULL),
        (2, {"schedule": "2bw", "d": 2, "clip": 1.0}),
        pytest.param(2, {"schedule": "2bw", "d": 2, "clip": 1.0, "distributed_optimizer": True,
         "dtype": "float16"}, marks=FULL),
        (2, {"schedule": "2bw", "d": 2, "clip": 1.0, "single_gradient_buffer": True}),
        (2, {"schedule": "2bw", "p": 2, "predict": True, "clip": 1.0, "tied": True, "drains": (1,)}),
        pytest.param(2, {"schedule": "2bw", "p": 2, "predict": True, "provisional_microbatches": 1,
         "dtype": "float16", "overflow_batches": (2,), "drains": (3,)}, marks=FULL),
        pytest.param(2, {"schedule": "2bw", "t": 2, "predict": True, "clip": 1.0, "sequence_parallel": True,
         "dtype": "bfloat16"}, marks=FULL),
        pytest.param(2, {"schedule": "2bw", "d": 2, "predict": True, "clip": 1.0, "distributed_optimizer": True,
         "reduce_partial": True, "drains": (1,)}, marks=FULL),
        (4, {"schedule": "2bw", "p": 2, "d": 2, "tied": True, "predict": True, "clip": 1.0,
         "distributed_optimizer": True, "reduce_partial": True, "drains": (1,)}),
        (2, {"schedule": "pipedream", "p": 2, "batches": (1,) * 6}),
        (2, {"schedule": "interleaved", "p": 2, "v": 2, "tied": True}),
        (2, {"schedule": "zb-h1", "p": 2, "clip": 1.0, "tied": True, "drains": (1,)}),
        pytest.param(2, {"schedule": "zb-h1", "t": 2, "sequence_parallel": True}, marks=FULL),
        pytest.param(4, {"schedule": "2bw", "p": 2, "d": 2, "dtype": "float16", "distributed_optimizer": True,
         "drains": (1,)}, marks=FULL),
        pytest.param(4, {"schedule": "bpipe", "p": 4, "moves": True, "batches": (4, 4)}, marks=FULL),
        (4, {"schedule": "2bw", "p": 4, "moves": True, "balance": True, "batches": (4,) * 3, "dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_megatron_updates_are_in_order(num_ranks, options):
    """A GPT under every schedule, with d=2, t=2 and in fp16: each access comes after those that it has to, nothing is
    freed too early or kept for ever, the computing thread waits for no kernel, and every communicator is connected
    before training.
    """
    assert_in_order(gpt(num_ranks, **options), moves=options.get("moves", False))


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "preset", "training", "options"),
    [
        (2, "2bw", TRAINING, {"backend": "gloo", "drains": (1,)}),
        (4, "pipedream", ONE_EACH, {}),
        (4, "flush", REPLICATED, {}),
        (4, "2bw", REPLICATED, {}),
        (4, "2bw", REPLICATED, {"predict": True, "provisional_microbatches": 1, "reduce_partial": True}),
        (4, "bpipe", TRAINING, {"moves_activations": True, "drains": (1,)}),
        (4, "bpipe", TRAINING, {"moves_activations": True, "recompute": True}),
        (4, "bpipe", TRAINING, {"moves_activations": True, "backend": "gloo"}),
        (4, "2bw", TRAINING, {"moves_activations": True, "balance": True, "drains": (1,)}),
        (2, "gpipe", TRAINING, SWAPS),
        (4, "2bw", TRAINING, {"drains": (1,)} | SWAPS),
        (2, "gpipe", TRAINING, {"recompute": True} | SWAPS),
    ],
)
def test_modules_and_moves_are_in_order(num_ranks, preset, training, options):
    """The same for plain modules, over NCCL and through host memory, and while saved activations move to a pair rank or
    to the host; and the losses are those of a single process.
    """
    accounts = module(num_ranks, preset, training, **options)
    assert_in_order(accounts, moves=options.get("moves_activations", False) and "most_on_device" not in options)
    expected = reference.train(training, delay={"2bw": 1}.get(preset, 0)).losses
    if options.get("predict"):
        number = options["provisional_microbatches"]
        expected = provisional_reference.train(training, lambda *_: number, reduce_partial=True).losses
    if preset != "pipedream":
        assert accounts[0].losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "options"),
    [("flush", {"clip_grad": 0.05}), ("stale", {"predict": True, "gap_aware": True, "kind": "adamw"})],
)
def test_stages_of_a_graph_are_in_order(preset, options):
    """With skips, tensors that are packed, a weight that several stages share, predictions and gap-aware steps."""
    options |= {"shape": SHARES, "preset": preset, "batches": (2, 1, 3, 2), "recompute": True}
    accounts = workers.run(2, f"{CASES}:train_graph", **options)
    assert_in_order(accounts)
    expected = workers.run(2, graph_cases.__name__ + ":run", **options)
    assert accounts[0].losses == [report.losses["loss"] for report in expected[0].reports]


@pytest.mark.full
def test_early_gradients_wait_for_the_chain():
    """Gradients that are applied before their norm is known are those of all replicas. Without the wait of the stream
    the replica that counts nothing, on the stage that reads no loss, updates its weights beside the all-reduce.
    """
    options = {"schedule": "2bw", "p": 2, "d": 2, "single_gradient_buffer": True}
    found = gpt(4, taken_back="early_gradients", **options)
    first_stage_second_replica = found[1].findings
    assert any("_apply" in what and "after all-reduce" in what for _, what in first_stage_second_replica)


@pytest.mark.full
def test_loaded_buffers_are_kept_until_they_are_marked():
    """A buffer whose backward is only queued goes to nobody else: with its address alone it is written too early.

    Whether another takes the buffer in that time depends on how the threads run, so the fault may be tried again.
    """
    options = {"training": Training(batches=(10, 10)), "moves_activations": True, "balance": True, "slow_host": True}
    assert_in_order(module(5, "2bw", **options), moves=True)
    tries = (module(5, "2bw", taken_back="loaded_buffers", **options) for _ in range(5))
    assert any(
        "after" in what and "backward" in what for found in tries for account in found for _, what in account.findings
    )


def test_received_tensors_are_let_go():
    """What was received is freed with its backward, though nobody polls for overdue receives."""
    found = module(2, "flush", taken_back="received_tensors")
    assert all("held" in account.kinds for account in found)


def test_who_watches_for_overdue_receives_says_where():
    """The guard's thread asks for events of its own device: otherwise it makes a context on GPU 0."""
    assert not any(account.findings for account in workers.run(2, f"{CASES}:watch_overdue"))
    found = workers.run(2, f"{CASES}:watch_overdue", taken_back="watched_thread")
    assert any("stranger" in account.kinds for account in found)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("taken_back", "kind", "num_ranks", "options"),
    [
        ("posted_reductions", "unordered", 2, {"schedule": "2bw", "d": 2}),
        ("awaited_reductions", "unordered", 2, {"schedule": "2bw", "d": 2, "distributed_optimizer": True}),
        ("host_scale", "host sync", 1, {"schedule": "2bw", "dtype": "float16", "drains": (1,)}),
        ("host_norm", "host sync", 2, {"schedule": "pipedream", "p": 2, "batches": (1,) * 4}),
        ("warm_up", "late", 2, {"schedule": "2bw", "d": 2}),
    ],
)
def test_what_megatron_updates_need_is_missed(taken_back, kind, num_ranks, options):
    """Each wait of the update and its chain is needed: without it there is a finding of that kind."""
    found = gpt(num_ranks, taken_back=taken_back, **options)
    assert any(kind in account.kinds for account in found)


@pytest.mark.sample(3, "staged_sends-unordered-4-bpipe-options7", "held_evictions-freed-4-bpipe-options4")
@pytest.mark.parametrize(
    ("taken_back", "kind", "num_ranks", "preset", "options"),
    [
        ("arrivals", "unordered", 2, "flush", {}),
        ("unread_sends", "freed", 2, "flush", {}),
        ("staged_copies", "unordered", 2, "flush", {"backend": "gloo"}),
        ("followed_moves", "unordered", 4, "bpipe", {"moves_activations": True}),
        ("held_evictions", "freed", 4, "bpipe", {"moves_activations": True}),
        ("held_evictions", "freed", 2, "gpipe", SWAPS),
        ("packed_activations", "unordered", 4, "bpipe", {"moves_activations": True}),
        ("staged_sends", "unordered", 4, "bpipe", {"moves_activations": True, "backend": "gloo"}),
        ("staged_receives", "unordered", 4, "bpipe", {"moves_activations": True, "backend": "gloo"}),
    ],
)
def test_what_transfers_need_is_missed(taken_back, kind, num_ranks, preset, options):
    """Each wait of links and moves is needed: without it there is a finding of that kind."""
    found = module(num_ranks, preset, taken_back=taken_back, **options)
    assert any(kind in account.kinds for account in found)


@pytest.mark.parametrize(
    ("num_ranks", "num_virtual_stages", "residency", "training"),
    [
        (1, 4, Residency(2, "eager"), Training(batches=(3, 2, 4))),
        pytest.param(1, 4, Residency(1, "deferred"), TRAINING, marks=FULL),
        (2, 2, Residency(2, "deferred"), Training(batches=(3, 2, 4), tied=True, clip_grad=0.05)),
        pytest.param(2, 4, Residency(1, "eager"), REPLICATED, marks=FULL),
        (1, 4, Residency(2, "deferred", "host"), TRAINING),
        pytest.param(2, 3, Residency(1, "eager", "host"), Training(batches=(3, 2, 4)), marks=FULL),
    ],
)
def test_weights_come_and_gradients_go_in_order(num_ranks, num_virtual_stages, residency, training):
    """Nothing is found where weights live on the host, and each lane that copies has a stream of its own. Replicas
    fetch shares.
    """
    cut = {"num_virtual_stages": num_virtual_stages, "residency": residency, "gathers": training.num_replicas > 1}
    accounts = relay(num_ranks, training, **cut)
    assert_in_order(accounts)
    for account in accounts:
        lanes = [account.threads[f"pipeline {name}"] for name in ("host to device", "device to host")]
        assert [len(streams) for streams in lanes] == [1 + cut["gathers"], 1], "and one of the communicator"
        assert not lanes[0] & lanes[1]
        assert "compute" not in lanes[0] | lanes[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "residency", "options"),
    [
        (1, Residency(2, "deferred", "host"), {"layers": 3, "clip": 1.0, "tied": True, "drains": (1,)}),
        pytest.param(
            2, Residency(2, "eager"), {"layers": 4, "p": 2, "dtype": "bfloat16", "dropout": 0.1}, marks=FULL
        ),
        (2, Residency(2, "deferred"), {"layers": 2, "d": 2, "dtype": "float16", "overflow_batches": (2,)}),
        (2, Residency(2, "eager"), {"layers": 4, "d": 2, "dtype": "bfloat16", "gathers": True, "drains": (1,)}),
        pytest.param(
            2, Residency(1, "deferred", "host"), {"layers": 3, "t": 2, "sequence_parallel": True, "clip": 1.0},
            marks=FULL,
        ),
        pytest.param(
            4, Residency(2, "deferred"), {"layers": 4, "p": 2, "d": 2, "clip": 1.0, "tied": True, "drains": (1,)},
            marks=FULL,
        ),
    ],
)  # fmt: skip
def test_gpt_comes_and_goes_in_order(num_ranks, residency, options):
    """The same of a GPT's chunks and megatron.core's optimizer: one rank and two, replicas with one store, fp16."""
    accounts = workers.run(num_ranks, f"{CASES}:train_gpt_relay", residency=residency, **options)
    assert_in_order(accounts)


@pytest.mark.full
def test_relays_connect_before_training():
    """Each collective of the relay, of its replicas too."""
    options = {"residency": Residency(2, "deferred"), "layers": 2, "d": 2, "taken_back": "relay_warm_up"}
    found = workers.run(2, f"{CASES}:train_gpt_relay", **options)
    assert all("late" in account.kinds for account in found)


@pytest.mark.full
def test_replicas_that_gather_connect_before_training():
    options = {"residency": Residency(2, "eager"), "layers": 2, "d": 2, "gathers": True}
    found = workers.run(2, f"{CASES}:train_gpt_relay", taken_back="gather_warm_up", **options)
    assert all("late" in account.kinds for account in found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("taken_back", ["followed_lanes", "words_after_the_row", "stored_gradients"])
def test_what_lanes_need_is_missed(taken_back):
    """Each wait of the lanes is needed: without it two streams, or a stream and the host, are at the same bytes."""
    found = relay(1, TRAINING, num_virtual_stages=4, residency=Residency(2), taken_back=taken_back)
    assert "unordered" in found[0].kinds


def test_inputs_that_leave_are_held():
    """Until a computation has waited for the copy: otherwise the memory is another's while it is still to be copied."""
    found = relay(1, TRAINING, num_virtual_stages=4, residency=Residency(2, stash="host"), taken_back="held_inputs")
    assert "freed" in found[0].kinds
