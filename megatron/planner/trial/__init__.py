"""Real runs of configurations: started, watched, classified, and put beside what was predicted. No torch in here."""
