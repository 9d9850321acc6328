"""The server of a container image, which serves the model in its directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tsx_runtime.server.logging_setup import set_up_logging
from tsx_runtime.server.server import RunningServer, serve
from tsx_runtime.server.startup import models_from_settings
from tsx_runtime.settings.sources import find_config
from tsx_runtime.shared.nonblocking_output import install_lossy_output
from tsx_runtime.targets.image.environment import locate_model, read_settings
from tsx_runtime.targets.image.model_discovery import find_model

logger = logging.getLogger("tsx.server")


def serve_image(env: Mapping[str, str]) -> None:
    """Serve until a stop is requested.

    Raises:
        SettingError: A setting is unknown, or its value cannot be used. `serve` and `load_all` may
            raise other errors.
    """
    notices: list[str] = []
    location = locate_model(env)
    settings = read_settings(env, location, find_config(None, env, Path.cwd()), notices)
    install_lossy_output()
    set_up_logging(settings, notices)
    serve(
        settings,
        models_from_settings(settings)
        or [find_model(location.directory, env, location.name or None)],
        _log_start,
    )


def _log_start(server: RunningServer) -> None:
    names = ", ".join(f"{version.name}/{version.version}" for version in server.versions)
    logger.info("serving %s at %s", names, server.addresses["inference"])
