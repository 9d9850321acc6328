"""Asynchronous answers: stored requests whose answers are fetched or sent to a callback."""
