"""Fine-tuning of captured models through a pipeline of stages (docs/finetuning.md).

It imports megatron.capture, megatron.partition, megatron.pipeline, and those parts of megatron.trainer that do not
depend on a model.
"""
