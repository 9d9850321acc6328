"""The FastAPI routers of the management, metrics and inference APIs."""
