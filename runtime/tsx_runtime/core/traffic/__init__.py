"""Which version of a model serves a request."""
