"""Latency targets: batch sizes that meet the target, and early refusals of late requests.

`slo` in model-config.yaml, in a registration or in the settings of a model sets a target
(docs/guides/slo.md).
"""
