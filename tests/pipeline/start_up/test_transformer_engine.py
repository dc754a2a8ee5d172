"""Which Transformer Engines may fuse."""

from megatron.pipeline.start_up.late_weights import engine_keeps_main_grad


def test_versions_of_transformer_engine_that_keep_their_gradient_buffer():
    """From 2.6 on a weight's `main_grad` is looked up in the backward; numbers are compared as numbers."""
    kept = ["0.0", "1.13.0", "2.0", "2.5.0", "2.5.0+8f3a1c2", "2.5.0.post1", "2.6.0.dev0"]
    looked_up = ["2.6.0", "2.6.0+abc", "2.10.0", "2.11", "3.0"]
    assert all(map(engine_keeps_main_grad, kept))
    assert not any(map(engine_keeps_main_grad, looked_up))
