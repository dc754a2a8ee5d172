"""Published measurements and the planner's errors against them, and settings with which papers are reproduced."""
