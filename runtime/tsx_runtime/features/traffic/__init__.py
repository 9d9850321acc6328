"""The management routes that split the requests of a model between its versions.

They also set labels and roll back (docs/guides/routing.md). `core/traffic` routes the requests.
"""
