"""Mirrored traffic: copies of requests to a second version, and the comparison of the answers."""
