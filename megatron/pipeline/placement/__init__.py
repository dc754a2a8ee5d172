"""The placement of ranks on GPUs: mappings from slots (node, GPU) to logical ranks, their costs, and pictures of them.

Pure Python: neither torch nor megatron.core. docs/placement.md shows how placements are used.
"""
