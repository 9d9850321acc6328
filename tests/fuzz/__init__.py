"""Fuzzing of the code that parses untrusted bytes (`scripts/fuzz-wire`)."""
