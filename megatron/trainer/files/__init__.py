"""What files of samples hold, read without torch."""
