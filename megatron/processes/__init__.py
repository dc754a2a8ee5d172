"""Processes that the project starts, and how they end: as a whole, and with nothing left behind (no torch)."""
