"""What a search is for: the least time, money or memory."""

SUPERLATIVES = {"time": "fastest", "cost": "cheapest", "memory": "smallest"}
OBJECTIVES = tuple(SUPERLATIVES)
"""time: sequences a second, of which a batch of given size makes seconds an iteration. cost: money for a sequence;
where all GPUs are used, that ranks as time. memory: of the fullest GPU; of equals, the fastest."""
