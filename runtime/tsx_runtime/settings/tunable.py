"""The settings of a model that a registration may give too, and that may be changed while it is served."""

from __future__ import annotations

TUNABLE = (
    "batch_size",
    "max_batch_bytes",
    "max_batch_delay",
    "job_queue_size",
    "max_queue_bytes",
    "response_timeout",
    "startup_timeout",
    "client_timeout",
    "overload_status",
)
