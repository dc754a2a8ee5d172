"""The commands of grid_search.py, a file each."""
