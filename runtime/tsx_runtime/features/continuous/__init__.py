"""Continuous batching: requests join and leave a batch between calls of the handler."""
