"""Builds the Ray Serve application of an archive: `serve.run` takes it, and a Serve config names `build` by its import path."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from tsx_runtime.targets.ray.config import parse_application


def build(args: dict[str, Any]) -> Application:
    """`args`: a `RayApplication` as JSON. Raises SettingError."""
    application = parse_application(args)
    raise NotImplementedError(application.name)
