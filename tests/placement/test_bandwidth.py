"""Appendix B of the BPipe paper: equations 4 to 12, and the numbers that the paper states."""

import pytest

from megatron.placement.bandwidth import (
    ModelShape,
    RecomputeScope,
    estimated_forward_seconds,
    required_bandwidth,
    required_steady_bandwidth,
    saved_activation_bytes,
)
from tests.placement.examples import gpt3_96b

NONE, ATTENTION, LAYER = RecomputeScope
FASTEST = gpt3_96b(tensor=4, pipeline=8, micro_batch_size=2)  # appendix B: "the fastest configuration for GPT-3 96B"
FORWARD = 143.37e-3  # Table 3
GPT3_13B = ModelShape(
    num_layers=40, num_attention_heads=40, hidden_size=5120, sequence_length=2048, micro_batch_size=1, pipeline=8,
    tensor=1,
)  # fmt: skip
SMALL = ModelShape(
    num_layers=6, num_attention_heads=5, hidden_size=20, sequence_length=8, micro_batch_size=7, pipeline=2, tensor=5
)  # fmt: skip


def test_bytes_of_the_paper():
    """Equation 5: 3.48 GB for GPT-3 96B with t=4, p=8, b=2 and the attention recomputed."""
    assert round(saved_activation_bytes(FASTEST, ATTENTION) / 1e9, 2) == 3.48


def test_bandwidths_of_the_paper():
    """Equations 8 and 7: 24.25 GB/s with the attention recomputed, 100.31 GB/s with nothing."""
    assert round(required_bandwidth(FASTEST, ATTENTION, forward_seconds=FORWARD), 2) == 24.25
    assert round(required_bandwidth(FASTEST, NONE, forward_seconds=FORWARD), 2) == 100.31


@pytest.mark.parametrize(("scope", "transfer_ms"), [(NONE, 22.48), (ATTENTION, 7.63), (LAYER, 0.58)])
def test_transfers_of_table_4_are_possible_on_nvlink(scope, transfer_ms):
    """GPT-3 13B, p=8: the bytes over the measured times are below NVLink's 300 GB/s, at least half of it, and above
    what a forward of 36.32 ms needs."""
    num_bytes = saved_activation_bytes(GPT3_13B, scope)
    measured = num_bytes / (transfer_ms * 1e-3) / 1e9
    assert 150 < measured < 300
    assert measured > required_bandwidth(GPT3_13B, scope, forward_seconds=36.32e-3)


def test_equations_by_hand():
    """L=6, H=5, h=20, l=8, b=7, p=2, t=5: Llbh/p = 3360, 5Hl/h = 10."""
    assert saved_activation_bytes(SMALL, NONE) == pytest.approx(3360 / 5 * (34 + 10), rel=1e-14)
    assert saved_activation_bytes(SMALL, ATTENTION) == pytest.approx(34 * 3360 / 5, rel=1e-14)
    assert saved_activation_bytes(SMALL, LAYER) == 2 * 3360
    for scope in RecomputeScope:
        need = required_bandwidth(SMALL, scope, forward_seconds=2.0)
        assert need == pytest.approx(saved_activation_bytes(SMALL, scope) / 2.0 / 1e9)
        assert required_steady_bandwidth(SMALL, scope, forward_seconds=2.0) == pytest.approx(need * 2 / 3)


def test_what_the_paper_leaves_out_by_hand():
    """Without sequence parallelism every tensor rank holds 10 of the 34 bytes (Korthikanti, equation 2); in FP32 the
    masks stay at a byte; two stages on a rank save half as much each."""
    whole = ModelShape(**{**vars(SMALL), "sequence_parallel": False})
    assert saved_activation_bytes(whole, NONE) == pytest.approx(3360 * (10 + 24 / 5 + 5 * 2 / 5))
    wide = ModelShape(**{**vars(SMALL), "element_bytes": 4})
    assert saved_activation_bytes(wide, NONE) == pytest.approx(3360 / 5 * (66 + 9 * 2))
    assert saved_activation_bytes(wide, LAYER) == 4 * 3360
    halved = ModelShape(**{**vars(SMALL), "num_virtual_stages": 2})
    for scope in RecomputeScope:
        assert saved_activation_bytes(halved, scope) == pytest.approx(saved_activation_bytes(SMALL, scope) / 2)


def test_forward_estimate():
    """GPT-3 96B at 177 TFLOP/s takes the measured 143.37 ms within 1%; by hand for the small shape."""
    assert estimated_forward_seconds(FASTEST, teraflops=177) == pytest.approx(FORWARD, rel=0.01)
    operations = 6 * (24 * 8 * 7 * 20 * 20 + 4 * 7 * 8 * 8 * 20) / (2 * 5)
    assert estimated_forward_seconds(SMALL, teraflops=2) == pytest.approx(operations / 2e12)


def test_bad_numbers_are_refused():
    """Times, rates and shapes are positive."""
    with pytest.raises(ValueError, match="0 is not positive"):
        required_bandwidth(SMALL, NONE, forward_seconds=0)
    with pytest.raises(ValueError, match="num_layers 0 is below 1"):
        ModelShape(**{**vars(SMALL), "num_layers": 0})
