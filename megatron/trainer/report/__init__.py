"""What a run says while it trains and leaves behind: log, metrics, timelines, profiles."""
