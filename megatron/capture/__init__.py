"""Capture: any torch or Hugging Face model with a loss as a graph of operators, cut into stages (docs/capture.md).

Imports torch, and nothing of megatron.core or transformers.
"""
