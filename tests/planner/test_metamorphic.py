"""Relations between two predictions that hold whatever the constants are: of 332 configurations of all kinds.

Each is a fact of machines or of programs: a faster part makes nothing slower, what is recomputed is not kept. A
relation that is true of some configurations only says of which, and why.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron.planner.job.cluster import Cluster
from megatron.planner.memory.memory import GIB
from megatron.planner.memory.recompute import RecomputeScope
from tests.planner.metamorphic_cases import NETWORK, Case, faster
from tests.planner.metamorphic_relations import all_cases, quarter, roomy, running, saved, violations  # noqa: F401

pytestmark = pytest.mark.sample(1)

RATES = ("memory_bandwidth", "peak_teraflops", "within_node", NETWORK, "host_bandwidth")

# --- machines


@pytest.mark.full
@pytest.mark.parametrize("rate", RATES)
def test_a_faster_part_makes_nothing_slower(rate):
    """A little faster, where one thing or another begins to decide, or much."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        for factor in (1.03, 2.0):
            other = faster(case, rate, factor)
            yield other.seconds, case.seconds
            yield case.seconds, factor * other.seconds
            yield other.fullest, case.fullest
            yield case.fullest, other.fullest

    assert violations(relation) == []


@pytest.mark.full
def test_more_memory_makes_nothing_slower_and_what_fits_fits():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        small = case.machines.device.memory_gib
        for larger in (case.on(memory_gib=2 * small), case.on(memory_gib=small + case.fullest / GIB)):
            yield larger.seconds, case.seconds
            yield case.roomy.seconds, larger.seconds
            yield case.fullest, larger.fullest
            yield larger.fullest, case.fullest
            yield case.estimate.fits, larger.estimate.fits
            yield larger.estimate.under_pressure, case.estimate.under_pressure or not case.estimate.fits

    assert violations(relation) == []


def test_all_rates_twice_as_high_halve_the_time():
    """So units are the same everywhere: what is left is seconds that kernels and their launches take, halved here; and
    those of a ring's steps, where weights are split, and of the host's memory, which is not of the cluster."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        other, constants = case, case.constants
        for rate in RATES:
            other = faster(other, rate, 2.0)
        if "host_optimizer_ns" in case.cluster:
            other = other.on(host_optimizer_ns=case.cluster["host_optimizer_ns"] / 2)
        other = replace(
            other,
            constants=replace(constants, product_overhead=constants.product_overhead / 2, launch=constants.launch / 2),
        )
        yield case.seconds, 2 * other.seconds
        is_hosted = case.configuration.is_hosted and "host_optimizer_ns" not in case.cluster
        if case.configuration.sharding is None and not is_hosted:
            yield 2 * other.seconds, case.seconds

    assert violations(relation) == []


def test_the_order_of_fields_and_of_nodes_means_nothing():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        turned = replace(case, cluster=dict(reversed(case.cluster.items())))
        nodes = [
            {"name": f"host{index}", "gpus": case.cluster["gpus_per_node"]} for index in range(case.cluster["nodes"])
        ]
        listed = replace(case, cluster=case.cluster | {"nodes": nodes[::-1]})
        for other in (turned, listed):
            yield other.seconds, case.seconds
            yield case.seconds, other.seconds

    assert violations(relation) == []


def test_degrees_make_up_the_gpus_and_nothing_else_does():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked, machines = case.configuration, case.machines
        assert asked.tensor * asked.pipeline * asked.data * asked.context == asked.num_gpus == machines.num_gpus
        assert len(machines.host_of_slot) == sum(machines.gpus_of_hosts) == machines.num_gpus
        assert not case.on(nodes=2 * case.cluster["nodes"]).can_run()
        yield 0, 1

    assert violations(relation) == []


# --- what is kept


@pytest.mark.full
def test_recomputing_more_takes_longer_and_keeps_less():
    """Where activations move, fewer of them may save more time than is recomputed."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        scopes = [case.configured(recompute=scope) for scope in RecomputeScope]
        for less, more in pairwise(filter(None, scopes)):
            yield more.fullest, less.fullest
            if not case.configuration.preset.balance:
                yield less.seconds, more.seconds

    assert violations(relation, roomy()) == []


