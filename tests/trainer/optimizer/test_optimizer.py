"""The optimizer of a run, where weights lie on the host and megatron.core has found a GPU's kernels."""

from unittest import mock

import pytest
import torch

from megatron import backend

backend.install()

from megatron.core import optimizer as core
from tests import workers
from tests.trainer.run.run_case import data_flags, train, train_case
from tests.trainer.run.test_relay import L2L, P1, UNTIED, assert_same

FULL = pytest.mark.full


class FusedAdam(torch.optim.Optimizer):
    """A kernel that no host has."""

    def __init__(self, *args, **options):
        raise AssertionError("a GPU's kernel was chosen for steps on the host")


def plain_type():
    """`torch.Tensor.type` as torch has it."""
    found = torch.Tensor.type
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def train_beside_gpu_kernels(flags: str) -> dict:
    """What megatron.core knows where Apex is installed, and the names of types that a host's tensors have there."""
    with (
        mock.patch.object(core, "Adam", FusedAdam),
        mock.patch.object(core, "SGD", FusedAdam),
        mock.patch.object(core, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(torch.Tensor, "type", plain_type()),
    ):
        return train_case(flags)


@pytest.mark.parametrize(
    "flags",
    ["--bf16", pytest.param("--optimizer sgd", marks=FULL), pytest.param("--fp16 --optimizer lamb", marks=FULL)],
)
def test_the_host_steps_with_torch(flags):
    """Bit-equal to a machine that has no other kernels."""
    flags = f"{UNTIED} {flags} {L2L} {P1}"
    found = workers.run(1, f"{__name__}:train_beside_gpu_kernels", flags=f"{flags} {data_flags()}")
    assert_same(train(1, flags), found)


def test_the_device_steps_with_its_own():
    """Weights on the device are not touched by that."""
    with pytest.raises(AssertionError, match="a GPU's kernel was chosen"):
        workers.run(1, f"{__name__}:train_beside_gpu_kernels", flags=f"{UNTIED} {P1} {data_flags()}")
