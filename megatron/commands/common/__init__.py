"""What several commands share: how a command line is read and ends, and the flags of schedules and their times."""
