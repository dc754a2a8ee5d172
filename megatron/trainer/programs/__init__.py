"""The training programs, one process per rank: `torchrun -m megatron.trainer.programs.NAME`, or NAME.py."""
