"""A search that knows l2l: offered where hosts have memory, found where nothing else fits; others stay as they are."""

from dataclasses import replace

import pytest

from megatron.planner import Architecture, Cluster
from megatron.planner.search import Outcome, Training
from megatron.planner.search.notes import notes_on_hosted
from tests.planner.search.helper import run

DEEP = Architecture.gpt3(
    num_layers=48, hidden_size=4096, num_attention_heads=32, sequence_length=512, vocabulary_size=51200
)
SMALL = replace(DEEP, num_layers=4, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, kv_channels=64,
                num_query_groups=16)  # fmt: skip
SCHEDULES = ("flush", "interleaved", "l2l")


def searched(model: Architecture, host: float | None = 512.0, training: Training | None = None, **space) -> Outcome:
    cluster = Cluster(gpu="V100-16", nodes=1, gpus_per_node=2, host_memory_gib=host)
    chosen = {"global_batch_size": 16, "schedules": SCHEDULES, "tensor": (1,)} | space
    return run(model, cluster, training=training or Training(), **chosen)


def test_fits_only_with_l2l_is_a_result():
    """Ten billion parameters on two GPUs of 16 GB: nothing else fits, and a sentence says so with the GiB."""
    found = searched(DEEP)
    assert found.kept and {each.choice.schedule for each in found.kept} == {"l2l"}
    best = found.best
    assert best.is_simulated and best.estimate.fits and best.choice.virtual * best.choice.pipeline == 48
    least = min(each.estimate.host.needed_gib for each in found.kept)
    (sentence,) = notes_on_hosted(found)
    assert "fits only with l2l" in sentence and f"from {least:.3g} GiB a node" in sentence
    argv = best.estimate.configuration.argv()
    assert argv[argv.index("--l2l-update") + 1] == "deferred" and "--l2l-resident-stages" in argv


@pytest.mark.full
def test_where_others_fit_they_stay_as_they_were():
    """The same choices with the same times stand first, ranked by time; no sentence."""
    without, beside = searched(SMALL, schedules=SCHEDULES[:2]), searched(SMALL, num_simulated=100)
    others = [each for each in beside.kept if each.choice.schedule != "l2l"]
    assert [each.choice for each in others] == [each.choice for each in without.kept] and len(others) < len(beside.kept)
    rates = [each.sequences_per_second for each in beside.kept]
    assert rates == sorted(rates, reverse=True) and notes_on_hosted(beside) == ()


def test_where_no_others_were_tried_nothing_says_that_it_alone_fits():
    """Of a search for l2l alone, of a model that fits without it too, and of one that does not."""
    for model in (SMALL, DEEP):
        found = searched(model, schedules=("l2l",))
        assert found.kept and found.rejected and notes_on_hosted(found) == ()


def test_updates_are_those_of_the_training_program():
    """Eager where nothing waits for the norm of all gradients."""
    for training, update in (
        (Training(clips_gradients=False), "eager"),
        (Training(), "deferred"),
        (Training(clips_gradients=False, scales_loss=True), "deferred"),
    ):
        found = searched(DEEP, training=training, pipeline=(1,))
        assert {each.estimate.configuration.host_update for each in found.kept} == {update}


@pytest.mark.parametrize(
    ("host", "space", "reason"),
    [
        (None, {}, "l2l needs the hosts' memory, which the cluster does not say (host_memory_gib)"),
        (64.0, {}, "the host of node 0 misses"),
        (512.0, {"distributed_optimizer": (True,), "pipeline": (1,)}, "l2l has the optimizer on the host"),
        (512.0, {"virtual": (3,)}, "l2l"),
    ],
)
def test_what_cannot_run_has_a_reason(host, space, reason):
    found = searched(DEEP, host, schedules=("l2l",), **space)
    assert not found.kept and all(each.reason for each in found.rejected)
    if host != 512.0 or "virtual" not in space:
        assert any(reason in each.reason for each in found.rejected)
