"""Saving and loading of checkpoints.

The modules are about the location and completeness of a checkpoint (`directory`), its content (`state`,
`optimizer_state`), the arguments of its run and the comparison of its model (`arguments`), writing (`writer`), reading
(`loader`, `unpickling`), and the ownership of a directory (`ownership`). `megatron.trainer.checkpoint.checkpoint` has
the functions that use them.
"""
