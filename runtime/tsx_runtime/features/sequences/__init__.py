"""Sequences for stateful models: one worker answers the requests of a sequence in their order.

`sequenceBatching` in model-config.yaml turns them on (docs/guides/serving-modes.md).
"""
