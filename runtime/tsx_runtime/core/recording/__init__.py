"""Recordings of requests, written to disk within limits."""
