"""Parts of a model, such as its recording, that an API, the settings or the archive configure."""

from __future__ import annotations

import logging
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from tsx_runtime.core.registry.registry import Registry

ConfigT = TypeVar("ConfigT", bound=BaseModel)

logger = logging.getLogger("tsx.state")


def configured_part(
    registry: Registry, name: str, part: str, kind: type[ConfigT]
) -> ConfigT | None:
    """Return the configuration of a part of a model, or None if it is off.

    What an API has saved wins over the model's settings, and these win over the archives, of which
    that of the default version counts first. A saved or configured False turns the part off.
    """
    model = registry.models.get(name)
    if model is None:
        return None
    saved = registry.state.load(name).get(part)
    if saved is not None:
        try:
            return kind.model_validate(saved) if saved else None
        except ValidationError as error:
            logger.warning("model %s: its saved %s cannot be used: %s", name, part, error)
    setting: ConfigT | Literal[False] | None = getattr(
        registry.settings.models.get(name), part, None
    )
    if setting is not None:
        return setting or None
    versions = [model.versions[model.default], *model.versions.values()]
    return next(filter(None, (getattr(version.config, part) for version in versions)), None)
