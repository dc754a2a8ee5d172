"""The same for choices that a user makes beside the machines: batches, widths, experts, what is split or predicted."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.planner.metamorphic_cases import Case
from tests.planner.metamorphic_relations import quarter, roomy, running, violations  # noqa: F401

pytestmark = pytest.mark.sample(1)

NEWER = {
    "A100-40": "A100-80", "A100-PCIe-40": "A100-PCIe-80", "A100-PCIe-80": "A100-80", "A100-80": "H100",
    "H100-PCIe": "H100-NVL", "H100": "H200", "H200": "B200", "B200": "GB200", "V100-16": "V100-32",
    "V100-32": "A100-40",
}  # fmt: skip
"""A GPU of which another one exceeds all rates."""


@pytest.mark.full
def test_a_gpu_that_is_better_in_all_is_no_slower():
    """Weights on the host ask for the host, too: on one with fewer GPUs fewer replicas share its optimizer."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        newer = NEWER.get(case.cluster["gpu"])
        if newer and "within_node" not in case.cluster["bandwidth"]:
            for (better,) in running(case.on(gpu=newer)):
                if not case.configuration.is_hosted or better.machines.gpus_of_hosts == case.machines.gpus_of_hosts:
                    yield better.seconds, case.seconds

    assert violations(relation) == []


@pytest.mark.full
def test_a_microbatch_more_takes_no_less():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = case.configuration
        m = asked.num_microbatches
        for more in (1, asked.pipeline):
            for (longer,) in running(case.configured(global_batch_size=asked.global_batch_size // m * (m + more))):
                yield case.seconds, longer.seconds
                yield case.fullest, longer.fullest

    assert violations(relation, roomy()) == []


@pytest.mark.full
def test_a_larger_microbatch_of_the_same_batch_takes_no_less_memory():
    """Where a batch fills the pipeline, and nothing is kept for a prediction. Of few microbatches, fewer wait between
    the halves of their backwards; and of one, a prediction keeps no gradients."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = case.configuration
        if asked.num_microbatches % 2 or asked.splits_backward or asked.predicts:
            return
        for (larger,) in running(case.configured(micro_batch_size=2 * asked.micro_batch_size)):
            yield case.fullest, larger.fullest

    assert violations(relation, roomy()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "widths", [("hidden_size", "ffn_hidden_size", "kv_channels"), ("ffn_hidden_size",), ("vocabulary_size",)]
)
def test_a_wider_model_takes_no_less(widths):
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        for (wider,) in running(case.shaped(**{name: 2 * getattr(case.model, name) for name in widths})):
            yield case.seconds, wider.seconds
            for rank, other in zip(case.estimate.memory, wider.estimate.memory, strict=True):
                yield rank.total, other.total

    assert violations(relation, roomy()) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", ["count", "topk", "ffn_hidden_size"])
def test_more_of_experts_takes_no_less(size):
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        experts = case.model.experts
        if experts is None or (size == "topk" and 2 * experts.topk > experts.count):
            return
        more = replace(experts, **{size: 2 * getattr(experts, size)})
        for (other,) in running(case.shaped(experts=more)):
            yield case.seconds, other.seconds
            yield case.fullest, other.fullest

    assert violations(relation, roomy(), fewest=5) == []


def test_weights_that_are_split_more_take_no_more_memory():
    """ZeRO-3 beside ZeRO-2, and more shards."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        sharding = case.configuration.sharding
        if sharding is None:
            return
        for third, second in running(*(case.configured(sharding=replace(sharding, stage=each)) for each in (3, 2))):
            yield third.fullest, second.fullest
        if sharding.shards % 2 == 0 and sharding.shards > 2:
            fewer = case.configured(sharding=replace(sharding, shards=sharding.shards // 2))
            yield case.fullest, fewer.fullest

    assert violations(relation, roomy()) == []


@pytest.mark.full
def test_one_gradient_buffer_takes_less_memory_and_no_less_time():
    """And no more than flush, but for what that hides behind its last backward or its first forward."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        two, flush = case.scheduled("2bw"), case.scheduled("flush")
        if not two:
            return
        for (one,) in running(two.configured(single_gradient_buffer=True)):
            yield one.fullest, two.fullest
            yield two.seconds, one.seconds
            if flush and not (case.software.overlaps_gradients or case.software.overlaps_weights):
                yield one.seconds, flush.seconds

    assert violations(relation, roomy()) == []


@pytest.mark.full
def test_predictions_take_no_less():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        for (plain,) in running(case.scheduled("2bw")):
            for (predicted,) in running(plain.configured(provisional="stage")):
                yield plain.seconds, predicted.seconds
                yield plain.fullest, predicted.fullest

    assert violations(relation, roomy()) == []


@pytest.mark.full
def test_what_overlaps_takes_no_longer():
    """Reductions and gathers beside computations: a part of them is lost to these, and never more than all."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        for name in ("overlaps_gradients", "overlaps_weights"):
            asked = (replace(case, software=replace(case.software, **{name: each})) for each in (True, False))
            for beside, behind in running(*asked):
                yield beside.seconds, behind.seconds

    assert violations(relation, roomy()) == []


def test_flash_attention_takes_no_more():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = (replace(case, software=replace(case.software, flash_attention=each)) for each in (True, False))
        for flash, unfused in running(*asked):
            yield flash.seconds, unfused.seconds
            yield flash.fullest, unfused.fullest

    assert violations(relation, roomy()) == []


def test_parts_of_a_whole():
    """Neither bubbles nor, in 16 bits, the use of a GPU is more than all."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        yield 0, case.estimate.bubble
        yield case.estimate.bubble, 1
        if not case.software.fp8:  # of which the peak is twice that which counts
            yield case.estimate.mfu, 1

    assert violations(relation) == []
