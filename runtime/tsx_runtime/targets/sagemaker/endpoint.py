"""The server of a SageMaker endpoint or batch transform job; the model is at `/opt/ml/model`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.app import ServerApp
from tsx_runtime.server.logging_setup import set_up_logging
from tsx_runtime.server.server import RunningServer, ServeOptions, serve
from tsx_runtime.server.startup import StartModel, models_from_settings
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import find_config
from tsx_runtime.shared.nonblocking_output import install_lossy_output
from tsx_runtime.targets.image.environment import MODEL_NAME, read_settings_over, refuse_unknown
from tsx_runtime.targets.image.model_discovery import HANDLER, find_model, model_directory
from tsx_runtime.targets.sagemaker.app import MultiModel, SageMakerApp
from tsx_runtime.targets.sagemaker.environment import (
    TSX_VARIABLES,
    SageMakerSettings,
    read_environment,
)
from tsx_runtime.targets.sagemaker.multi_model import Models

VARIABLE_PREFIX = "TSX_SAGEMAKER_"

logger = logging.getLogger("tsx.server")


def serve_endpoint(env: Mapping[str, str]) -> None:
    """Serve until SIGTERM.

    Raises:
        SettingError: A setting is unknown, or its value cannot be used. If a model cannot be
            loaded, its error is raised too, so that SageMaker stops waiting.
    """
    environment, settings = read_settings(env)
    models = (
        []
        if environment.multi_model
        else models_from_settings(settings)
        or [find_model(model_directory(env), env, env.get(MODEL_NAME) or None)]
    )

    def with_options(model: StartModel) -> StartModel:
        return replace(model, order=replace(model.order, **environment.order))

    async def open_model(directory: Path, name: str) -> StartModel:
        return with_options(await asyncio.to_thread(find_model, directory, env, name))

    def make_app(registry: Registry, app: ServerApp) -> SageMakerApp:
        if environment.multi_model:
            return MultiModel(
                environment,
                registry,
                app,
                takes_lines,
                Models(registry, environment.memory, open_model),
            )
        return SageMakerApp(environment, registry, app, takes_lines)

    serve(
        settings,
        [with_options(model) for model in models],
        _log_start,
        ServeOptions(make_platform=make_app),
    )


def read_settings(env: Mapping[str, str]) -> tuple[SageMakerSettings, Settings]:
    """Read the settings and set up the log.

    `TSX_*` variables and the settings file override the variables of SageMaker and its toolkit.
    """
    refuse_unknown(env, VARIABLE_PREFIX, TSX_VARIABLES)
    environment = read_environment(env)
    notices = list(environment.notices)
    settings = read_settings_over(
        environment.variables, env, find_config(None, env, Path.cwd()), notices.append
    )
    install_lossy_output()
    set_up_logging(settings, notices)
    if environment.log_level is not None:
        logging.getLogger("tsx").setLevel(environment.log_level)
    return environment, settings


def takes_lines(version: ModelVersion) -> bool:
    """Tell whether bodies for a version are split into lines.

    Programs for the toolkit get whole bodies, because their `input_fn` may expect a CSV's lines
    together.
    """
    return version.handler != HANDLER


def _log_start(server: RunningServer) -> None:
    logger.info(
        "answering at %s; /ping is 200 once the model is loaded", server.addresses["inference"]
    )
