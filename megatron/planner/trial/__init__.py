"""Real runs of configurations: started, watched, classified, and compared with predictions. No torch in here."""
