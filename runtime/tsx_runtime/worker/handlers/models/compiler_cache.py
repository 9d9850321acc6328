"""Protection of the directory in which torch.compile caches compiled code.

By default the directory is /tmp/torchinductor_USER, which any other user could create first. All
workers use this module, even those without torch. Therefore it must not import torch.
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

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

logger = logging.getLogger("tsx.worker")


def protect_compiler_cache() -> None:
    """Create torch's default directory before another user can.

    If another user owns it, a new directory is used instead. A configured directory is kept.
    """
    if os.environ.get(CACHE_VARIABLE):
        return
    directory = Path(tempfile.gettempdir(), f"torchinductor_{_user_name()}")
    try:
        private_directory(directory)
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="torchinductor-", dir=socket_directory()))
        logger.warning(
            "torch compiles into %s: %s. Set %s to keep what it compiles",
            directory,
            error.strerror,
            CACHE_VARIABLE,
        )
    os.environ[CACHE_VARIABLE] = str(directory)


def _user_name() -> str:
    """Return the name of the user, as in torch."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # In a container, the user may have no name.
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
