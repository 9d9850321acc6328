"""Paths of sockets between the server's own processes: short enough for a socket, and safe from
other users.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tsx_archiver.storage.private_directory import check_directory
from tsx_runtime.errors import SettingError

LONGEST = 64  # bytes of a directory, below which multiprocessing puts its own and in that a socket
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def socket_place() -> str:
    """The directory for temporary files, or another one where its path is too long, or other users
    can write there. Raises SettingError.
    """
    usual = tempfile.gettempdir()
    problem = _problem(usual)
    if problem is None:
        return usual
    for directory in SHORT:
        if (
            os.path.isdir(directory)  # noqa: PTH112  # as tempfile, which takes a string
            and os.access(directory, os.W_OK | os.X_OK)
            and _problem(directory) is None
        ):  # as tempfile, which takes a string
            return directory
    places = ", ".join(SHORT)
    raise SettingError(
        f"TMPDIR is {usual}, which cannot hold the sockets that start workers: {problem}; and none"
        f" of {places} can. Set TMPDIR to a directory of your own, of at most {LONGEST} characters."
    )


def _problem(directory: str) -> str | None:
    if len(os.fsencode(directory)) > LONGEST:
        return "its path is too long"
    try:
        check_directory(Path(directory), allow_sticky=True)
    except OSError as error:
        return str(error.strerror)
    return None
