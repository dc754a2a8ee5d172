"""The commands of one process: what `megatron-pipeline COMMAND`, or tools/COMMAND.py in a checkout, runs."""
