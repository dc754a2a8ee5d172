"""A run that is stopped, saved and built anew goes on with bit-equal numbers: nothing else is state."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime import megatron_cases as cases

COMMON = {"p": 2, "layers": 2, "batches": (2, 2, 3, 3, 4, 4), "clip": 0.5, "warmup": 8, "tied": True, "dropout": 0.1}
FP16 = {"dtype": "float16", "hidden": 16, "dropout": 0.0}
RUNS = {
    "flush": COMMON | {"schedule": "flush"},
    "2bw": COMMON | {"schedule": "2bw"},
    "2bw with one gradient buffer": COMMON | {"schedule": "2bw", "single_gradient_buffer": True},
    "2bw bf16": COMMON | {"schedule": "2bw", "dtype": "bfloat16"},
    "2bw fp16, overflow before": COMMON | FP16 | {"schedule": "2bw", "overflow_batches": (2,)},
    "2bw fp16, overflow around": COMMON | FP16 | {"schedule": "2bw", "overflow_batches": (2, 3)},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_has_the_same_numbers(name):
    """Losses, norms, scales, learning rates and both weight versions are those of the uninterrupted run, bit by bit."""
    whole_ranks = workers.run(2, f"{cases.__name__}:train", timeout=100, **RUNS[name])
    for border in (1, 3):
        resumed_ranks = workers.run(2, f"{cases.__name__}:resume", timeout=100, border=border, **RUNS[name])
        for whole, resumed in zip(whole_ranks, resumed_ranks, strict=True):
            assert repr(whole["batches"]) == repr(resumed["batches"])
            for version in ("newest", "older"):
                for key, tensor in whole[version].items():
                    assert torch.equal(tensor, resumed[version][key]), key


def test_entry_versions():
    """A drained 2bw run goes on from two versions, a flush run from one, a new run from version 0."""
    assert workers.run(1, f"{__name__}:entry_versions", timeout=60) == [[(0,), (4, 5), (0,), (5,), [4, 5]]]


def entry_versions() -> list:
    found = []
    for schedule in ("2bw", "flush"):
        case = cases.Case(schedule=schedule, layers=1)
        with cases.parallel(case):
            _, update = cases.build(case)
            found += [update.entry_versions(0), update.entry_versions(5)]
            if schedule == "2bw":
                update.restart(5)
                live = update.versions.live()
    return [*found, live]
