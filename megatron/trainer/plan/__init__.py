"""What follows from flags before anything is built: the planner's records, programs, where ranks go."""
