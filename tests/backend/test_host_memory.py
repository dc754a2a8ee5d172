"""Freed memory on a CPU: kept for the next allocation, unless the user has said what is to happen to it."""

import importlib
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from megatron import backend

host_memory = importlib.import_module("megatron.backend.device")  # whose name is that of its function too
_IS_GLIBC = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "") if "CS_GNU_LIBC_VERSION" in os.confstr_names else False
pytestmark = pytest.mark.skipif(not _IS_GLIBC or torch.cuda.is_available(), reason="changes nothing but glibc on a CPU")
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
BLOCKS = """
    import resource, sys
    import torch
    from megatron import backend

    changed = backend.keep_freed_memory() if sys.argv[1] == "keep" else None

    def step():
        blocks = [torch.ones(1 << 20) for _ in range(32)]  # 4 MiB each

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run_steps(how: str, **variables: str) -> tuple[str, int]:
    """What `keep_freed_memory` returned, and the page faults of ten steps of 128 MiB, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    argv = [sys.executable, "-c", textwrap.dedent(BLOCKS), how]
    done = subprocess.run(argv, env=environment | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    changed, faults = done.stdout.split()
    return changed, int(faults)


@pytest.mark.full
def test_freed_memory_is_used_again():
    """Steps that allocate what the ones before have freed take no pages from the system. Of a library that gives all of
    it back they take them anew; what it does untold depends on what happens to lie at the end of the heap."""
    changed, faults = run_steps("keep")
    assert (changed, faults < 1000) == ("True", True), faults
    _, given_back = run_steps("leave", MALLOC_MMAP_THRESHOLD_="65536")
    assert given_back > 100_000  # of the 327,680 pages that ten steps touch


class Library:
    """Stands in for glibc, and keeps blocks of up to `most` bytes."""

    gnu_get_libc_version = None

    def __init__(self, most: int) -> None:
        self.most, self.set = most, []

    def mallopt(self, name: int, value: int) -> int:
        if name == host_memory._MMAP_THRESHOLD and value > self.most:
            return 0
        self.set.append((name, value))
        return 1


@pytest.fixture
def libraries(monkeypatch):
    """`libraries(most)` puts such a library in glibc's place; the user has set none of the C library's variables."""
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def put(most: int) -> Library:
        library = Library(most)
        monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
        return library

    return put


@pytest.mark.parametrize(
    "name, value", [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")]
)
def test_the_users_own_settings_stay(libraries, monkeypatch, name, value):
    """Who sets the C library's variables knows why."""
    library = libraries(1 << 30)
    monkeypatch.setenv(name, value)
    assert backend.keep_freed_memory() is False
    assert library.set == []


def test_an_older_library_takes_less(libraries):
    """glibc before 2.35 refuses to keep blocks beyond 32 MiB; one that refuses them all is left as it is."""
    for most, is_changed in ((1 << 30, True), (1 << 25, True), (0, False)):
        library = libraries(most)
        assert backend.keep_freed_memory() is is_changed
        assert library.set == is_changed * [(-3, most), (-1, (1 << 31) - 1)]


@pytest.mark.parametrize("version", [0, 1])
def test_a_containers_limit_counts(version, tmp_path, monkeypatch):
    """What is left of it, with the files that the kernel can take back; and no limit is none."""
    there = host_memory.available_host_bytes()
    limit, current, statistics = (tmp_path / name for name in ("limit", "current", "statistics"))
    name = host_memory._CGROUP_FILES[version][3]
    monkeypatch.setattr(host_memory, "_CGROUP_FILES", ((limit, current, statistics, name),))
    current.write_text("3000000\n")
    statistics.write_text(f"anon 5\n{name} 1000000\n")
    limit.write_text("5000000\n")
    assert host_memory.available_host_bytes() == 3_000_000 < there
    limit.write_text("max\n")
    assert host_memory.available_host_bytes() > 3_000_000
