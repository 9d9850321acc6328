"""Routes of asynchronous requests and stored answers, besides those of `http/asgi_lane/jobs.py`."""
