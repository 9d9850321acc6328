"""Requests of many rows, split over batches and workers (`splitRows`)."""
