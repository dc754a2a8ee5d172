"""The part `config` of an entry: in the words of Megatron-LM and of the papers, and in other precisions."""

from dataclasses import replace

import pytest

from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.published.entries import read_entry
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import BPIPE_TABLE_7, changed


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"config": {"v": None, "sequence_parallel": None, "zero1": None}}, {}),
        ({"hardware": {"gpus_per_node": None}}, {}),
        ({"config": {"schedule": "1F1B"}}, {"schedule": "flush"}),
        ({"config": {"v": 5}}, {"schedule": "interleaved", "virtual": 5}),
        ({"config": {"v": 5, "schedule": "Interleaved 1F1B"}}, {"schedule": "interleaved", "virtual": 5}),
        ({"config": {"schedule": "PipeDream-2BW"}}, {"schedule": "2bw"}),
        ({"config": {"recompute": "full"}}, {"recompute": RecomputeScope.LAYER}),
        ({"config": {"recompute": "selective"}}, {"recompute": RecomputeScope.ATTENTION}),
        ({"config": {"recompute": "layer (recalled)"}}, {"recompute": RecomputeScope.LAYER}),
        ({"config": {"micro_batch": "2"}}, {"micro_batch_size": 2}),
        ({"config": {"d": None}, "hardware": {"gpus": 32}}, {"data": 2}),
    ],
)
def test_reads_a_configuration_in_other_words(parts, expected):
    """Null is as not given; Megatron-LM's and the papers' names are known."""
    configuration = read_entry(changed(BPIPE_TABLE_7[0], **parts)).configuration
    assert {name: getattr(configuration, name) for name in expected} == expected
    assert (configuration.tensor, configuration.pipeline, configuration.data) == (1, 16, 2)


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ({"global_batch": 2}, 1),  # one sequence for each replica
        ({"global_batch": 32, "schedule": "2bw"}, 1),  # as many microbatches as stages, at least
        ({"t": 1, "p": 4, "v": 5, "d": 2, "global_batch": 8}, 1),  # a multiple of the stages
        ({"global_batch": 4}, None),
        ({"global_batch": 64, "schedule": "2bw"}, None),
        ({"global_batch": None}, None),
    ],
)
def test_a_microbatch_that_follows_is_filled_in_and_said(parts, size):
    """Where the batch and the schedule leave one choice; else it has to be given."""
    hardware = {"gpus": None, "gpus_per_node": None}
    found = read_entry(changed(BPIPE_TABLE_7[0], config={"micro_batch": None} | parts, hardware=hardware))
    if size is None:
        assert found.reason == "config.micro_batch is not given; give its sequences"
    else:
        assert found.configuration.micro_batch_size == size
        assert any(text.startswith(f"microbatch {size}, the only one") for text in found.assumed)


def test_the_fused_softmax_is_there_as_the_entry_says():
    """Of BPipe's Table 7: 52 heads on a rank, and 13."""

    def seconds(run: dict, **said: bool) -> float:
        return predict(read_entry(run | said), default_constants()).estimate.seconds

    has, has_not = BPIPE_TABLE_7[1], BPIPE_TABLE_7[3]
    assert seconds(has, fused_softmax_kernel_available=True) == seconds(has)
    assert seconds(has_not, fused_softmax_kernel_available=False) == seconds(has_not)
    assert seconds(has, fused_softmax_kernel_available=False) > seconds(has)
    wrong = read_entry(has_not | {"fused_softmax_kernel_available": True})
    assert "a microbatch has 13 heads on a rank, of which the kernel takes multiples of 4; correct it" in wrong.reason


def test_flash_attention_takes_no_single_precision():
    found = read_entry(changed(BPIPE_TABLE_7[0], config={"precision": "fp32", "flash_attention": True}))
    assert "config.flash_attention is True in fp32" in found.reason and "; leave it out" in found.reason


@pytest.mark.parametrize("key", ["precision", "dtype"])
def test_single_precision(key):
    """Four bytes an element, and the rate of FP32."""
    half = read_entry(changed(BPIPE_TABLE_7[0], config={key: "fp16"}))
    single = read_entry(changed(BPIPE_TABLE_7[0], config={key: "FP32"}))
    assert (half.software.element_bytes, single.software.element_bytes) == (2, 4)
    assert not single.software.fuses_softmax
    mixed = read_entry(changed(BPIPE_TABLE_7[0], config={key: "bf16, gradients in fp32"}))
    assert mixed.software == replace(half.software, gradient_bytes=4)
    assert single.seconds / half.seconds == pytest.approx(312 / 19.5)  # the same MFU
    estimates = [predict(entry, default_constants()).estimate for entry in (half, single)]
    assert estimates[1].seconds > 8 * estimates[0].seconds
    assert 0 < estimates[1].mfu < 1


HOPPER = {
    "hardware": {"gpu": "H100", "software": "Megatron-Core", "system": "DGX H100"},
    "model": {"hidden": 10240, "heads": 80},
}  # fmt: skip


@pytest.mark.parametrize("word", ["fp8", "FP8", "float8", "fp8 (hybrid, delayed scaling)"])
def test_fp8(word):
    """Linears of layers in 8 bits, the rest as in bf16; the same MFU is of the same peak, that of 16 bits."""
    half, eighth = (
        read_entry(changed(BPIPE_TABLE_7[0], **HOPPER, config={"precision": each})) for each in ("bf16", word)
    )
    assert (half.software.fp8, eighth.software.fp8) == (False, True)
    assert eighth.software.element_bytes == 2 and eighth.seconds == half.seconds
    faster, slower = (predict(entry, default_constants()).estimate.seconds for entry in (eighth, half))
    assert slower / 2 < faster < slower / 1.2


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"hardware": {"software": "Megatron-LM v3"}}, "config.precision is 'fp8', and the software of this run"),
        ({"hardware": HOPPER["hardware"] | {"gpu": "A100-80"}}, "A100-80 has no units for FP8; give a GPU that has"),
        (HOPPER | {"model": {"hidden": 9984, "heads": 104, "ffn": 39944}}, "feed-forward layer are 39944, and"),
    ],
)
def test_fp8_that_cannot_be(parts, reason):
    entry = read_entry(changed(BPIPE_TABLE_7[0], **parts | {"config": {"precision": "fp8"}}))
    told = getattr(entry, "reason", None)
    if told is None:
        with pytest.raises(ValueError) as found:
            predict(entry, default_constants())
        told = str(found.value)
    assert reason in told and "; " in told
