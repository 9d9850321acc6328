"""Workflows: graphs of models and functions that answer one request together."""
