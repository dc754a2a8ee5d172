"""`--optimizer-kernel`: torch's fused kernel, or its loop."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.trainer.optimizer.kernel import choose_kernel

MAKE = {
    "AdamW": lambda groups, **options: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, **options),
    "Adam": lambda groups, **options: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, **options),
    "SGD": lambda groups, **options: torch.optim.SGD(groups, lr=0.01, momentum=0.9, **options),
}


class Operations(TorchDispatchMode):
    """`fused`: whether an operation was a fused step."""

    fused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.fused = self.fused or "_fused_" in func.name()
        return func(*args, **(kwargs or {}))


def stepped(make, *kernels):
    """Parameters after two steps with each of these kernels in turn, as megatron.core holds an optimizer, the second on
    with the state that the one before has saved; and for each kernel, whether it was fused.
    """
    generator = torch.Generator().manual_seed(2)
    parameters = [torch.randn(31, generator=generator).requires_grad_() for _ in range(3)]
    state, used = None, []
    for kernel in kernels:
        inner = make([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}])
        if state is not None:
            inner.load_state_dict(copy.deepcopy(state))
        if kernel is not None:
            choose_kernel(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]), kernel)
        with Operations() as operations:
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.randn(31, generator=generator)
                inner.step()
        state = inner.state_dict()
        used.append(operations.fused)
    return torch.stack([parameter.detach() for parameter in parameters]), used


@pytest.mark.parametrize("name", MAKE)
def test_the_kernel_is_torchs_own(name):
    """Chosen afterwards it steps as an optimizer that was made with it, bit for bit."""
    make = MAKE[name]
    for kernel, is_fused in (("fused", True), ("loop", None)):
        made, _ = stepped(lambda groups, fused=is_fused: make(groups, fused=fused), None)
        chosen, used = stepped(make, kernel)
        assert torch.equal(chosen, made) and used == [bool(is_fused)]


@pytest.mark.parametrize("kernels", [("fused", "loop"), ("loop", "fused"), ("fused", "fused")])
def test_a_resume_steps_with_the_kernel_that_is_asked_for(kernels):
    """What was saved brings the kernel along that it was saved with, and that is not what steps."""
    _, used = stepped(MAKE["AdamW"], *kernels)
    assert used == [kernel == "fused" for kernel in kernels]


def test_what_has_one_kernel_is_left_alone():
    """Apex's and Transformer Engine's optimizers know no such choice."""
    other = SimpleNamespace(param_groups=[{"lr": 0.1}])
    choose_kernel(SimpleNamespace(optimizer=other), "fused")
    assert other.param_groups == [{"lr": 0.1}]
