"""A training run, from the command line to the last checkpoint."""
