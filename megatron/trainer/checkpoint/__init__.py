"""The parts of a checkpoint, one file each: where it lies (`directory`), whether it is whole (`integrity`), what it
holds (`state`, `random_state`), what it was trained with (`arguments`), whether that is the model that is wanted
(`comparison`), how it is written (`writer`) and how all ranks come to one verdict (`agreement`).
`megatron.trainer.checkpoint.checkpoint` joins them.
"""
