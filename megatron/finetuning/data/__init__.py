"""Conversion of files of samples into rows of tensors, with one module for each kind of task, and into microbatches.

transformers is not imported here: each task receives its tokenizer or image processor as an argument.
"""
