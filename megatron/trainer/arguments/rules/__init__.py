"""Which values fit together, a file for each subject; the package above has the order."""
