"""What is seen of reductions and gathers that run beside computations."""

from dataclasses import replace

import pytest

from megatron.planner import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.planner import Planner
from megatron.planner.time.calibration import default_constants
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.links import gathers_shown, num_buckets, reductions_shown
from tests.planner.search.helper import gpt3

CONTENTION = default_constants().contention


def test_buckets_are_megatron_cores():
    """40 million parameters, or one million for each replica; one at least."""
    assert num_buckets(400_000_000, 8) == 10 and num_buckets(400_000_000, 100) == 4
    assert num_buckets(1_000_000, 8) == 1


def test_more_parameters_never_show_less():
    """Reductions as long as parameters are many, beside the same backward: no step where another bucket begins."""
    counts = range(39_000_000, 400_000_000, 1_000_000)
    buckets = [num_buckets(count, 8) for count in counts]
    seconds, beside = [count / 1e8 for count in counts], [10.0] * len(counts)
    shown = reductions_shown(seconds, beside, buckets, [0] * len(counts), 0.25)
    assert shown == sorted(shown) and shown[0] < shown[-1]


def test_the_first_rank_shows_a_bucket_or_what_is_longer():
    """The last bucket comes behind the backward; a reduction that is longer than it shows the rest; the others' lies in
    the program, behind their backwards."""
    short = reductions_shown([2.0, 2.0], [4.0, 4.0], [10, 10], [0, 1], 0.25)
    assert short == pytest.approx([0.2 + 0.25 * 1.8, 2.0])
    long = reductions_shown([6.0, 6.0], [4.0, 4.0], [10, 10], [0, 1], 0.25)
    assert long == pytest.approx([2.0 + 0.25 * 4.0, 6.0])
    one = reductions_shown([2.0], [4.0], [1], [0], 0.25)
    assert one == [2.0]


def test_gathers_of_later_ranks_are_there_when_the_first_forward_is():
    shown = gathers_shown([2.0, 2.0, 2.0], [1.5, 1.5, 1.5], [10, 10, 10], [0, 1, 2], 0.25)
    assert shown == pytest.approx([0.5 + 0.25 * 1.5, 0.5, 0.0])


@pytest.mark.parametrize("schedule", ["flush", "interleaved", "2bw"])
def test_overlap_saves_time_where_batches_drain(schedule):
    """It lies between an iteration whose reductions are seen and one without replicas; 2bw hides its own either way."""
    model = gpt3(16, 4096, 32)
    cluster = Cluster(gpu="H100", nodes=4, gpus_per_node=8, bandwidth={"between_nodes": 25})
    configuration = Configuration(
        tensor=4, pipeline=4, data=2, virtual=2 if schedule == "interleaved" else 1, micro_batch_size=1,
        global_batch_size=16, schedule=schedule, sequence_parallel=True, distributed_optimizer=True,
    )  # fmt: skip

    def seconds(**changes: bool) -> float:
        software = replace(MEGATRON_CORE, flash_attention=True, **changes)
        planner = Planner(model, cluster, FirstPrinciples(model, cluster, software), software)
        return planner.estimate(configuration).seconds

    plain, reduced = seconds(), seconds(overlaps_gradients=True)
    both = seconds(overlaps_gradients=True, overlaps_weights=True)
    if schedule == "2bw":
        assert plain == reduced == both
    else:
        assert both < reduced < plain
