"""The division of large requests into parts, which several batches and workers answer.

`splitRows` in model-config.yaml, or `split_rows` in the settings of a model, turns it on
(docs/guides/batching.md).
"""
