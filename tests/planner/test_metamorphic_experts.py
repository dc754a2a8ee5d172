"""Relations between two predictions of models with experts, and of ranks that share sequences, whatever the constants
are: of configurations of all kinds that are drawn once and for all."""

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron.planner import Architecture, Configuration
from megatron.planner.job.software import ALL_TO_ALL, FLEX, MEGATRON_CORE
from megatron.planner.memory.architecture import Experts
from tests.planner.metamorphic_cases import NETWORK, Case, faster

NUM_CASES = 60
ROUNDING = 1e-9
_DISPATCHERS = (ALL_TO_ALL, FLEX)
_GPUS = ("A100-80", "H100", "H200", "B200", "GB200", "A100-PCIe-80")


def _drawn(draw: random.Random, index: int) -> Case | None:
    gpu = _GPUS[index % len(_GPUS)]
    t, p, cp, ep = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((1, 1, 2, 4)), draw.choice((2, 4, 8, 16))
    d, v = draw.choice((1, 2, 4, 8)), draw.choice((1, 2))
    ranks = t * cp * d
    if ranks % ep or (p == 1 and v > 1):
        return None
    etp = draw.choice((1, 1, t))
    count, topk = ep * draw.choice((1, 2, 8)), draw.choice((1, 2, 8))
    per_node = 64 if gpu == "GB200" else 8
    per_node = min(per_node, ranks * p)
    if ranks * p % per_node or ranks % (ep * etp) or topk > count:
        return None
    hidden = draw.choice((2048, 4096))
    model = Architecture(
        num_layers=p * v * 4, hidden_size=hidden, ffn_hidden_size=4 * hidden, num_attention_heads=32,
        num_query_groups=8, kv_channels=128, sequence_length=draw.choice((2048, 8192)), vocabulary_size=128256,
        tied_embeddings=False, gated=True, linear_biases=False, norm_vectors=1, hidden_dropout=False,
        attention_dropout=False,
        experts=Experts(
            count=count, topk=topk, ffn_hidden_size=draw.choice((512, 768, 2048)) * etp,
            shared_ffn_hidden_size=draw.choice((0, 0, 2048)), layers=draw.choice((1, 1, 2)),
        ),
    )  # fmt: skip
    size = draw.choice((1, 2))
    configuration = Configuration(
        tensor=t, pipeline=p, data=d, virtual=v, micro_batch_size=size, global_batch_size=size * d * p * 2,
        schedule="interleaved" if v > 1 else "flush", sequence_parallel=t > 1, distributed_optimizer=ranks > t,
        context=cp, expert=ep, expert_tensor=etp,
    )  # fmt: skip
    software = replace(
        MEGATRON_CORE, flash_attention=True, dispatcher=draw.choice(_DISPATCHERS),
        fp8=gpu not in ("A100-80", "A100-PCIe-80") and draw.random() < 0.5,
    )  # fmt: skip
    cluster = {"gpu": gpu, "nodes": ranks * p // per_node, "gpus_per_node": per_node}
    cluster["bandwidth"] = {NETWORK: draw.choice((12.5, 100, 400)) * per_node / 8}
    name = f"{index}-{gpu}-t{t}p{p}cp{cp}ep{ep}etp{etp}d{d}v{v}-E{count}k{topk}-{software.dispatcher}"
    return Case(name, model, cluster, software, configuration)


@functools.cache
def cases(seed: int = 20261126) -> list[Case]:
    draw = random.Random(seed)
    drawn = ((_drawn(draw, index) for _ in range(500)) for index in range(NUM_CASES))
    return [next(case for case in each if case is not None and case.can_run()).roomy for each in drawn]


def with_experts(case: Case, **changes: object) -> Case:
    return case.shaped(experts=replace(case.model.experts, **changes))


def trained(case: Case, **changes: object) -> Case:
    return replace(case, software=replace(case.software, **changes))


def violations(relation) -> list[str]:
    """Cases of which a relation is not true. Fails where it says nothing of too many."""
    found, num_checks = [], 0
    for case in cases():
        for low, high in relation(case):
            num_checks += 1
            if low > high * (1 + ROUNDING):
                found.append(f"{case}: {low:.9g} > {high:.9g}")
    assert num_checks >= 20
    return found


@pytest.mark.parametrize("rate", ["memory_bandwidth", "peak_teraflops", "within_node", NETWORK])
def test_a_faster_part_makes_nothing_slower(rate):
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        doubled = faster(case, rate, 2)
        yield doubled.seconds, case.seconds
        yield case.seconds, 2 * doubled.seconds

    assert violations(relation) == []


def test_copies_beside_another_microbatch_are_never_slower_than_waiting_for_them():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        beside = trained(case, overlaps_experts=True)
        if beside.can_run():
            yield beside.seconds, case.seconds
            yield beside.fullest, case.fullest
            yield case.fullest, beside.fullest

    assert violations(relation) == []


def test_a_copy_for_a_rank_is_never_more_to_send_than_one_for_each_expert():
    """So where nothing but sending takes time, it is never slower. (A rank with one expert has nothing to sort, which
    DeepEP's dispatcher does all the same.)"""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        on = case.on(memory_bandwidth=1e20, peak_teraflops=1e20)
        yield trained(on, dispatcher=FLEX).seconds, trained(on, dispatcher=ALL_TO_ALL).seconds

    assert violations(relation) == []


@pytest.mark.parametrize("name", ["count", "ffn_hidden_size", "shared_ffn_hidden_size"])
def test_more_of_experts_is_never_faster_and_never_smaller(name):
    """With a copy for each expert: DeepEP's dispatcher sends fewer where more of a token's experts lie on one rank."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        case = trained(case, dispatcher=ALL_TO_ALL)
        value = getattr(case.model.experts, name)
        larger = with_experts(case, **{name: 2 * value or 4096})
        yield case.seconds, larger.seconds
        yield case.fullest, larger.fullest

    assert violations(relation) == []


def test_more_experts_for_a_token_are_never_faster():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        experts = case.model.experts
        if experts.topk < experts.count:
            more = with_experts(case, topk=experts.topk + 1)
            yield case.seconds, more.seconds
            yield case.fullest, more.fullest

    assert violations(relation) == []


def test_padding_to_a_capacity_is_never_faster():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        times = [with_experts(case, capacity_factor=factor).seconds for factor in (1.0, 1.25, 2.0)]
        yield times[0], times[1]
        yield times[1], times[2]
        yield times[0], case.seconds
        if not case.software.fp8:  # whose products want copies padded, where nothing else makes experts alike
            yield case.seconds, times[0]

    assert violations(relation) == []


def test_a_whole_iteration_of_graphs_is_never_slower():
    def relation(case: Case) -> Iterator[tuple[float, float]]:
        yield trained(case, cuda_graphs=True).seconds, case.seconds

    assert violations(relation) == []


def test_experts_on_more_ranks_take_less_memory():
    """As many ranks, each with half of the experts: their weights and gradients halve, what is sent to them does not
    shrink."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        configuration = case.configuration
        apart = case.configured(expert=2 * configuration.expert)
        if apart is not None:
            for own, fewer in zip(case.estimate.memory, apart.estimate.memory, strict=True):
                yield fewer.parts.weights, own.parts.weights
                yield fewer.parts.gradients, own.parts.gradients

    assert violations(relation) == []


def test_sequences_on_twice_the_ranks_take_half_of_the_activations():
    """Half of the replicas share sequences, and each rank has half of the tokens of as many microbatches."""

    def relation(case: Case) -> Iterator[tuple[float, float]]:
        shared = case.configured(context=2 * case.configuration.context, data=case.configuration.data // 2 or 1)
        if shared is None or shared.configuration.num_gpus != case.configuration.num_gpus:
            return
        for own, less in zip(case.estimate.memory, shared.estimate.memory, strict=True):
            yield 2 * less.parts.activations, own.parts.activations
            yield own.parts.activations, 2 * less.parts.activations

    assert violations(relation) == []
