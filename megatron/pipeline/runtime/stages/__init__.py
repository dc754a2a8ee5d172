"""Kinds of stages, each with its updates: any module, chunks of megatron.core, and stages that sleep."""
