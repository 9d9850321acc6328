"""The reply cache, which answers equal requests to a version without its workers.

`cache` in model-config.yaml, or in the settings of a model, turns it on (docs/guides/caching.md).
"""
