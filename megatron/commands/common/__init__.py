"""Code that several commands share: parsers, exit statuses, and the flags of schedules and their times."""
