"""The choice of the version of a model that serves a request."""
