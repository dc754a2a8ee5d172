"""The estimate against what papers state about memory."""

from functools import cache

import pytest

from megatron.pipeline.check import check_periodic
from megatron.pipeline.schedules import Schedule
from megatron.planner import (
    DEVICES,
    GIB,
    ActivationSetting,
    Architecture,
    Demand,
    RankMemory,
    Recompute,
    TrainingState,
    demand_of,
    estimate_memory,
    judge,
)

SCOPE = {
    "none": Recompute(),
    "attention": Recompute(modules=frozenset({"core_attn"})),
    "layer": Recompute(method="uniform"),
}


def gpt3(num_layers: int, hidden_size: int, heads: int, length: int = 2048, vocabulary: int = 51200) -> Architecture:
    return Architecture.gpt3(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, sequence_length=length,
        vocabulary_size=vocabulary,
    )  # fmt: skip


@cache
def demand(name: str, num_stages: int, num_microbatches: int) -> Demand:
    periodic = Schedule.preset(name, num_stages=num_stages, tied_embeddings=num_stages > 1).build_periodic(
        num_microbatches
    )
    return demand_of(periodic.unroll(1), check_periodic(periodic))


def setting(tensor: int, size: int, scope: str) -> ActivationSetting:
    return ActivationSetting(
        tensor=tensor, micro_batch_size=size, sequence_parallel=tensor > 1, recompute=SCOPE[scope]
    )  # fmt: skip


def estimate(
    shape: Architecture, degrees: tuple[int, int, int], size: int, scope: str, schedule: str, batch: int, *,
    keeps_copies: bool = False,
) -> tuple[RankMemory, ...]:  # fmt: skip
    """In FP16 with 20 bytes a parameter (BPipe, section 1), its optimizer's part split by ZeRO-1 (Table 2)."""
    t, p, d = degrees
    return estimate_memory(
        shape,
        setting(t, size, scope),
        TrainingState(gradient_bytes=2, distributed_optimizer=True, data=d, keeps_gradient_copies=keeps_copies),
        demand(schedule, p, batch // (size * d)),
        layers=[shape.num_layers // p] * p,
    )


def test_imbalance_of_gpt3_13b():
    """BPipe's Figure 3: 37 GiB between the first and the last of 8 stages without recomputation, within 5%."""
    memory = estimate(gpt3(40, 5120, 40), (1, 8, 1), 1, "none", "flush", 32)
    assert (memory[0].total - memory[-1].total) / GIB == pytest.approx(37, rel=0.05)


@pytest.mark.full
def test_balance_of_gpt3_134b():
    """BPipe's Figure 8: more than 25 GiB between stages without balance, at most 10 GiB with it (12 stages, t=4). Taken
    is what the allocator comes to hold, with the step's copies.
    """
    shape = gpt3(84, 11520, 120)
    spread = {}
    for name in ("flush", "bpipe"):
        totals = [rank.parts.held / GIB for rank in estimate(shape, (4, 12, 1), 2, "attention", name, 192)]
        spread[name] = max(totals) - min(totals)
    assert spread["flush"] > 25 and spread["bpipe"] <= 10


def test_models_of_2_billion_on_small_gpus():
    """PipeDream-2BW, 5.2 and 5.3: on 8 V100 of 16 GB, 8 stages, a batch of 64 and recomputation, flush and 2bw train
    the GPT and the BERT of 2.2 billion parameters, and GPipe the BERT, with 2bw above flush and GPipe above 2bw.

    GPipe's GPT ran out of memory there: every microbatch's logits wait on the last stage. It is the fullest here too,
    but the estimate leaves it 1.8 GiB: megatron.core keeps no 16-bit logits beside the softmax, as its ancestors did.
    """
    limit, spare, free = DEVICES["V100-16"].memory_gib, {}, {}
    for model, vocabulary in (("GPT", 50_304), ("BERT", 30_592)):
        shape = gpt3(32, 2304, 32, length=512, vocabulary=vocabulary)
        for schedule in ("flush", "2bw", "gpipe"):
            memory = estimate(shape, (1, 8, 1), 1, "layer", schedule, 64, keeps_copies=True)
            verdict = judge(memory, limit)
            spare[model, schedule], free[model, schedule] = verdict.spare_gib, verdict.free_gib
        assert spare[model, "flush"] > spare[model, "2bw"] > spare[model, "gpipe"] > 0
    assert spare["BERT", "gpipe"] - spare["GPT", "gpipe"] == pytest.approx(3, abs=0.5)
    assert free["GPT", "gpipe"] == pytest.approx(1.8, abs=0.1)