def test_sequence_parallelism_takes_no_more_memory():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        if case.configuration.tensor > 1:
            for split, whole in running(*(case.configured(sequence_parallel=each) for each in (True, False))):
                yield split.fullest, whole.fullest

    assert violations(relation, roomy()) == []


def test_a_distributed_optimizer_takes_no_more_memory():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        if case.configuration.data > 1:
            for split, whole in running(*(case.configured(distributed_optimizer=each) for each in (True, False))):
                yield split.fullest, whole.fullest

    assert violations(relation, roomy()) == []


def test_fp8_is_at_most_twice_as_fast():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = (replace(case, software=replace(case.software, fp8=each)) for each in (False, True))
        for half, eighth in running(*asked):
            yield half.seconds, 2 * eighth.seconds
            if case.configuration.recompute is RecomputeScope.NONE and case.software.flash_attention:
                for half_rank, rank in zip(half.estimate.memory, eighth.estimate.memory, strict=True):
                    yield saved(rank), saved(half_rank)

    assert violations(relation, roomy()) == []


def test_16_bits_are_no_slower_than_fp32_and_save_no_more():
    """All that is kept is not compared: masters make it 18 bytes a parameter, where FP32 has 16."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        software = replace(case.software, fp8=False, gradient_bytes=4, flash_attention=False)
        asked = (replace(case, software=replace(software, element_bytes=size)) for size in (2, 4))
        for half, single in running(*asked):
            yield half.seconds, single.seconds
            for half_rank, rank in zip(half.estimate.memory, single.estimate.memory, strict=True):
                yield saved(half_rank), saved(rank)

    assert violations(relation, roomy()) == []


# --- batches and models


def test_a_larger_microbatch_takes_no_less_and_at_most_twice_as_long():
    """Where the fused softmax takes both sizes or neither: with it twice the scores may take less."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = case.configuration
        larger = case.configured(
            micro_batch_size=2 * asked.micro_batch_size, global_batch_size=2 * asked.global_batch_size
        )
        for less, more in zip(case.estimate.memory, larger.estimate.memory, strict=True):
            yield saved(less), saved(more)
            yield less.total, more.total
        heads = asked.micro_batch_size * case.model.num_attention_heads // asked.tensor
        if case.software.flash_attention or not case.software.fuses_softmax or heads % 4 == 0 or heads % 2:
            yield case.seconds, larger.seconds
            yield larger.seconds, 2 * case.seconds

    assert violations(relation, roomy()) == []


@pytest.mark.full
def test_twice_the_microbatches_take_no_less_and_at_most_twice_as_long():
    """More than twice as long where activations move: of few microbatches a smaller part does; where ranks take turns
    with chunks that differ, and wait for one another's from the second group on; and with inputs on the host, which few
    microbatches hardly wait for."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        longer = case.configured(global_batch_size=2 * case.configuration.global_batch_size)
        if longer:  # under `pipedream` each is a batch
            yield case.seconds, longer.seconds
            yield case.fullest, longer.fullest
            asked = case.configuration
            takes_turns = asked.virtual > 1 and asked.layers is not None
            if not (asked.preset.balance or takes_turns or asked.is_hosted):
                yield longer.seconds, 2 * case.seconds

    assert violations(relation, roomy()) == []


def test_twice_the_replicas_do_at_most_twice_the_work():
    """With the same batch for each replica, and an optimizer of which each steps all: what more replicas reduce takes
    time."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        if case.configuration.is_hosted:
            return  # replicas on a host share its optimizer
        asked = case.configured(distributed_optimizer=False)
        size = asked.configuration
        more = replace(size, data=2 * size.data, global_batch_size=2 * size.global_batch_size)
        twice = replace(asked.on(nodes=2 * case.cluster["nodes"]), configuration=more)
        yield asked.seconds, twice.seconds
        yield twice.fullest, asked.fullest
        yield asked.fullest, twice.fullest

    assert violations(relation, roomy()) == []


