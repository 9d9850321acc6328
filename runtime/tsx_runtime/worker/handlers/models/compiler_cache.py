"""The directory in which torch.compile keeps its results.

Its default is /tmp/torchinductor_USER, a name that any other user can take first. All workers use
this module, even without torch, so it must not import torch.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import tempfile
from pathlib import Path

from tsx_archiver.storage.private_directory import private_directory
from tsx_runtime.shared.socket_paths import socket_directory

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

logger = logging.getLogger("tsx.worker")


def protect_compiler_cache() -> None:
    """Create torch's default directory before another user can.

    If another user owns it, a new directory is set. A configured directory stays.
    """
    if os.environ.get(VARIABLE):
        return
    directory = Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
    try:
        private_directory(directory)
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="torchinductor-", dir=socket_directory()))
        logger.warning(
            "torch compiles into %s: %s. Set %s to keep what it compiles",
            directory,
            error.strerror,
            VARIABLE,
        )
    os.environ[VARIABLE] = str(directory)


def _user() -> str:
    """Return the name of the user, as in torch."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # The user of a container may have no name.
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
