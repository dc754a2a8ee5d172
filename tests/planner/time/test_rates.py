"""What a GPU and its links reach of their rates."""

from dataclasses import replace

import pytest

from megatron.planner.job.devices import DEVICES
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.time.calibration import START
from megatron.planner.time.links import Rates
from megatron.planner.time.work import Work

CONSTANTS = replace(START, launch=0.0)


class Within:
    """Links in one node, of 300 GB/s."""

    within = tensor = context = expert = expert_tensor = 300e9


def rates(gpu: str = "H100", **software: bool) -> Rates:
    return Rates(DEVICES[gpu], replace(MEGATRON_CORE, **software), CONSTANTS)


def test_products_take_their_part_of_the_fastest():
    """In FP8 at a rate of its own; what is overlapped takes a quarter of its time from them, or is waited for."""
    each, seconds = rates(), lambda **work: rates().seconds(Work(**work), Within)
    assert seconds(operations=1e15) == pytest.approx(1e15 / (794.5e12 * CONSTANTS.product_efficiency))
    assert seconds(fp8_operations=1e15) == pytest.approx(1e15 / (1402.6e12 * CONSTANTS.product_efficiency))
    assert seconds(calls=3) == pytest.approx(3 * CONSTANTS.product_overhead)
    link = 300e9 * CONSTANTS.tensor_efficiency
    assert seconds(overlapped=1e9) == pytest.approx(1e9 / link) == seconds(exchanged=1e9)
    assert seconds(operations=1e15, overlapped=1e9) == pytest.approx(seconds(operations=1e15) + 0.25 * 1e9 / link)
    assert seconds(traffic=1e9) == pytest.approx(1e9 / each.memory)


def test_products_of_heads_that_are_not_aligned():
    """Without units for matrices: at half of the FP32 peak."""
    assert rates("A100-80").seconds(Work(unaligned=1e12), Within) == pytest.approx(1e12 / (19.5e12 / 2))


@pytest.mark.parametrize(
    ("gpu", "is_older", "efficiency"),
    [
        ("A100-80", False, 0.7), ("A100-80", True, 0.7), ("H100", False, 0.7), ("H100", True, 0.46),
        ("B200", False, 0.59), ("B200", True, 0.46), ("V100-32", False, 0.7),
    ],
)  # fmt: skip
def test_attention_by_kernels_for_this_gpu_or_the_one_before(gpu, is_older, efficiency):
    of_products = rates(gpu).seconds(Work(operations=1e15), Within)
    attended = rates(gpu, flash_attention_2=is_older).seconds(Work(attended=1e15), Within)
    assert attended == pytest.approx(of_products / efficiency)


def test_the_host_issues_kernels_meanwhile():
    slow = Rates(DEVICES["H100"], MEGATRON_CORE, replace(CONSTANTS, launch=1.0))
    assert slow.seconds(Work(operations=1e12, kernels=5, calls=2, collectives=1), Within) == 8.0


def test_the_host_waits_for_each_kernel():
    """Where launches are blocked, both times count."""
    constants = replace(CONSTANTS, launch=1.0)
    free, blocked = (
        Rates(DEVICES["H100"], replace(MEGATRON_CORE, blocks_launches=each), constants).seconds(
            Work(operations=1e15, kernels=5, calls=2, collectives=1), Within
        )
        for each in (False, True)
    )
    own = rates().seconds(Work(operations=1e15, calls=2), Within)
    assert free == 8.0 and blocked == pytest.approx(8.0 + own)


def test_links_between_nodes_are_no_faster_than_those_within():
    each = rates()
    within = 300e9 * CONSTANTS.link_efficiency
    assert each.of_link(300e9, Within) == within
    assert each.of_link(50e9, Within) == 50e9 * CONSTANTS.network_efficiency
    assert each.of_link(299e9, Within) == within
    assert each.of_link(300e9, Within, within=0.5) == 150e9
