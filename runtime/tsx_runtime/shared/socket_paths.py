"""The directory of the sockets between the server's own processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tsx_archiver.storage.private_directory import check_directory
from tsx_runtime.errors import SettingError

# A socket's path has at most 107 bytes, of which multiprocessing's directory and file name need
# some.
MAX_DIRECTORY_BYTES = 64
SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")


def socket_directory() -> str:
    """Choose a directory with a short path to which other users cannot write.

    The first choice is the directory for temporary files.

    Raises:
        SettingError: There is no such directory.
    """
    default = tempfile.gettempdir()
    problem = _problem(default)
    if problem is None:
        return default
    for directory in SHORT_DIRECTORIES:
        if (
            os.path.isdir(directory)  # noqa: PTH112  # ignores an unreadable parent
            and os.access(directory, os.W_OK | os.X_OK)
            and _problem(directory) is None
        ):
            return directory
    alternatives = ", ".join(SHORT_DIRECTORIES)
    raise SettingError(
        f"TMPDIR is {default}, which cannot hold the sockets that start workers: {problem}; and"
        f" none of {alternatives} can. Set TMPDIR to a directory of your own, of at most"
        f" {MAX_DIRECTORY_BYTES} characters."
    )


def _problem(directory: str) -> str | None:
    if len(os.fsencode(directory)) > MAX_DIRECTORY_BYTES:
        return "its path is too long"
    try:
        check_directory(Path(directory), allow_sticky=True)
    except OSError as error:
        return str(error.strerror)
    return None
