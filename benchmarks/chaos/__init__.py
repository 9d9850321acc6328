"""Faults of a real server under steady load, with a check that no request is lost."""
