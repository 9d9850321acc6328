"""What a worker reports: printed lines, profiles, memory, tracebacks."""
