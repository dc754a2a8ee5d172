"""What stands for triton while Megatron-LM is imported where there is none."""

import subprocess
import sys
import textwrap

import pytest

from megatron.pipeline.dropin import cpu
from tests.pipeline.dropin import fake_training

KERNELS = """
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import driver

    @triton.autotune(configs=[triton.Config({"BLOCK": 2 ** n}, num_warps=4) for n in range(3)], key=["size"])
    @triton.heuristics({"EVEN": lambda args: True})
    @triton.jit
    def kernel(x, size, BLOCK: tl.constexpr, dtype=tl.float32):
        return tl.load(x) + libdevice.tanh(x)
"""
"""The ways in which triton is used when a module is imported."""


def test_kernels_can_be_described():
    """Imports, decorators with and without arguments, types and configurations; a launch says what is missing."""
    program = """
        import importlib.util, sys
        sys.modules.pop("triton", None)
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
        import torch.utils._triton
        torch.utils._triton.has_triton_package = lambda: False
        from megatron.pipeline.dropin import cpu
        cpu.stand_in_for_triton()
        importlib.util.find_spec = real
    """
    ends = """
        print(real("triton").name, triton.__version__)
        try:
            kernel[(1,)](None, 1)
        except RuntimeError as error:
            print(error)
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # brings in torch's compiler
        print("torch", torch._dynamo.__name__)
    """
    text = "\n".join(textwrap.dedent(part) for part in (program, KERNELS, ends))
    done = subprocess.run(
        [sys.executable, "-c", text], env=fake_training.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "triton 0.0.0",
        "triton.autotune: a kernel of triton is launched, and this machine has no triton",
        "torch torch._dynamo",
    ]


def test_triton_that_is_there_is_taken(monkeypatch):
    """Found or imported already: nothing is put in its place."""
    there = object()
    monkeypatch.setitem(sys.modules, "triton", there)
    cpu.stand_in_for_triton()
    assert sys.modules["triton"] is there
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: there)
    cpu.stand_in_for_triton()
    assert "triton" not in sys.modules


def test_names_that_python_asks_for_are_absent():
    """A module that has everything would claim protocols that it does not keep."""
    with pytest.raises(AttributeError):
        _ = cpu.TritonStandIn("triton").__wrapped__
    with pytest.raises(AttributeError):
        _ = cpu.TritonStandIn("triton").jit.__wrapped__
