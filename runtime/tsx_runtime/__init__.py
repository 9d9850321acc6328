"""The server: all code that runs where a model is served.

Importing it has no effect and imports nothing.
"""
