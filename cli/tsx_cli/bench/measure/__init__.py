"""Measuring one configuration: server, latency, memory, accuracy."""
