"""The HTTP routes of jobs, and idempotent requests."""
