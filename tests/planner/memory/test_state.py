"""Bytes of weights, gradients and optimizer state."""

import pytest

from megatron.planner import TrainingState
from megatron.planner.memory.muon import MuonSetting

PARAMETERS, MUON = 1000, MuonSetting()


def per_parameter(state: TrainingState, versions: int = 1, buffers: int = 1) -> float:
    total = (
        state.weights(PARAMETERS, num_versions=versions)
        + state.gradients(PARAMETERS, num_buffers=buffers)
        + state.optimizer(PARAMETERS, num_versions=versions)
    )
    return total / PARAMETERS


@pytest.mark.parametrize(
    "state, versions, buffers, expected",
    [
        (TrainingState(gradient_bytes=2), 1, 1, 20),  # FP16: 2 + 2 + 4 (master) + 4 (FP32 copy) + 8
        (TrainingState(), 1, 1, 18),  # BF16 with FP32 gradients: 2 + 4 + 4 + 8
        (TrainingState(), 2, 2, 24),  # 2bw: a version and a buffer more
        (TrainingState(), 2, 1, 20),  # 2bw with a single gradient buffer
        (TrainingState(weight_bytes=4), 1, 1, 16),  # FP32: no masters
        (TrainingState(weight_bytes=4), 2, 2, 24),
        (TrainingState(weight_bytes=4, num_moments=1), 1, 1, 12),  # SGD with momentum
        (TrainingState(gradient_bytes=2, distributed_optimizer=True, data=2), 1, 1, 12),
        (TrainingState(distributed_optimizer=True, data=4), 1, 1, 9),
        (TrainingState(weight_bytes=4, distributed_optimizer=True, data=4), 1, 1, 10),
        (TrainingState(weight_bytes=4, distributed_optimizer=True, data=4), 2, 2, 19),  # masters of their own
        (TrainingState(weight_bytes=4, distributed_optimizer=True, data=4, muon=MUON), 2, 2, 18),  # owners: none
        (TrainingState(distributed_optimizer=True, data=4, muon=MUON, owned_part=0.5), 1, 1, 12),  # the fullest
    ],
)
def test_bytes_of_a_parameter(state, versions, buffers, expected):
    """Each format, version, buffer and shard has its bytes."""
    assert per_parameter(state, versions, buffers) == expected


@pytest.mark.parametrize(
    "state, copies",
    [
        (TrainingState(), 2),  # 16 bits: the masters are the true weights
        (TrainingState(distributed_optimizer=True, data=4), 2),
        (TrainingState(weight_bytes=4), 3),  # FP32: the optimizer steps the weights themselves
        (TrainingState(weight_bytes=4, distributed_optimizer=True, data=4), 2),  # masters of their own
        (TrainingState(weight_bytes=4, distributed_optimizer=True, data=4, muon=MUON), 2.25),  # of what a replica owns
    ],
)
def test_true_weights_beside_predictions(state, copies):
    """Two predicted versions, and a third copy where no masters are there."""
    assert state.weights(PARAMETERS, num_versions=2, predicts=True) == copies * state.weight_bytes * PARAMETERS
    assert state.weights(PARAMETERS, num_versions=2) == 2 * state.weight_bytes * PARAMETERS


@pytest.mark.parametrize(
    "state, copied, in_step",
    [
        (TrainingState(keeps_state=True), 14, 0),  # BF16: weight, master, moments
        (TrainingState(weight_bytes=4, keeps_state=True), 12, 0),  # FP32: weight, moments
        (TrainingState(gradient_bytes=2, keeps_state=True), 14, 4),  # gradients are no part of the copy
        (TrainingState(keeps_state=True, multiplies_elsewhere=True), 14, 4),  # FP16 with FP32 gradients
        (TrainingState(), 0, 0),
    ],
)
def test_the_copy_of_optimistic_steps(state, copied, in_step):
    """What a step changes, once more; and gradients that only the step holds."""
    assert state.kept_state(PARAMETERS) == copied * PARAMETERS
    assert state.copies_in_step(PARAMETERS, num_versions=1) == in_step * PARAMETERS


def test_replicas_do_not_matter_without_the_distributed_optimizer():
    """Only ZeRO-1 divides anything by the number of replicas."""
    assert per_parameter(TrainingState(data=8)) == per_parameter(TrainingState(data=1))


def test_copies_of_what_steps_at_once():
    """A host that steps stage by stage copies the 16-bit gradients of one; FP32 ones are copied nowhere."""
    state = TrainingState(gradient_bytes=2)
    assert state.optimizer(PARAMETERS, num_versions=1, stepped=100) == 12 * PARAMETERS + 4 * 100
    assert TrainingState().optimizer(PARAMETERS, num_versions=1, stepped=100) == 12 * PARAMETERS


def test_experts_are_split_over_their_own_replicas():
    """By the distributed optimizer alone: 12 bytes of each parameter in 16 bits, in a share of its own."""
    state = TrainingState(distributed_optimizer=True, data=8, expert_data=2)
    assert state.stepped(PARAMETERS, 600) == 400 / 8 + 600 / 2
    assert state.optimizer(PARAMETERS, num_versions=1, experts=600) == pytest.approx(12 * (400 / 8 + 600 / 2))
    assert state.prediction(PARAMETERS, largest=PARAMETERS, experts=600) == pytest.approx(4 * 4 * (400 / 8 + 600 / 2))
    whole = TrainingState(data=8, expert_data=2)
    assert whole.stepped(PARAMETERS, 600) == PARAMETERS
    assert whole.optimizer(PARAMETERS, num_versions=1, experts=600) == 12 * PARAMETERS
