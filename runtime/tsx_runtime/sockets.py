"""Where sockets between the server's own processes lie: their paths have some hundred characters at most, and TMPDIR may have more."""

from __future__ import annotations

import os
import tempfile

from tsx_runtime.errors import SettingError

LONGEST = 64  # bytes of a directory, below which multiprocessing puts its own and in that a socket
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def socket_place() -> str:
    """The directory for temporary files, or another one where its path is too long. Raises SettingError."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST:
        return usual
    for directory in SHORT:
        if os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK):  # noqa: PTH112  # as tempfile, which takes a string
            return directory
    places = ", ".join(SHORT)
    raise SettingError(
        f"TMPDIR is {usual}, which is too long for the sockets by which workers are started, and none of {places} can be written. "
        f"Set TMPDIR to a directory of at most {LONGEST} characters."
    )
