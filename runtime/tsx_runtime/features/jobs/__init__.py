"""Stored requests: asynchronous ones, whose answers are fetched later, and idempotent ones.

A client asks for them with the headers `Prefer: respond-async` and `Idempotency-Key`. The setting
`jobs_store` names the store (docs/guides/jobs.md).
"""
