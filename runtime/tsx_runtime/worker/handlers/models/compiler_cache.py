"""Where torch.compile keeps what it has compiled: its default, /tmp/torchinductor_USER, is a name
that any user can take first.

Every worker calls this, and those whose handler does without torch do not import it, as `compiling`
does.
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
    """Make torch's usual directory before another user can.

    Where another user has it, take a new one. A directory that was set stays.
    """
    if os.environ.get(VARIABLE):
        return
    place = Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
    try:
        private_directory(place)
    except OSError as error:
        place = Path(tempfile.mkdtemp(prefix="torchinductor-", dir=socket_directory()))
        logger.warning(
            "torch compiles into %s: %s. Set %s to keep what it compiles",
            place,
            error.strerror,
            VARIABLE,
        )
    os.environ[VARIABLE] = str(place)


def _user() -> str:
    """As torch names it."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container's user may have no name
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
