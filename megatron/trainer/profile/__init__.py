"""Measurement of the blocks of a model on this machine: stages, optimizer steps, transfers, all-reduces."""
