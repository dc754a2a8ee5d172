"""Readers of sample files and weight files."""
