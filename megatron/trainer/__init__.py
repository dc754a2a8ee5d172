"""Training: command line, initialisation, data, models, the loop, checkpoints. Entry point: `loop.pretrain`."""
