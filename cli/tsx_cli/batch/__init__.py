"""The command `tsx batch`: a model over many inputs, without a server."""
