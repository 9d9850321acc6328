"""Codecs: request bodies to a handler's input, and its results to response bodies."""
