"""Stages that are model chunks of megatron.core, and weight updates over megatron.core's optimizers."""
