"""megatron.core's chunks with their weights on the host: what comes and goes, and what is on the device.

That it trains what `flush` trains is shown by tests/trainer/run/test_relay.py.
"""

import math

import pytest

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron.megatron_model import SEQUENCE, Case

CASES = "tests.pipeline.runtime.stages.megatron.megatron_relay_cases"
REFERENCE = "tests.pipeline.runtime.stages.megatron.megatron_reference:reference"


def train(**options):
    (outcome,) = workers.run(1, f"{CASES}:train", **options)
    return outcome


@pytest.mark.parametrize(("resident", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32")])
def test_a_batch_fetches_every_stage_twice_but_where_it_turns(resident, dtype):
    """2N - K fetches whatever m is, in the weights' own precision, and the device has K stages and two gradients."""
    outcome = train(num_stages=4, resident=resident, batches=(1, 3), dtype=dtype)
    weights, gradients = zip(*outcome.stages, strict=True)
    assert outcome.num_fetched == 2 * (2 * 4 - resident)
    assert outcome.num_bytes_fetched == 2 * (2 * sum(weights) - sum(weights[-resident:]))
    assert outcome.weight_bytes < sum(weights) and outcome.gradient_bytes == 2 * max(gradients)
    assert gradients[1] == weights[1] * (1 if dtype == "float32" else 2), "gradients add up in FP32"


@pytest.mark.parametrize(("stash", "dtype"), [("device", "float32"), ("host", "bfloat16")])
def test_a_report_says_what_the_device_and_the_host_have(stash, dtype):
    """On the device arena, gradient buffers and tensors between stages, of which none is left: as many as the checker
    proves at most, but for an input whose gradient counts when the backward has ended, and the input is gone. On the
    host 16 or 18 bytes a parameter as soon as there are moments, and the inputs that have left.
    """
    case, m = Case(), 3
    outcome = train(num_stages=5, layers=5, batches=(m, m, m), stash=stash, dtype=dtype)
    boundary = SEQUENCE * case.micro_batch_size * case.hidden * (4 if dtype == "float32" else 2)
    most, left = outcome.boundaries
    assert left == 0
    assert most == (m * 4 + 1 if stash == "device" else m + 3)
    counted = most - (stash == "device")
    assert outcome.device_peaks == [outcome.weight_bytes + outcome.gradient_bytes + counted * boundary] * 3
    weights, gradients = (sum(each) for each in zip(*outcome.stages, strict=True))
    masters, inputs = gradients * (dtype != "float32"), 3 * m * boundary * (stash == "host")
    first = weights + gradients + masters + inputs
    assert outcome.host_peaks == [first, first + 2 * gradients, first + 2 * gradients]


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_missing_fetch_shows(stage):
    """Weights that are away are NaN: the loss is, or at least the gradients of what is recomputed."""
    outcome = train(num_stages=4, drop=stage, batches=(2,))
    assert not all(map(math.isfinite, outcome.losses + outcome.norms))
    assert all(map(math.isfinite, (whole := train(num_stages=4, batches=(2,))).losses + whole.norms))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_add_up_as_in_megatrons_ddp(dtype):
    """In FP32 whatever the weights are; `.grad` is dropped."""
    [[equal]] = workers.run(1, f"{CASES}:gradients", dtype=dtype)
    assert len(equal) > 30 and all(equal)


@pytest.mark.full
def test_gradients_are_divided_by_the_tokens_of_the_batch():
    """Losses and norms of a per-token loss with weights on the host, clipped, are those of a plain loop."""
    options = {"batches": (2, 1, 3), "clip": 0.5, "masked": True, "per_token": True}
    outcome = train(num_stages=4, **options)
    [expected] = workers.run(1, REFERENCE, timeout=200, **vars(Case(schedule="l2l", **options)))
    assert outcome.losses == [batch["loss"] for batch in expected["batches"]]
    assert outcome.norms == pytest.approx([batch["norm"] for batch in expected["batches"]], rel=1e-14)


@pytest.mark.full
def test_eager_is_deferred_where_nothing_depends_on_the_norm():
    """Losses and norms of four batches are the same, bit for bit."""
    eager, deferred = (train(num_stages=4, eager=each, batches=(2, 1, 3, 2)) for each in (True, False))
    assert (eager.losses, eager.norms) == (deferred.losses, deferred.norms) and len(set(eager.losses)) == 4
    assert eager.num_batches_at_end == deferred.num_batches_at_end == 0, "each is forgotten with its last update"


def test_a_checkpoint_says_the_last_norm():
    """Which 2bw with one gradient buffer clips its first batch by."""
    outcome = train(num_stages=2, batches=(2, 1, 3))
    assert outcome.state["last_grad_norm"] == outcome.norms[-1] > 0


def test_shares_need_another_replica_on_the_node():
    assert workers.run(2, f"{CASES}:gather_on_hosts", hosts=["a", "a"]) == ["", ""]
    told = workers.run(2, f"{CASES}:gather_on_hosts", hosts=["a", "b"])
    assert all("this rank's are on others: fetch whole stages, or place replicas together" in text for text in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed_optimizer": True}, "The distributed optimizer keeps its shards on the device"),
        ({"eager": True, "clip": 1.0}, "An eager update is made before the norm of all gradients"),
        ({"eager": True, "dtype": "float16"}, "use deferred updates, or neither clip nor scale the loss"),
        ({"eager": True, "masked": True, "per_token": True}, "any overflow and the number of tokens are known"),
        ({"fused": True}, "gradient_accumulation_fusion adds to gradients unseen"),
    ],
)
def test_what_it_cannot_drive_is_refused(options, message):
    """Where it is made."""
    with pytest.raises(workers.WorkerError, match=message):
        train(num_stages=2, **options)
