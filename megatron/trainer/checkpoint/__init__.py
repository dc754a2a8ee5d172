"""The parts of a checkpoint, one file each: where it lies and whether it is whole (`directory`), what it holds
(`state`, `optimizer_state`, `run_state`), what it was trained with, and whether that is the model that is wanted
(`arguments`), how it is written (`writer`) and read (`loader`, `unpickling`), and whose the directory is (`ownership`,
`heartbeat`). `megatron.trainer.checkpoint.checkpoint` joins them.
"""
