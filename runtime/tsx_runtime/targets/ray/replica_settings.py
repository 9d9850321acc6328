"""The settings of a replica."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.targets.image.environment import DEFAULTS
from tsx_runtime.targets.ray.config import ReplicaResources


def read_replica_settings(
    app_settings: Mapping[str, Any], replica: ReplicaResources, env: Mapping[str, str], state: Path
) -> Settings:
    """Return the settings of the application, then the node's TSX_* variables, then defaults.

    An earlier source overrides a later one. Some defaults follow from the replica's resources.

    Raises:
        SettingError: A setting is unknown, or its value cannot be used.
    """
    defaults: dict[str, Any] = {
        **DEFAULTS,
        "cpus": max(1, math.ceil(replica.num_cpus)),
        "state_dir": str(state),
    }
    if not replica.num_gpus:
        # With GPUs, Ray sets CUDA_VISIBLE_DEVICES, so no default is needed.
        defaults["number_of_gpu"] = 0
    _, origins = load_settings(app_settings, env, None)
    unset_defaults = {name: value for name, value in defaults.items() if origins[name] == "default"}
    return load_settings({**unset_defaults, **app_settings}, env, None)[0]
