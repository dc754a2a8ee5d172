"""What holds for every test: one thread, fixed seeds, an environment of its own, GPU tests only where there is a GPU,
no worker left over, and where processes share the tests, a turn."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere
os.environ.setdefault("MPLBACKEND", "Agg")

import contextlib
import gc
import importlib
import itertools
import random
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest

from tests import workers
from tests.draws import load_profile
from tests.turns import Turns

TURNS = pytest.StashKey[Turns]()

TOGETHER = {
    "tests/finetuning/": "models that are captured once in a process",
    "tests/benchmarks/gpu_hour/test_precision.py": "Transformer Engine",
    "tests/pipeline/program/test_new_word.py": "syntax trees of all sources",
    "tests/test_imports.py": "syntax trees of all sources",
    "tests/pipeline/runtime/stages/megatron/test_engine.py": "Transformer Engine",
    "tests/planner/memory/test_unquantized.py": "Transformer Engine",
    "tests/trainer/run/test_conversations.py": "Transformer Engine",
    "tests/trainer/run/test_engine.py": "Transformer Engine",
    "tests/trainer/run/test_fp8.py": "Transformer Engine",
}
"""Files or folders whose tests one process runs: each further one would make what they need anew."""


def pytest_configure(config):
    load_profile(full=config.option.markexpr.startswith("full"))
    if hasattr(config, "workerinput"):  # of pytest-xdist: the processes' temporary directories lie in one
        config.stash[TURNS] = Turns(Path(config.option.basetemp).parent)


def in_turn(files: list[str], first: int, of: int) -> list[str]:
    """All files, beginning with the share `first` of `of` shares."""
    begin = len(files) * first // of
    return files[begin:] + files[:begin]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Where processes share the whole suite, each imports another part of the files first: what one has compiled, with
    its assertions, the others read."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = session.config.rootpath
    files = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))
    for file in in_turn(files, int(worker["workerid"].removeprefix("gw")), worker["workercount"]):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection imports it again, and reports it
            importlib.import_module(file.removesuffix(".py").replace("/", "."))


def unit_of(test: str) -> str:
    """The part of the suite that one process runs: a file, or what stands in `TOGETHER`."""
    return next((unit for place, unit in TOGETHER.items() if test.startswith(place)), test.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time limit starts
def pytest_runtest_protocol(item, nextitem):
    if TURNS not in item.config.stash:
        return (yield)
    alone, next_alone = (each is not None and each.get_closest_marker("alone") is not None for each in (item, nextitem))
    with item.config.stash[TURNS].taken(alone=alone, keep=alone and next_alone):
        return (yield)


def pytest_collection_finish():
    gc.freeze()  # a collection need not look at thousands of tests, which takes it a second


@pytest.fixture(autouse=True)
def environment():
    """Leave the environment as the test found it: megatron.core sets variables when it builds a model."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def seeds():
    """Seed the generators that the test module has loaded (the pure rooms' tests never load torch)."""
    random.seed(workers.SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(workers.SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(workers.SEED)
        sys.modules["torch"].set_num_threads(1)


def pairs(item) -> set:
    """The values of a test's parameters, and each two of them together."""
    values = [(name, repr(value)) for name, value in item.callspec.params.items()]
    return {frozenset(each) for count in (1, 2) for each in itertools.combinations(values, count)}


def sample(items) -> None:
    """Of the cases of a test marked `sample(n, *ids)`, leave n to the usual selection: those with these ids, and of the
    others those that show the most pairs."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("full") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for left in cases.values():
        seen: set = set()
        count, *ids = left[0].get_closest_marker("sample").args
        for _ in range(count):
            named = [item for item in left if item.nodeid.partition("[")[2].removesuffix("]") in ids]
            chosen = max(named or left, key=lambda item: len(pairs(item) - seen), default=None)
            if chosen is not None:
                seen |= pairs(chosen)
                left.remove(chosen)
        for item in left:
            item.add_marker(pytest.mark.full)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    sample(items)
    items.sort(key=lambda item: item.get_closest_marker("eight_ranks") is not None)  # their pool ends all others
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def pytest_sessionfinish():
    workers.close_all()
