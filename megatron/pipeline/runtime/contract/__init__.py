"""What the executor asks of stages and updates, and what it tells of a run: imported by all other rooms of the
runtime.
"""
