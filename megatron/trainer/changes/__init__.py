"""What a run changes while it trains: which layers are frozen, and how its ranks share the others
(PipeTransformer).
"""
