"""What stands for triton, while megatron.core and Megatron-LM are imported, where there is none."""

import sys
import textwrap
from unittest import mock

import pytest

pytest.importorskip("torch")

from megatron.backend import triton_stand_in

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
    names: dict = {}
    with mock.patch.dict(sys.modules):
        sys.modules.pop("triton", None)
        with (
            mock.patch.object(triton_stand_in.importlib.util, "find_spec", lambda name: None),
            mock.patch.object(triton_stand_in, "has_triton_package", lambda: False),
        ):
            triton_stand_in.stand_in_for_triton()
        exec(textwrap.dedent(KERNELS), names)
        assert (triton_stand_in.importlib.util.find_spec("triton").name, names["triton"].__version__) == (
            "triton",
            "0.0.0",
        )
    sentence = r"triton\.autotune: a kernel of triton is launched, and this machine has no triton"
    with pytest.raises(RuntimeError, match=sentence):
        names["kernel"][(1,)](None, 1)


def test_triton_that_is_there_is_taken(monkeypatch):
    """Found or imported already: nothing is put in its place."""
    there = object()
    monkeypatch.setitem(sys.modules, "triton", there)
    triton_stand_in.stand_in_for_triton()
    assert sys.modules["triton"] is there
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(triton_stand_in.importlib.util, "find_spec", lambda name: there)
    triton_stand_in.stand_in_for_triton()
    assert "triton" not in sys.modules


def test_names_that_python_asks_for_are_absent():
    """A module that has everything would claim protocols that it does not keep."""
    with pytest.raises(AttributeError):
        _ = triton_stand_in.TritonStandIn("triton").__wrapped__
    with pytest.raises(AttributeError):
        _ = triton_stand_in.TritonStandIn("triton").jit.__wrapped__
