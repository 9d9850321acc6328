"""Recordings of the requests to a model, and optionally of their answers, for `tsx replay`.

`PUT /models/NAME/record` starts a recording (docs/guides/recording.md).
"""
