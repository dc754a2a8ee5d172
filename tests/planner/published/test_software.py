"""Which software a run had, and what that does unless the entry says otherwise."""

from dataclasses import replace

import pytest

from megatron.planner.job.software import (
    BIGSCIENCE,
    DEEPSPEED,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_FSDP,
    MEGATRON_V3,
    TORCHTITAN,
    TORCHTITAN_2025,
)
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.entries import Entry, read_entry
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import BPIPE_TABLE_7, VTRAIN, changed
from tests.planner.published.test_sharded_runs import NARAYANAN, predicted
from tests.planner.published.test_sharded_runs import TORCHTITAN as RUNS


def test_names_of_software():
    """A field of the entry comes before the source; Hopper is newer than Megatron-LM v3."""
    assert read_entry(changed(VTRAIN[0], config={"framework": None})).software == MEGATRON_DEEPSPEED
    entry = BPIPE_TABLE_7[0] | {"source": "a blog"}
    named = read_entry(changed(entry, hardware={"software": "Megatron-Core 0.16"}))
    overlapped = replace(MEGATRON_CORE, overlaps_gradients=True, overlaps_weights=True)
    assert named.software == replace(overlapped, flash_attention=True)  # where its kernels run, that is its default
    assert "flash attention, as Megatron-Core has on A100-80" in named.assumed
    volta = {"software": "Megatron-Core 0.16", "gpu": "V100-32"}
    assert read_entry(changed(entry, hardware=volta)).software == overlapped
    said = read_entry(
        changed(entry, hardware=volta, config={"overlap_grad_reduce": False, "overlap_param_gather": False})
    )
    assert said.software == MEGATRON_CORE
    assert read_entry(changed(BPIPE_TABLE_7[0], config={"overlap_grad_reduce": True})).software.overlaps_gradients
    old, new = (read_entry(changed(entry, hardware={"software": None, "gpu": gpu})) for gpu in ("A100-80", "H100"))
    assert old.software == MEGATRON_V3 and new.software.flash_attention and old.assumed and new.assumed
    assert read_entry(changed(entry, config={"flash_attention": True})).software.flash_attention


@pytest.mark.parametrize(
    ("text", "given", "remedy"),
    [
        ("PyTorch FSDP2", None, "give config.fsdp"),
        (
            "DeepSpeed ZeRO-3",
            {"zero": 3, "zero1": None, "p": 1, "t": 8, "d": None, "micro_batch": 1},
            "give config.fsdp",
        ),
        ("Megatron-Core with ring attention", {"cp": 1}, "give config.cp"),
        ("Megatron-Core, CUDA graphs", {"cuda_graph_scope": "full"}, "give config.cuda_graph_scope"),
        ("Megatron-DeepSpeed, optimizer offload", None, "schedule l2l"),
        ("Megatron-Core with MoE", None, "give model.num_experts"),
        ("Megatron-Core, NVFP4", None, "give a run in bf16"),
    ],
)
def test_a_technique_in_a_text_has_to_be_given(text, given, remedy):
    """Else the run would be priced without; either field of a text, and what the entry gives besides is no reason."""
    for part, key in (("config", "framework"), ("hardware", "software")):
        entry = changed(BPIPE_TABLE_7[0], **{part: {key: text}})
        refused = read_entry(entry)
        assert not isinstance(refused, Entry) and repr(text) in refused.reason and remedy in refused.reason
        if given is not None:
            taken = read_entry(changed(entry, config=given))
            assert isinstance(taken, Entry) or "leaves that technique out" not in taken.reason


def test_who_ran_it_otherwise():
    """BigScience's jobs waited for each launch. In bfloat16 DeepSpeed keeps two sets of gradients, and Megatron-LM
    one."""
    base = changed(VTRAIN[0], config={"framework": "Megatron-DeepSpeed"})
    assert read_entry(base | {"source": "BigScience, chronicles-prequel.md"}).software == BIGSCIENCE
    assert read_entry(base).software == MEGATRON_DEEPSPEED != BIGSCIENCE

    def kept(run: dict, precision: str) -> float:
        entry = read_entry(changed(run, config={"precision": precision}))
        return entry.software.training_state(entry.configuration).gradients(1, num_buffers=1)

    assert [kept(base, each) for each in ("fp16", "bf16")] == [2, 6]
    assert [kept(BPIPE_TABLE_7[0], each) for each in ("fp16", "bf16")] == [2, 4]


