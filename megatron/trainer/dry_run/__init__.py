"""`--dry-run`: a job without its cluster."""
