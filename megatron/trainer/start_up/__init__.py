"""What a rank builds before it trains: process groups, its part of the model with the optimizer, the engine."""
