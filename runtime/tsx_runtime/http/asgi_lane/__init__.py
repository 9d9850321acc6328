"""Predictions over ASGI: what the fast lane does not take."""
