"""Conversion of files of samples into rows of tensors, with one module for each kind of task, and into microbatches.

Each task receives its tokenizer or processor as an argument.
"""
