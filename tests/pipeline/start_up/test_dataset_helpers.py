"""The compiled helpers of megatron.core's datasets where their own makefile is not run."""

from megatron import backend

backend.install()

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import megatron.core.datasets
from megatron.pipeline.start_up import dataset_helpers
from tests.pipeline.dropin import fake_training


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """No helpers are compiled, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dataset_helpers, "NAME", "megatron.core.datasets.helpers_that_are_absent")
    monkeypatch.setattr(megatron.core.datasets, "helpers_cpp", None, raising=False)
    yield
    sys.modules.pop(dataset_helpers.NAME, None)


@pytest.fixture
def one_rank(monkeypatch):
    """A job of one process, without a process group."""
    monkeypatch.setattr(dataset_helpers, "agreed", nullcontext)


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
    made = tmp_path / "folder" / dataset_helpers.cached().name
    dataset_helpers.compile_into(made)
    assert [file.name for file in made.parent.iterdir()] == [made.name] and made.name.startswith("helpers_cpp.")
    load = "from pathlib import Path\nfrom megatron.pipeline.start_up import dataset_helpers\n"
    path, *ours = printed(f"{load}dataset_helpers.load(Path({str(made)!r}))\n{USE}")
    wheels_path, *wheels = printed(USE)
    assert path == str(made) != wheels_path
    assert ours == wheels and ours[0].count("1") == 9


def test_compiled_helpers_are_used(monkeypatch, one_rank):
    """Those of the wheel, or of a checkout that was used before: nothing is compiled."""
    monkeypatch.setattr(dataset_helpers, "compile_into", lambda library: pytest.fail("compiled"))
    dataset_helpers.provide()


def test_host_compiles_once(absent, one_rank, monkeypatch):
    """The second job finds the first one's library, and ranks that are not their host's first compile nothing, but
    where that one is lost."""
    compiled, loaded = [], []
    monkeypatch.setattr(dataset_helpers, "load", loaded.append)

    def compile_into(library):
        compiled.append(library)
        library.parent.mkdir(parents=True)
        library.touch()

    monkeypatch.setattr(dataset_helpers, "compile_into", compile_into)
    library = dataset_helpers.cached()
    for local_rank, times in (("1", 1), ("0", 1), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        dataset_helpers.provide()
        assert compiled == [library] * times
    assert loaded == [library] * 3
    library.unlink()
    library.parent.rmdir()

    @contextmanager
    def beside_the_first():
        yield
        compile_into(library)

    monkeypatch.setattr(dataset_helpers, "agreed", beside_the_first)
    monkeypatch.setenv("LOCAL_RANK", "1")
    dataset_helpers.provide()
    assert (compiled, loaded) == ([library] * 2, [library] * 4)


@pytest.mark.parametrize(
    ("compiler", "why"), [("/no/such/compiler", "No such file or directory"), ("false", "helpers_cpp")]
)
def test_without_a_compiler(absent, one_rank, monkeypatch, compiler, why):
    """No compiler, and one that fails: a sentence says what to install, and no library is left."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ValueError, match=r"could not be compiled \(.*install a C\+\+ compiler") as refused:
        dataset_helpers.provide()
    assert (why in str(refused.value)) or compiler == "false"
    assert not dataset_helpers.cached().exists()
