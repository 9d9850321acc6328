"""`tsx batch`: a model over many inputs, without a server."""
