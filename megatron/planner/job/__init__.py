"""What is planned: a configuration, its cluster and devices, the software, and what is expected of it."""
