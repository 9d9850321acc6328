"""The section `ray` of a specification."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tsx_cli.deploy.spec_values import MEMORY, Percent, Seconds, SpecSection, split_list, table

RAY_ADDRESS = r"^(auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):\d+)$"
ARCHIVES = r"^(object-store|path|s3://[^/\s]+(/\S+)?)$"


class Ray(SpecSection):
    """An application of Ray Serve on a running cluster."""

    # ray://HOST:10001 from any machine; HOST:6379 or auto on a node of the cluster.
    address: str = Field(default="auto", pattern=RAY_ADDRESS)
    # The address of each node if this deployment starts Ray Serve; 0.0.0.0 for other machines.
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65_535)
    # The default is /NAME.
    route_prefix: str | None = Field(default=None, pattern=r"^/([\w.~-]+(/[\w.~-]+)*)?$")
    # How archives reach the nodes; path: all nodes see the path of the archive.
    archives: str = Field(default="object-store", pattern=ARCHIVES)
    # Additional archives, which share the replicas with `model`.
    models: Annotated[tuple[Path, ...], BeforeValidator(split_list)] = ()
    models_per_replica: int | None = Field(default=None, ge=1)  # models loaded at a time
    # CPUs of a replica; by default as in the archive's benchmark, or 1.
    num_cpus: float | None = Field(default=None, ge=0)
    # 0.25 shares a GPU; by default 1 if the archive was measured on a GPU.
    num_gpus: float | None = Field(default=None, ge=0)
    memory: str | None = Field(default=None, pattern=MEMORY)
    # Custom resources of the cluster.
    resources: Annotated[dict[str, float], BeforeValidator(table)] = Field(default_factory=dict)
    replicas: int = Field(default=1, ge=1)
    min_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)  # the two bounds of autoscaling
    # Requests in flight on a replica; by default as the archive's benchmark predicts.
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    # Largest number of requests on a replica, with the waiting ones.
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    # Replicas that forward requests, ideally one for each node that takes requests.
    ingress_replicas: int = Field(default=2, ge=1)
    # Requests that are repeated if their replica is lost; all: also POST without a key.
    repeat: Literal["idempotent", "all"] = "idempotent"
    # Additional replicas during an update; 0: a replica ends before the next starts.
    surge: Annotated[Percent, Field(ge=0, le=100)] = 25
    # Ray's runtime environment: packages that the nodes lack, such as {pip = ["pillow"]}.
    runtime_env: Annotated[dict[str, Any], BeforeValidator(table)] = Field(default_factory=dict)
    grpc: bool = False  # whether Ray Serve listens for gRPC, if this deployment starts it
    # Time that a stopping replica has for its accepted requests.
    grace: Annotated[Seconds, Field(ge=1)] = 30
    startup_timeout: Annotated[Seconds, Field(ge=1)] = 600

    @field_validator("num_gpus")
    @classmethod
    def _check_gpus(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError(
                "Ray gives a replica a share of one GPU or whole GPUs: write 0.5, 1 or 2"
            )
        return gpus

    @field_validator("runtime_env")
    @classmethod
    def _check_runtime_env(cls, env: dict[str, Any]) -> dict[str, Any]:
        modules = env.get("py_modules", [])
        for uri in [
            env.get("working_dir", "s3://"),
            *(modules if isinstance(modules, list) else [modules]),
        ]:
            if "://" not in str(uri):
                raise ValueError(
                    f"the nodes cannot read {uri}: upload it as a zip, and give its URI, such as"
                    " s3://bucket/code.zip"
                )
        if "env_vars" in env:
            raise ValueError("set variables of the replicas in env, not in env_vars")
        return env

    @model_validator(mode="after")
    def _check_scaling(self) -> Ray:
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError(
                "min_replicas and max_replicas belong together: set both to scale, or replicas"
                " alone"
            )
        if self.min_replicas is None and self.target_ongoing_requests is not None:
            raise ValueError(
                "target_ongoing_requests is what scaling aims at: set min_replicas and max_replicas"
                " as well, or remove it"
            )
        if self.min_replicas is not None and self.max_replicas is not None:
            if self.min_replicas > self.max_replicas:
                raise ValueError(
                    f"min_replicas is {self.min_replicas}, and max_replicas is {self.max_replicas}:"
                    " it must not be greater"
                )
            if "replicas" in self.model_fields_set:
                raise ValueError(
                    "replicas is a fixed number, and min_replicas and max_replicas are bounds:"
                    " remove one of them"
                )
        if (self.target_ongoing_requests or 0) > (self.max_ongoing_requests or math.inf):
            advice = (
                f"max_ongoing_requests is {self.max_ongoing_requests}: raise it, or lower"
                " target_ongoing_requests"
            )
            raise ValueError(
                f"a replica never has {self.target_ongoing_requests:g} requests where {advice}"
            )
        if bool(self.models) != (self.models_per_replica is not None):
            raise ValueError(
                "models and models_per_replica belong together: the archives that share replicas,"
                " and how many one holds"
            )
        return self
