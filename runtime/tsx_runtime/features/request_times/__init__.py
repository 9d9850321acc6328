"""The times of the phases of single requests: of one by its id, or of the slowest ones.

They are always on, at `/debug/requests/ID` and `/debug/slowest` of the management address
(docs/guides/metrics.md).
"""
