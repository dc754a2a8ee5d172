"""The commands that run in one process: `megatron-pipeline COMMAND`, or tools/COMMAND.py in a checkout."""
