"""The compiled helpers of megatron.core's datasets where their own makefile is not run. What stands for triton while
Megatron-LM is imported where there is none.
"""

from megatron import backend

backend.install()

import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest

import megatron.core.datasets
from megatron.pipeline.dropin import cpu
from tests.pipeline.dropin import fake_training


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """No helpers are compiled, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "NAME", "megatron.core.datasets.helpers_that_are_absent")
    monkeypatch.setattr(megatron.core.datasets, "helpers_cpp", None, raising=False)
    yield
    sys.modules.pop(cpu.NAME, None)


@pytest.fixture
def one_rank(monkeypatch):
    """A job of one process, without a process group."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda found, mine: found.__setitem__(0, mine))


USE = """
import numpy
from megatron.core.datasets import helpers_cpp
datasets, samples = numpy.zeros(12, dtype=numpy.int16), numpy.zeros(12, dtype=numpy.int64)
helpers_cpp.build_blending_indices(datasets, samples, numpy.array([0.25, 0.75]), 2, 12, False)
print(helpers_cpp.__file__, datasets.tolist(), samples.tolist(), sep="\\n")
"""
"""Which sample of which of two datasets comes next in a blend."""


def printed(program: str) -> list[str]:
    """What a process prints: one that has loaded the helpers gets no others."""
    done = fake_training.python("-c", "from megatron import backend\nbackend.install()\n" + program, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_source_is_compiled_as_the_makefile_would(tmp_path):
    """The library that is made of the core's source does what the wheel's does."""
    made = tmp_path / "folder" / cpu.cached().name
    cpu.compile_into(made)
    assert [file.name for file in made.parent.iterdir()] == [made.name] and made.name.startswith("helpers_cpp.")
    load = "from pathlib import Path\nfrom megatron.pipeline.dropin import cpu\n"
    path, *ours = printed(f"{load}cpu.load(Path({str(made)!r}))\n{USE}")
    wheels_path, *wheels = printed(USE)
    assert path == str(made) != wheels_path
    assert ours == wheels and ours[0].count("1") == 9


def test_compiled_helpers_are_used(monkeypatch, one_rank):
    """Those of the wheel, or of a checkout that was used before: nothing is compiled."""
    monkeypatch.setattr(cpu, "compile_into", lambda library: pytest.fail("compiled"))
    cpu.provide()


def test_host_compiles_once(absent, one_rank, monkeypatch):
    """The second job finds the first one's library, and ranks that are not their host's first compile nothing."""
    compiled, loaded = [], []
    monkeypatch.setattr(cpu, "load", loaded.append)

    def compile_into(library):
        compiled.append(library)
        library.parent.mkdir(parents=True)
        library.touch()

    monkeypatch.setattr(cpu, "compile_into", compile_into)
    monkeypatch.setenv("LOCAL_RANK", "1")
    cpu.provide()
    assert (compiled, loaded) == ([], [cpu.cached()])
    monkeypatch.setenv("LOCAL_RANK", "0")
    cpu.provide()
    cpu.provide()
    assert (compiled, loaded) == ([cpu.cached()], [cpu.cached()] * 3)


@pytest.mark.parametrize(
    ("compiler", "why"), [("/no/such/compiler", "No such file or directory"), ("false", "helpers_cpp")]
)
def test_without_a_compiler(absent, one_rank, monkeypatch, capsys, compiler, why):
    """No compiler, and one that fails: the job ends with a sentence on what to install, and no library is left."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit) as end:
        cpu.provide()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert "could not be compiled (" in said and "install a C++ compiler" in said
    assert (why in said) or compiler == "false"
    assert not cpu.cached().exists()


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
            mock.patch.object(cpu.importlib.util, "find_spec", lambda name: None),
            mock.patch.object(cpu, "has_triton_package", lambda: False),
        ):
            cpu.stand_in_for_triton()
        exec(textwrap.dedent(KERNELS), names)
        assert (cpu.importlib.util.find_spec("triton").name, names["triton"].__version__) == ("triton", "0.0.0")
    sentence = r"triton\.autotune: a kernel of triton is launched, and this machine has no triton"
    with pytest.raises(RuntimeError, match=sentence):
        names["kernel"][(1,)](None, 1)


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
