"""The uvicorn protocol that sends predictions to the queue without ASGI."""
