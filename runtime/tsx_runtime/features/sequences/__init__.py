"""Sequences of stateful models: one worker answers the requests of a sequence, in order.

`sequenceBatching` in model-config.yaml turns it on (docs/guides/serving-modes.md).
"""
