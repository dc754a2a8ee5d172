"""The capture of any torch or Hugging Face model with a loss as a graph of operators, and its cut into stages
(docs/capture.md).

This folder imports torch, but neither megatron.core nor transformers.
"""
