"""Recordings: the requests of a model, and optionally their answers, in files for a replay.

`PUT /models/NAME/record` starts one (docs/guides/recording.md).
"""
