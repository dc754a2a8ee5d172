"""What a rank builds before it trains: process groups, its place in the pipeline, the engine."""
