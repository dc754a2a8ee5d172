"""Weights that live on the host (L2L): the store, fetches to the device, gradients, and the optimizer on the host."""
