"""Continuous batching: requests join and leave a batch between two calls of the handler.

`continuousBatching` in model-config.yaml turns it on (docs/guides/serving-modes.md).
"""
