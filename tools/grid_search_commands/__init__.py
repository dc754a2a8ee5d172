"""The commands of tools/grid_search.py, a file each."""
