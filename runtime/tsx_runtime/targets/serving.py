"""The server of an image: the one model that lies there, served as the platform wants it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_archiver import ARCHIVE_SUFFIXES
from tsx_runtime.errors import SettingError
from tsx_runtime.output import keep_going
from tsx_runtime.setting_sources import find_config, load_settings
from tsx_runtime.targets.container_env import look_around, settings_of
from tsx_runtime.targets.logs import set_up_logging
from tsx_runtime.targets.sagemaker_env import read_environment
from tsx_runtime.targets.server import Started, serve
from tsx_runtime.targets.start import StartModel, models_from_settings, start_model

BASE = "SAGEMAKER_BASE_DIR"
MANIFEST = Path("MAR-INF", "MANIFEST.json")

logger = logging.getLogger("tsx.server")


def serve_image(target: str, env: Mapping[str, str]) -> None:
    """Until it is stopped. Raises SettingError, and what `serve` and `load_all` raise."""
    order: dict[str, Any] = {}
    notices: list[str] = []
    file, directory = find_config(None, env, Path.cwd()), model_directory(env)
    if target == "sagemaker":
        said = read_environment(env)
        order, notices = said.order, said.notices
        settings, _ = load_settings({}, {**said.variables, **env}, file, notices.append)
    else:
        place = look_around(env)
        settings, directory = settings_of(env, place, file, notices), place.directory
        order = {"model_name": place.name} if place.name else {}
    keep_going()
    set_up_logging(settings)
    for notice in notices:
        logger.warning("%s", notice)
    models = models_from_settings(settings) or [found_model(directory)]
    serve(settings, [replace(model, order=replace(model.order, **order)) for model in models], _tell)


def model_directory(env: Mapping[str, str]) -> Path:
    """Where an image has its model."""
    return Path(env.get(BASE) or "/opt/ml") / "model"


def found_model(directory: Path) -> StartModel:
    """The one model of a directory: an archive, or what was in one. Raises SettingError, which says what is there instead."""
    if (directory / MANIFEST).is_file():
        return start_model(directory)
    there = sorted(path for path in directory.iterdir() if not path.name.startswith(".")) if directory.is_dir() else []
    archives = [path for path in there if path.name.endswith(ARCHIVE_SUFFIXES)]
    if len(archives) == 1:
        return start_model(archives[0])
    what = f"{len(archives)} archives: {_listed(archives)}" if archives else f"no archive, but {_listed(there)}" if there else "nothing"
    raise SettingError(f"{directory} holds {what}; it must hold one .mar, or what is in one (tsx archive unpack)")


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:5])
    return f"{names} and {len(paths) - 5} more" if len(paths) > 5 else names


def _tell(started: Started) -> None:
    served = ", ".join(f"{version.name}/{version.version}" for version in started.versions)
    logger.info("serving %s at %s", served, started.addresses["inference"])
