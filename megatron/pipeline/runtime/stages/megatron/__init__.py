"""Chunks of megatron.core as stages, and megatron.core's optimizers as their update."""
