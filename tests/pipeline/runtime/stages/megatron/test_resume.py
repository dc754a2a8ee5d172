"""A run that is stopped, saved and built anew goes on with bit-equal numbers: nothing else is state."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

COMMON = {"p": 2, "layers": 2, "batches": (2, 2, 3, 3, 4, 4), "clip": 0.5, "warmup": 8, "tied": True, "dropout": 0.1}
FP16 = {"dtype": "float16", "hidden": 16, "dropout": 0.0}
DISTRIBUTED = {"d": 2, "distributed_optimizer": True, "batches": (4, 4, 6, 6, 8, 8)}
RUNS = {
    "flush": COMMON | {"schedule": "flush"},
    "2bw": COMMON | {"schedule": "2bw"},
    "2bw with one gradient buffer": COMMON | {"schedule": "2bw", "single_gradient_buffer": True},
    "2bw bf16": COMMON | {"schedule": "2bw", "dtype": "bfloat16"},
    "2bw fp16, overflow before": COMMON | FP16 | {"schedule": "2bw", "overflow_batches": (2,)},
    "2bw fp16, overflow around": COMMON | FP16 | {"schedule": "2bw", "overflow_batches": (2, 3)},
    "2bw distributed optimizer": COMMON | DISTRIBUTED | {"schedule": "2bw"},
}
QUICK = {"2bw fp16, overflow around", "2bw distributed optimizer"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_a_resumed_run_has_the_same_numbers(name):
    """Losses, norms, scales, learning rates and both weight versions are those of the uninterrupted run, bit by bit."""
    num_ranks = cases.Case(**RUNS[name]).num_ranks
    whole_ranks = workers.run(num_ranks, f"{cases.__name__}:train", timeout=100, **RUNS[name])
    for border in (1, 3):
        resumed_ranks = workers.run(num_ranks, f"{cases.__name__}:resume", timeout=100, border=border, **RUNS[name])
        for whole, resumed in zip(whole_ranks, resumed_ranks, strict=True):
            assert repr(whole["batches"]) == repr(resumed["batches"])
            for version in ("newest", "older"):
                for key, tensor in whole[version].items():
                    assert torch.equal(tensor, resumed[version][key]), key
