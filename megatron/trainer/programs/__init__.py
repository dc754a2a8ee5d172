"""The training programs, a process a rank: `torchrun -m megatron.trainer.programs.NAME`, or NAME.py in a checkout."""
