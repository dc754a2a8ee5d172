"""The construction of a run on a rank: process groups, its part of the model with the optimizer, and the engine."""
