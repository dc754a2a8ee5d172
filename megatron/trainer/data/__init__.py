"""Tokenizers, datasets, and the microbatches that stages compute on."""
