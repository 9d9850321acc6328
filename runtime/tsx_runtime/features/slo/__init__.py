"""Latency targets: batches that keep the target, and refusals of requests that would be late.

`slo` in model-config.yaml, in a registration or in the settings of a model sets one
(docs/guides/slo.md).
"""
