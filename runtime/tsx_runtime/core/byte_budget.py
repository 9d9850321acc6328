"""One bound for the bytes of all bodies that a server holds: those that arrive, wait or run, and answers that clients have not read."""

from __future__ import annotations

from tsx_runtime.errors import Unavailable


class ByteBudget:
    """Counts bytes against `max_inflight_bytes`. Whoever takes bytes gives the same number back, once, whatever happens to the request."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0  # requests, for /metrics

    def take(self, size: int) -> None:
        """Raises Unavailable where that many more bytes do not fit; nothing is taken then."""
        if self.used + size > self.limit:
            self.refused += 1
            raise Unavailable(
                f"The server holds {self.used} bytes of requests and answers, and {size} more do not fit into max_inflight_bytes, "
                f"which is {self.limit}. Try again later, or send smaller bodies.",
                retry_after=1,
            )
        self.used += size

    def give(self, size: int) -> None:
        self.used -= size
