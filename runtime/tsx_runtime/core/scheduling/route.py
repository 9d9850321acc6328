"""The interface to which requests for a model are submitted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from tsx_runtime.core.scheduling.job import ClientJob

Headers = Collection[tuple[bytes, bytes]]  # names in lower case


class Route(Protocol):
    """A version, or the splitter that picks one."""

    @property
    def name(self) -> str: ...

    @property
    def client_timeout(self) -> float:
        """Seconds; 0 where there is no limit, or where the version that a splitter picks sets it."""

    def by_head(self, headers: Headers) -> Route:
        """What is left to decide once the headers of a request are known: that is submitted to."""

    @property
    def submit(self) -> Callable[[ClientJob], None]: ...

    @property
    def leave(self) -> Callable[[ClientJob], None]: ...
