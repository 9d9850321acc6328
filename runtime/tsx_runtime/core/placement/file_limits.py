"""Raises this process's limit of open files and connections as far as the system allows."""

from __future__ import annotations

import logging
import sys

FEW = 4096  # each connection takes one, each worker four
MOST = 1 << 20  # where the system sets no bound

logger = logging.getLogger("tsx.descriptors")


def raise_limit() -> int | None:
    """Raise the soft limit to the hard one. What it was, for programs that are not made for so many; None where there is no such thing."""
    if sys.platform == "win32":
        return None
    import resource  # here, because Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # macOS has a further limit of its own
            logger.warning("the limit of %d open files stays as it is: %s", soft, error)
            wanted = soft
    if wanted < FEW:
        text = "at most %d files and connections can be open at once; for more clients raise the limit (`ulimit -Hn`, LimitNOFILE=)"
        logger.warning(text, wanted)
    return soft
