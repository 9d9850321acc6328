"""Fuzzing of the code that reads bytes of strangers (`scripts/fuzz-wire`)."""
