"""What the log says at a server's start of the rights that models have: those of root, and which credentials they do not see."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from tsx_runtime.core.isolation.hidden_credentials import SERVERS, hidden_variables
from tsx_runtime.settings.schema import Settings

logger = logging.getLogger("tsx.server")


def tell_rights(settings: Settings, env: Mapping[str, str], *, platform_decides: bool) -> None:
    """`platform_decides`: whether the platform chooses the user that the server runs as."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and not platform_decides:
        logger.warning("the server runs as root, and so does the code of every model; start it as a user of its own (see docs/security.md)")
    hidden = [name for name in hidden_variables(settings, env) if name not in SERVERS]
    if hidden:
        logger.info("models do not see these variables, unless pass_env names them: %s", ", ".join(sorted(hidden)))
