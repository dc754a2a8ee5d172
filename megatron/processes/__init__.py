"""Processes that the project starts and ends as a whole, without leaving any process behind (no torch)."""
