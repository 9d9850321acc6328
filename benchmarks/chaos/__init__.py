"""Faults of a real server under steady load, and the proof that nothing was lost."""
