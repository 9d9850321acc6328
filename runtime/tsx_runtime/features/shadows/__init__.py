"""Shadows: versions that get copies of requests, and whose answers are only compared.

`PUT /models/NAME/shadow` starts one (docs/guides/routing.md).
"""
