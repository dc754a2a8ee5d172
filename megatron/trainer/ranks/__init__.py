"""What the ranks of a job do alike: seeds, agreement, stop requests, errors."""
