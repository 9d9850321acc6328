"""Asynchronous requests, and requests with an Idempotency-Key: their answers are stored."""
