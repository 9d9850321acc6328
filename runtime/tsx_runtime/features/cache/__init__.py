"""The reply cache: repeats a version's answers to equal requests, without its workers.

`cache` in model-config.yaml, or in the settings of a model, turns it on (docs/guides/caching.md).
"""
