"""Programs whose backwards are split into I and W, on the real runtime: small modules against one process, and sleeping
stages.

The orders are in no table of the project: W at once behind its I, some microbatches later, behind another batch's I,
all at the end, and only of some microbatches.
"""

import pytest

from tests import workers
from tests.pipeline.runtime.made_up_orders import SPLIT, registered
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training
from tests.pipeline.runtime.stages.module.test_pipeline import assert_same

CHAINS = [name for name in SPLIT if name != "split-interleaved"]


def run_module(preset, **options):
    from tests.pipeline.runtime.stages.module.module_cases import run

    with registered():
        return run(preset, **options)


def run(num_ranks, preset, training, **options):
    return workers.run(num_ranks, f"{__name__}:run_module", preset=preset, training=training, timeout=60, **options)


@pytest.mark.parametrize("preset", CHAINS)
def test_split_backwards_are_ordinary_training(preset):
    """Wherever W stands: losses and parameters are bit-equal to one process, drains and evaluations included. Where a
    whole backward stands between two halves, gradients are added up in another order.
    """
    training = Training(batches=(4, 4, 8, 8, 4), warmup=3)
    outcomes = run(2, preset, training, drains=(1, 3), evaluate=2)
    assert_same(outcomes, reference.train(training, delay=0), exact=preset != "split-in-part")


@pytest.mark.parametrize("preset", ["2bw-split-late", "2bw-split-in-part"])
def test_halves_of_two_batches_alternate(preset):
    """Without flushes an I of the next batch stands before a W of this one: each has its batch's gradients."""
    training = Training(batches=(4, 4, 4, 8, 4, 4), warmup=4)
    expected, exact = reference.train(training, delay=1), preset != "2bw-split-in-part"
    assert_same(run(2, preset, training), expected, exact=exact)
    assert_same(run(2, preset, training, drains=(1, 4)), expected, exact=exact)
