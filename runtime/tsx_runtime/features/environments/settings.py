"""The settings of models' own packages."""

from __future__ import annotations

from pydantic import Field

from tsx_runtime.settings.fields import FeatureSettings
from tsx_runtime.settings.model_limits import Seconds


class EnvironmentsSettings(FeatureSettings):
    install_py_dep_per_model: bool = False
    """install the packages in the requirements file of an archive"""
    install_timeout: Seconds = Field(600, ge=1)
    """maximum time to install the requirements of one model, in seconds"""
