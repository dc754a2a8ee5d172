"""The runtime: executes pipeline programs on real ranks.

`engine.PipelineEngine` drives batches, `executor.Executor` executes the rows of a program, `channels` carry tensors
between stages, `versions` keep the weight versions, `stage` says what a model must bring.
"""
