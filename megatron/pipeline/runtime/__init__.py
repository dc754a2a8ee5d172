"""The runtime: executes pipeline programs on real ranks.

`engine.PipelineEngine` drives batches. `executor.Executor` executes the rows of a program. `channels` carries tensors
between stages, `versions` keeps the weight versions, and `stage` defines the interface that a model must implement.
"""
