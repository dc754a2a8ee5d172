"""What the training software does."""

import pytest

from megatron.planner.job.software import has_flash_attention


@pytest.mark.parametrize(
    ("transformer_impl", "attention_backend", "element_bytes", "expected"),
    [
        ("transformer_engine", "auto", 2, True),
        ("transformer_engine", "flash", 2, True),
        ("transformer_engine", "fused", 2, True),
        ("transformer_engine", "unfused", 2, False),
        ("transformer_engine", "local", 2, False),
        ("transformer_engine", "auto", 4, False),
        ("local", "auto", 2, False),
    ],
)
def test_flash_attention(transformer_impl, attention_backend, element_bytes, expected):
    """Transformer Engine's kernels, of 16-bit numbers; whoever asks for another attention gets that."""
    assert has_flash_attention(transformer_impl, attention_backend, element_bytes) is expected
