"""`tsx serve`: start, listen, answer, stop."""
