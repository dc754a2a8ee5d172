"""The reports of a run: log, metrics and profiles."""
