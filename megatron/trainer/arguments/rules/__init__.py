"""Which values fit together, a file for each subject; `validation` has the order."""
