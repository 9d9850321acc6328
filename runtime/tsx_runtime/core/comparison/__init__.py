"""Mirrored traffic: copies of requests for a second version, and the comparison of responses."""