def test_of_defaults_what_is_priced_is_said():
    """Nothing that the run says itself or does not have: replicas, sharded optimizer, 16 bits, batches that drain."""
    run = changed(BPIPE_TABLE_7[0], hardware={"software": "Megatron-Core 0.16"}, config={"d": 2, "zero1": True})
    reduces, gathers = "reductions over replicas beside the last backward", "gathers over replicas beside the first"
    attention = "flash attention, as Megatron-Core has on A100-80"

    def said(base: dict = run, **config) -> list[str]:
        entry = read_entry(changed(base, config=config))
        assert isinstance(entry, Entry), entry.reason
        return [each for each in (reduces, gathers, attention) if any(text.startswith(each) for text in entry.assumed)]

    assert said() == [reduces, gathers, attention]
    assert said(overlap_grad_reduce=False, overlap_param_gather=False) == [attention]
    assert said(overlap_grad_reduce=False) == [gathers, attention]
    assert said(zero1=False) == [reduces, attention]
    assert said(flash_attention=False) == said(flash_attention=True) == said(precision="fp32") == [reduces, gathers]
    assert said(schedule="2bw", zero1=False) == [attention]
    assert said(d=1, global_batch=64, zero1=False) == [attention]
    assert said(NARAYANAN[0] | {"hardware": NARAYANAN[0]["hardware"] | {"software": "Megatron-Core"}}) == [attention]
    assert said(BPIPE_TABLE_7[0]) == said(RUNS[0]) == []


def test_megatron_core_on_hopper_is_priced_with_flash_attention():
    """As the same run that says so, and much faster than with unfused attention."""
    hardware = {"software": "Megatron-Core", "gpu": "H100"}
    run = changed(BPIPE_TABLE_7[0] | {"source": "a blog"}, hardware=hardware)
    default, flash, unfused = (
        predict(read_entry(changed(run, config={"flash_attention": said})), default_constants()).estimate.seconds
        for said in (None, True, False)
    )
    assert default == flash < 0.8 * unfused


def test_bfloat16_adds_gradients_up_in_fp32():
    """Of an entry that says it, and of MT-NLG, which was trained so; FP16 keeps them in 16 bits."""
    half = BPIPE_TABLE_7[0]
    said = {name: read_entry(changed(half, config={"precision": name})).software for name in ("fp16", "bf16")}
    assert said["fp16"] == MEGATRON_V3 and said["bf16"] == replace(MEGATRON_V3, gradient_bytes=4)
    named = read_entry(changed(half | {"source": "Smith et al. 2022"}, hardware={"software": None}))
    assert named.software == replace(MEGATRON_DEEPSPEED, gradient_bytes=4)


def test_what_splits_weights():
    """torchtitan's is PyTorch's; with Megatron-LM of before Megatron-Core DeepSpeed did it, and only there."""
    assert read_entry(RUNS[0]).software == TORCHTITAN
    assert read_entry(RUNS[1]).software == replace(TORCHTITAN, fuses_elementwise=True)
    old = read_entry(NARAYANAN[0])
    assert old.software == replace(MEGATRON_2021, sharding=DEEPSPEED)
    wide = read_entry(changed(NARAYANAN[0], config={"precision": "bf16"}))
    assert wide.software == replace(MEGATRON_2021, sharding=DEEPSPEED, gradient_bytes=4)
    plain = changed(NARAYANAN[0], config={"zero": 1})
    assert read_entry(plain).software == MEGATRON_2021
    new = changed(NARAYANAN[0], hardware={"software": "Megatron-Core"})
    assert read_entry(new).software.sharding is MEGATRON_FSDP


@pytest.mark.parametrize(
    ("source", "software"),
    [
        ("torchtitan Trainy/WhiteFiber June 2025", TORCHTITAN_2025),
        ("torchtitan benchmarks Dec 2024", TORCHTITAN),
        ("BPipe, 2025", MEGATRON_V3),
    ],
)
def test_the_year_of_a_source(source, software):
    """Of other software none is told apart."""
    assert read_entry(RUNS[0] | {"source": source}).software in (software, replace(software, sharding=DEEPSPEED))


def test_sequences_are_split_beside_tensor_parallelism():
    entry = read_entry(changed(RUNS[2], config={"fsdp": 16, "t": 8}))
    assert entry.configuration.sequence_parallel
    assert "sequence parallelism, as torchtitan has it beside tensor parallelism" in entry.assumed
    assert not read_entry(RUNS[2]).configuration.sequence_parallel
    assert not read_entry(changed(BPIPE_TABLE_7[1], config={"sequence_parallel": None})).configuration.sequence_parallel


def test_recomputation_is_selective_unless_it_is_said():
    silent = read_entry(changed(RUNS[0], config={"recompute": None}))
    assert silent.configuration.recompute is RecomputeScope.ATTENTION
    assert "selective recomputation in its place, as torchtitan has by default" in silent.assumed
    assert read_entry(changed(RUNS[0], config={"recompute": "none"})).configuration.recompute is RecomputeScope.NONE


def test_a_loss_that_is_compiled_takes_less():
    """From 2025 on, and only where the model is compiled."""
    late = [run | {"source": "torchtitan, June 2025"} for run in RUNS[:2]]
    eager, compiled = (predicted(run).estimate.memory[0].parts.workspace for run in late)
    earlier = [predicted(run).estimate.memory[0].parts.workspace for run in RUNS[:2]]
    assert earlier[0] == earlier[1] == eager
    assert eager - compiled == 6 * 2 * 8192 * 128256  # 8 and 2 bytes of a logit
