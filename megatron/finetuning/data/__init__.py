"""From files of samples to rows of tensors, a file for each kind of task, and to the microbatches of a run.

transformers is not imported here: a task is given its tokenizer or image processor.
"""
