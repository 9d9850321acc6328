"""Registry, routing, batching, channels and supervision: the front end without its protocols."""
