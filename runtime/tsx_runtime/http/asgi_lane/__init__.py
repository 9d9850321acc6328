"""Predictions over ASGI: requests that the fast lane does not take."""
