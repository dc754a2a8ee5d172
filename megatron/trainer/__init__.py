"""Training: command line, initialisation, data, models, the loop, checkpoints.

Entry point: `run.pretraining.pretrain`.
"""
