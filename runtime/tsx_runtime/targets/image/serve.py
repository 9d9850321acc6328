"""The server of an image: serves the model in its directory, with the settings of a container."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tsx_runtime.settings.sources import find_config
from tsx_runtime.shared.nonblocking_output import install_lossy_output
from tsx_runtime.targets.image.environment import locate_model, settings_of
from tsx_runtime.targets.image.model_discovery import found_model
from tsx_runtime.targets.observability.logging_setup import set_up_logging
from tsx_runtime.targets.server.server import RunningServer, serve
from tsx_runtime.targets.server.startup import models_from_settings

logger = logging.getLogger("tsx.server")


def serve_image(env: Mapping[str, str]) -> None:
    """Until it is stopped. Raises SettingError, and what `serve` and `load_all` raise."""
    notices: list[str] = []
    place = locate_model(env)
    settings = settings_of(env, place, find_config(None, env, Path.cwd()), notices)
    install_lossy_output()
    set_up_logging(settings, notices)
    serve(
        settings,
        models_from_settings(settings) or [found_model(place.directory, env, place.name or None)],
        _tell,
    )


def _tell(started: RunningServer) -> None:
    served = ", ".join(f"{version.name}/{version.version}" for version in started.versions)
    logger.info("serving %s at %s", served, started.addresses["inference"])
