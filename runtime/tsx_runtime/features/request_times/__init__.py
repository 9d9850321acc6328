"""The times of single requests, by their ids, and the slowest ones."""
