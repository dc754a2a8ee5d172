"""The memory model of the planner: the bytes that ranks and hosts need, by part."""
