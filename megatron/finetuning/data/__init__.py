"""Data of fine-tuning: files of samples, and the order in which a run takes them. Knows no model."""
