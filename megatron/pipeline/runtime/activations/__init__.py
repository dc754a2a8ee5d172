"""Activations between forward and backward: saved, counted, moved to the pair stage and back."""
