"""The settings of monitoring: the store of answers, and the monitoring of one model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.errors import BadRequest
from tsx_runtime.settings.fields import (
    POSTGRES,
    SQLITE,
    FeatureModelSettings,
    FeatureSettings,
    Secret,
    check_store,
    table_or_flag,
)
from tsx_runtime.settings.model_limits import Accepts, Seconds

PACKAGES = ("scipy", "sqlalchemy")


def check_packages(subject: str) -> None:
    """Check that the packages of the monitor process are installed.

    Raises:
        BadRequest: They are not; `subject` is what needs them.
    """
    if not all(map(find_spec, PACKAGES)):
        raise BadRequest(
            f"{subject} needs the extra monitor, which is not installed: pip install"
            " 'tsx-serve[monitor]'"
        )


MonitorSetting = Annotated[
    MonitorConfig | Literal[False],
    BeforeValidator(table_or_flag),
    Accepts('true, false, or a table such as {share = "5%", groups = ["sex"]}'),
]


class MonitorSettings(FeatureSettings):
    monitor_store: Annotated[
        Annotated[
            str,
            AfterValidator(check_store),
            Accepts("a file, sqlite:///FILE, or postgresql://USER:PASSWORD@HOST/DATABASE"),
        ]
        | None,
        Secret(),
    ] = None
    """answers of monitored models, for feedback: a SQLite file, or a postgresql:// URL that servers
    share; monitor.sqlite in state_dir if not set"""
    monitor_retention: Seconds = Field(90 * 86_400, ge=1)
    """time for which answers of monitored models and their feedback are stored, in seconds"""
    monitor_events_url: str | None = None
    """where samples of monitored models are also sent, as CloudEvents; none if not set"""


class MonitorModelSettings(FeatureModelSettings):
    monitor: MonitorSetting | None = None
    """whether and how it is monitored, in place of what its archive says; see monitoring.md"""


def store_location(setting: str | None, directory: Path | None) -> str | None:
    """Return the store that a setting names, else one in `directory`, or None without both.

    A file is returned as an absolute path.
    """
    if setting is not None and setting.startswith(POSTGRES):
        return setting
    if setting is not None:
        return str(Path(setting.removeprefix(SQLITE)).absolute())
    return None if directory is None else str((directory / "monitor.sqlite").absolute())
