"""Before a job's process group forms: which process becomes which rank, and which weights and engines go together."""
