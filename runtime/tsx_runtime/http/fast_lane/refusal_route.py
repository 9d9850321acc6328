"""The route of a refused request: an unknown model or path, a wrong token.

The fast lane remembers it with the head, so that a flood of such requests costs no more than answers do.
"""

from __future__ import annotations

import asyncio

from tsx_runtime.core.scheduling.job import ClientJob
from tsx_runtime.core.scheduling.route import Headers
from tsx_runtime.errors import TsxError


class RefusalRoute:
    """A `Route` that refuses every request."""

    client_timeout = 0.0
    name = version = ""  # of the model, in the access log

    def __init__(self, error: TsxError, hold: float = 0.0) -> None:
        """`hold`: seconds for which the answer is held back, and with it whatever its connection sends next."""
        self.error = error
        self._hold = hold

    def by_head(self, headers: Headers) -> RefusalRoute:
        return self

    def submit(self, job: ClientJob) -> None:
        if self._hold:
            asyncio.get_running_loop().call_later(self._hold, job.refuse, self.error)
        else:
            job.refuse(self.error)

    def leave(self, job: ClientJob) -> None:
        """The client is gone; there is nothing to cancel."""
