"""Searches with ranks that share sequences or experts."""

from dataclasses import replace

import pytest

from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.memory.architecture import Experts
from megatron.planner.search import Outcome, Training
from tests.planner.search.helper import a100, gpt3, run

FLASH = replace(MEGATRON_CORE, flash_attention=True)
TRAINING = Training(saves_scores=False, fuses_softmax=False)
SMALL = {"global_batch_size": 32, "schedules": ("flush", "2bw", "interleaved"), "num_simulated": 1}
LONG = replace(gpt3(16, 4096, 32), sequence_length=32768, num_positions=32768)
MOE = replace(gpt3(16, 4096, 32), linear_biases=False, experts=Experts(count=8, topk=2, ffn_hidden_size=8192))


def search(model, nodes: int = 2, **space: object) -> Outcome:
    return run(model, a100(nodes), FLASH, TRAINING, **SMALL | space)


@pytest.mark.full
def test_nothing_is_shared_unless_asked_for():
    outcome = search(gpt3(16, 4096, 32))
    assert {(each.choice.context, each.choice.expert) for each in outcome.kept} == {(None, None)}


def test_sequences_are_shared_where_that_is_considered():
    """Of few long sequences the best shares them, where 2 tensor ranks at most share layers. Every configuration uses
    all GPUs, and what is kept without sharing is what a search without finds."""
    few = {"global_batch_size": 4, "tensor": (1, 2)}
    alone, shared = search(LONG, **few), search(LONG, context=(1, 2, 4), **few)
    assert {each.choice.context for each in shared.kept} == {1, 2, 4}
    assert all(each.estimate.configuration.num_gpus == 16 for each in shared.kept)
    assert {each.choice.rank_mapping for each in shared.kept if each.choice.context > 1} <= {
        "standard",
        "pair-adjacent",
    }
    kept = {replace(each.choice, context=None) for each in shared.kept if each.choice.context == 1}
    plain = {each.choice for each in alone.kept if each.choice.rank_mapping != "optimized"}
    assert plain <= kept
    assert shared.best.choice.context > 1 and shared.best.estimate.seconds < alone.best.estimate.seconds


@pytest.mark.full
def test_experts_are_shared_where_that_is_considered():
    """More ranks with different experts take less memory each; tensor ranks have parts of the same unless etp is 1."""
    outcome = search(MOE, expert=(1, 2, 8), early_stopping=False)
    memory = {each.choice: each.memory_gib for each in outcome.kept if each.choice.expert == 1}
    more = [each for each in outcome.kept if each.choice.expert > 1 and replace(each.choice, expert=1) in memory]
    assert {each.choice.expert for each in more} == {2, 8}
    assert all(each.memory_gib < memory[replace(each.choice, expert=1)] for each in more)
    whole = search(MOE, expert=(8,), expert_tensor=1, tensor=(2,))
    split = search(MOE, expert=(8,), tensor=(2,))
    replicas = [{each.estimate.configuration.expert_replicas for each in found.kept} for found in (whole, split)]
    assert {each.choice.expert_tensor for each in whole.kept} == {1} and replicas == [{1, 2}, {1}]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "space", "reason"),
    [
        (LONG, {"context": (1, 3)}, "ranks with the same layers do not divide by cp 3"),
        (replace(LONG, sequence_length=6), {"context": (1, 4)}, "sequences of 6 do not divide into two parts for each"),
        (MOE, {"expert": (1, 3)}, "expert 3 times expert_tensor 1 does not divide the"),
        (MOE, {"expert": (1, 16)}, "8 experts do not divide over 16 ranks"),
        (LONG, {"context": (2,), "schedules": ("flush", "l2l")}, "l2l is not modelled with ranks that share"),
        (MOE, {"schedules": ("flush", "l2l")}, "l2l is not modelled with ranks that share sequences or experts"),
    ],
)
def test_reasons(model, space, reason):
    outcome = search(model, **space)
    assert any(reason in each.reason for each in outcome.rejected), {each.reason for each in outcome.rejected}


def test_unfused_attention_takes_whole_sequences():
    """Where it trains, or where schedules in halves take other layers."""
    unfused = run(LONG, a100(1), MEGATRON_CORE, context=(1, 2), **SMALL)
    assert {each.choice.context for each in unfused.kept} <= {1}
    assert any("context parallelism over 2 ranks needs flash attention" in each.reason for each in unfused.rejected)
    halves = replace(TRAINING, saves_scores_with_halves=True)
    split = run(LONG, a100(1), FLASH, halves, context=(1, 2), **SMALL | {"schedules": ("flush", "zb-h1")})
    assert any("flash attention, which the layers of zb-h1 do not have" in each.reason for each in split.rejected)
    assert {each.choice.context for each in split.kept if each.choice.schedule == "zb-h1"} <= {1}


@pytest.mark.full
def test_copies_beside_another_microbatch_where_megatron_core_takes_them():
    """On one stage, or interleaved, with several sizes of ep; whole layers are not recomputed. They are never slower
    than the same without."""
    merged = replace(FLASH, overlaps_experts=True)
    space = SMALL | {"expert": (1, 2, 8), "early_stopping": False, "pipeline": (1, 2)}
    outcome, without = (run(MOE, a100(2), software, TRAINING, **space) for software in (merged, FLASH))
    assert outcome.kept and {each.choice.expert for each in outcome.kept} == {2, 8}
    assert {(each.choice.pipeline, each.choice.schedule) for each in outcome.kept} == {(1, "flush"), (2, "interleaved")}
    assert not any(each.choice.recompute.value == "layer" for each in outcome.kept)
    times = {each.choice: each.estimate.seconds for each in without.kept}
    same = [each for each in outcome.kept if each.choice in times]
    assert same and all(each.estimate.seconds <= times[each.choice] for each in same)
    reasons = {each.reason for each in outcome.rejected}
    assert "copies of tokens beside another microbatch take interleaved, not flush" in reasons
    assert "copies of tokens beside another microbatch take ep above 1" in reasons
