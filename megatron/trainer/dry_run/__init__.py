"""`--dry-run`: the checks of a job without its cluster."""
