"""Results of the flags before anything is built: the planner's records, programs, and the rank of each process."""
