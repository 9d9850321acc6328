"""Jobs: requests whose answers are stored and fetched later, and requests under idempotency keys.

The headers `Prefer: respond-async` and `Idempotency-Key` of a prediction ask for it; `jobs_store`
names the store (docs/guides/jobs.md).
"""
