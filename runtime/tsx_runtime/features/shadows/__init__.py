"""Shadows: copies of requests for a version whose answers are only compared."""
