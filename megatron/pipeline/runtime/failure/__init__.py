"""When one rank fails: who says why, and how all others end."""
