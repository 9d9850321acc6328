"""The routes of asynchronous requests and stored responses that are FastAPI routes."""
