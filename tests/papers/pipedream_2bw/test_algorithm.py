"""The closed forms of PipeDream-2BW, section 4.2, and Algorithm 1, by the paper's text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers.pipedream_2bw.planner import RECOMPUTE_FACTOR, BlockProfile, PaperPlanner, Servers

MODEL = BlockProfile(
    num_blocks=24, block_seconds=lambda b: 0.001 + 0.003 * b, weight_bytes=600.0, activation_bytes=240.0,
    boundary_bytes=2.0,
)  # fmt: skip


def planner(*, memory: float = 1e9, high: float = 1e4, low: float = 1e3, workers: int = 16) -> PaperPlanner:
    servers = Servers(
        num_workers=workers, workers_per_server=8, memory_bytes=memory, bandwidth_high=high, bandwidth_low=low
    )
    return PaperPlanner(model=MODEL, servers=servers)


def test_time_of_computation_and_communication():
    """B/d blocks a stage; activations and gradients cross a stage's border, none where there is one stage; |W|/d of
    gradients go round w replicas; bandwidth falls where the degree reaches the GPUs of a server."""
    paper = planner()
    assert paper.compute_seconds(2, 4) == pytest.approx(6 * 0.007)
    assert paper.transfer_seconds(3, 4) == pytest.approx(2 * 3 * 2.0 / 1e4)
    assert paper.transfer_seconds(3, 8) == pytest.approx(2 * 3 * 2.0 / 1e3)
    assert paper.transfer_seconds(3, 1) == 0
    assert paper.reduction_seconds(4, 2) == pytest.approx(2 * 3 / 4 * 300 / 1e4)
    assert paper.reduction_seconds(8, 2) == pytest.approx(2 * 7 / 8 * 300 / 1e3)
    assert paper.reduction_seconds(1, 2) == 0


def test_a_pipeline_takes_the_slowest_of_compute_and_communication():
    """t = max(c T_comp, transfer, reduction): each of them decides in turn, and only computation is recomputed."""
    assert RECOMPUTE_FACTOR == 4 / 3
    fast = planner(high=1e12, low=1e12)
    assert fast.microbatch_seconds(4, 4, 2, recompute=False) == pytest.approx(fast.compute_seconds(2, 4))
    assert fast.microbatch_seconds(4, 4, 2, recompute=True) == pytest.approx(4 / 3 * fast.compute_seconds(2, 4))
    slow = planner(high=1.0, low=1.0)
    assert slow.microbatch_seconds(1, 4, 2, recompute=True) == slow.transfer_seconds(2, 4)
    assert slow.microbatch_seconds(4, 4, 2, recompute=True) == slow.reduction_seconds(4, 4)


def test_without_pipelining_stages_add_up():
    """t = sum_i max(T_comp + transfer, reduction), with no transfer to the first stage."""
    paper = planner()
    compute, transfer = paper.compute_seconds(2, 4), paper.transfer_seconds(2, 4)
    assert paper.microbatch_seconds_without_pipelining(1, 4, 2) == pytest.approx(4 * compute + 3 * transfer)
    assert paper.microbatch_seconds_without_pipelining(1, 4, 2) > 4 * paper.microbatch_seconds(1, 4, 2, recompute=False)
    slow = planner(high=1.0)
    assert slow.microbatch_seconds_without_pipelining(4, 4, 2) == pytest.approx(4 * slow.reduction_seconds(4, 4))


def test_memory():
    """2|W|/d + d|A|/d, and one version of activations where they are recomputed."""
    paper = planner()
    assert paper.memory_bytes(4, 3, recompute=False) == 2 * 600 / 4 + 4 * 720 / 4
    assert paper.memory_bytes(4, 3, recompute=True) == 2 * 600 / 4 + 720 / 4
    assert paper.memory_bytes(1, 3, recompute=True) == paper.memory_bytes(1, 3, recompute=False)


def test_recomputation_is_chosen_where_it_makes_room_for_larger_microbatches():
    """Section 5.4.2: recomputation costs at most a third, and a larger microbatch may gain more."""
    roomy, tight = planner(), planner(memory=2 * 600 / 4 + 400)
    sizes = (1, 2, 4)
    chosen = roomy.search(4, 4, safe_batch=1024, microbatches=sizes)
    assert (chosen.microbatch, chosen.recompute) == (4, False)
    steep = BlockProfile(
        num_blocks=24, block_seconds=lambda b: 0.01, weight_bytes=600, activation_bytes=240, boundary_bytes=2
    )
    chosen = PaperPlanner(model=steep, servers=tight.servers).search(4, 4, safe_batch=1024, microbatches=sizes)
    assert (chosen.microbatch, chosen.recompute) == (4, True)
    chosen = tight.search(4, 4, safe_batch=1024, microbatches=sizes)
    assert (chosen.microbatch, chosen.recompute) == (1, False)


def test_batches_stay_below_the_safe_one():
    """A round of the pipeline, b w d sequences, stays within B; widths and depths where none does are left out."""
    paper = planner()
    assert paper.search(4, 4, safe_batch=40, microbatches=(1, 2, 4)).microbatch == 2
    assert all(each.width * each.depth <= 8 for each in paper.sweep(safe_batch=8, microbatches=(1, 2)))
    assert planner(memory=10).partition(safe_batch=64, microbatches=(1, 2)) is None


@given(
    memory=st.floats(100, 2000), high=st.floats(1, 1e5), low=st.floats(1, 1e5), safe_batch=st.integers(1, 200),
    sizes=st.sets(st.integers(1, 16), min_size=1, max_size=4),
)  # fmt: skip
def test_algorithm_1_is_a_full_search(memory, high, low, safe_batch, sizes):
    """No (w, d, b, r) within B and M has a higher throughput than what Algorithm 1 returns, and g N b is B."""
    paper = planner(memory=memory, high=high, low=low, workers=8)
    found = paper.partition(safe_batch=safe_batch, microbatches=sorted(sizes))
    best = max(
        (
            w * b / paper.microbatch_seconds(w, d, b, recompute=r)
            for w, d, b, r in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8), sizes, (False, True))
            if w * d <= 8 and b * w * d <= safe_batch and paper.memory_bytes(d, b, recompute=r) <= memory
        ),
        default=None,
    )
    assert (found is None) == (best is None)
    if found is not None:
        assert found.choice.throughput == pytest.approx(best)
        assert found.accumulation * 8 * found.choice.microbatch == pytest.approx(safe_batch)
