"""Readers of files of samples, without torch."""
