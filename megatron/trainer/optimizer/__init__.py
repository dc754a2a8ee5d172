"""The optimizer of a run."""
