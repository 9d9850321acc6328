"""Large requests in parts, which are split over batches and workers.

`splitRows` in model-config.yaml, or in the settings of a model, turns it on
(docs/guides/batching.md).
"""
