"""Weights that live on the host (L2L): what is fetched, kept for a moment, and stepped there."""
