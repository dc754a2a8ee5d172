"""Published measurements, and what is compared with them or only reproduces papers."""
