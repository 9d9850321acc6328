"""The fast lane: a uvicorn protocol that submits predictions to queues without ASGI."""
