"""Fuzzing of what reads bytes of strangers: `scripts/fuzz-wire`. The seeds are replayed as a
test.
"""
