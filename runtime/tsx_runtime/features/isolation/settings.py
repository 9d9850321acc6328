"""The settings of isolated workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tsx_runtime.settings.fields import FeatureModelSettings, FeatureSettings
from tsx_runtime.settings.model_limits import Accepts


def _check_absolute(paths: list[Path]) -> list[Path]:
    if any(not path.is_absolute() for path in paths):
        raise ValueError("they must be absolute")
    return paths


IsolationPaths = Annotated[
    list[Path],
    AfterValidator(_check_absolute),
    Accepts("absolute paths: a list, or a string with commas"),
]
IsolationCpus = Annotated[float, Field(ge=0, le=4096), Accepts("a number from 0 to 4096")]


class IsolationSettings(FeatureSettings):
    isolation: Literal["off", "on"] = "off"
    """on: workers are isolated from the network, from files, from other processes; see
    security.md"""
    isolation_network: bool = False
    """let isolated workers use the network"""
    isolation_memory: int = Field(0, ge=0)
    """memory limit of an isolated worker, in megabytes (cgroup v2); 0 = no limit"""
    isolation_cpus: IsolationCpus = 0.0
    """CPU limit of an isolated worker, in CPUs (cgroup v2); 0 = no limit"""
    isolation_processes: int = Field(0, ge=0)
    """maximum number of processes and threads of an isolated worker (cgroup v2); 0 = no limit"""
    isolation_paths: IsolationPaths = []
    """additional files and directories that isolated workers may read"""
    isolation_variables: list[str] = []
    """additional environment variables for isolated workers"""
    isolation_cgroup: Path | None = None
    """cgroup v2 directory in which the server may make groups; the server's own group if not set"""


class IsolationModelSettings(FeatureModelSettings):
    isolation: Literal["off", "on"] | None = None
    """whether its workers are isolated; see security.md"""
    isolation_network: bool | None = None
    """whether isolated workers may use the network"""
    isolation_memory: int | None = Field(None, ge=0)
    """memory limit of an isolated worker, in megabytes; 0 = no limit"""
    isolation_cpus: IsolationCpus | None = None
    """CPU limit of an isolated worker, in CPUs; 0 = no limit"""
    isolation_processes: int | None = Field(None, ge=0)
    """maximum number of processes and threads of an isolated worker; 0 = no limit"""
    isolation_paths: IsolationPaths | None = None
    """additional files and directories that isolated workers may read"""
    isolation_variables: list[str] | None = None
    """additional environment variables for isolated workers"""
