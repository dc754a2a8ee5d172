"""Before a job's process group forms: errors that all ranks tell alike, and which process becomes which rank."""
