"""The ASGI apps of predictions, for all requests that the fast lane cannot handle."""