def test_longer_sequences_and_deeper_models_take_more():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        model, deeper = case.model, []
        if case.configuration.layers is None:
            deeper = [case.shaped(num_layers=2 * model.num_layers)]
        for larger in (
            case.shaped(sequence_length=2 * model.sequence_length, num_positions=2 * model.num_positions), *deeper
        ):  # fmt: skip
            yield case.seconds, larger.seconds
            yield case.fullest, larger.fullest

    assert violations(relation, roomy()) == []


def test_on_more_pipeline_ranks_none_has_more_parameters():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = case.configuration
        if case.model.num_layers % (2 * asked.num_stages) or asked.data % 2:
            return
        longer = case.configured(pipeline=2 * asked.pipeline, data=asked.data // 2)
        if longer:
            most = [max(rank.num_parameters for rank in each.estimate.memory) for each in (longer, case)]
            yield most[0], most[1]
            layers = [max(sum(rank.layers) for rank in each.estimate.memory) for each in (longer, case)]
            yield 2 * layers[0], layers[1]

    assert violations(relation, roomy()) == []


# --- schedules


def test_2bw_takes_no_less_memory_and_no_more_time_than_flush():
    """But for weights that flush gathers beside its first forward: 2bw gathers them in its step."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        flush, two = case.scheduled("flush"), case.scheduled("2bw")
        if flush and two:
            yield flush.fullest, two.fullest
            if not (case.software.overlaps_weights and case.configuration.distributed_optimizer):
                yield two.seconds, flush.seconds

    assert violations(relation, roomy()) == []


@pytest.mark.full
def test_bpipe_leaves_the_fullest_rank_no_fuller():
    """But for the last one: it accepts by number and not by bytes, and has the head besides."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        flush, moved = case.scheduled("flush"), case.scheduled("bpipe")
        if flush and moved and case.configuration.pipeline > 1:
            others = moved.estimate.memory[:-1]
            yield max(rank.total for rank in others), flush.fullest
            yield max(rank.saved_microbatches for rank in moved.estimate.memory), case.configuration.pipeline
            yield flush.seconds, moved.seconds

    assert violations(relation, roomy()) == []


def test_interleaving_has_less_of_a_bubble():
    """On links that are no bottleneck: it sends more often."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        asked = case.configuration
        if asked.pipeline == 1 or case.model.num_layers % (2 * asked.pipeline):
            return
        linked = case.on(within_node=1e6, between_nodes=1e6)
        flush, cut = linked.scheduled("flush"), linked.scheduled("interleaved", 2)
        if flush and cut:
            yield cut.estimate.bubble, flush.estimate.bubble

    assert violations(relation, roomy()) == []


def test_a_cluster_is_what_its_file_says():
    """Fields that are written out as what they are by default change nothing."""
    for case in all_cases():
        said = case.machines
        device = said.device
        whole = Cluster(
            **case.cluster | {"bandwidth": case.cluster["bandwidth"] | {"within_node": device.link_bandwidth}},
            memory_gib=device.memory_gib, peak_teraflops=device.peak_teraflops,
            memory_bandwidth=device.memory_bandwidth, host_bandwidth=device.host_bandwidth,
            gpus_per_host=said.gpus_of_hosts[0] if len(set(said.gpus_of_hosts)) == 1 else None,
        )  # fmt: skip
        assert replace(whole.device, peak_teraflops_fp32=device.peak_teraflops_fp32) == device
        assert whole.host_of_slot == said.host_of_slot and whole.topology == said.topology
