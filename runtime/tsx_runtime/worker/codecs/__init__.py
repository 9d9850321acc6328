"""Codecs: they decode request bodies for a handler, and encode its results as response bodies."""
