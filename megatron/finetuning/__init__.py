"""Fine-tuning of captured models through a pipeline of stages (docs/finetuning.md).

The imports go to megatron.capture, megatron.partition, megatron.pipeline, and the parts of megatron.trainer that know
no model.
"""
