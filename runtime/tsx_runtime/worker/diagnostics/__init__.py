"""Diagnostics of a worker: printed lines, profiles, memory, tracebacks."""
