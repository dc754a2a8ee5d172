"""The part `config` of an entry: in the words of Megatron-LM and of the papers, and in single precision."""

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


@pytest.mark.parametrize("key", ["precision", "dtype"])
def test_single_precision(key):
    """Four bytes an element, and the rate of FP32."""
    half = read_entry(changed(BPIPE_TABLE_7[0], config={key: "fp16"}))
    single = read_entry(changed(BPIPE_TABLE_7[0], config={key: "FP32"}))
    assert (half.software.element_bytes, single.software.element_bytes) == (2, 4)
    assert not single.software.fuses_softmax
    mixed = read_entry(changed(BPIPE_TABLE_7[0], config={key: "bf16, gradients in fp32"}))
    assert mixed.software == half.software
    assert single.seconds / half.seconds == pytest.approx(312 / 19.5)  # the same MFU
    estimates = [predict(entry, default_constants()).estimate for entry in (half, single)]
    assert estimates[1].seconds > 8 * estimates[0].seconds
    assert 0 < estimates[1].mfu < 1
