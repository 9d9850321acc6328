"""The FastAPI routes of asynchronous requests and of stored responses."""
