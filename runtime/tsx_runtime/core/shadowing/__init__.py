"""Mirrored traffic: copies of requests to a second version, and how its answers compare."""
