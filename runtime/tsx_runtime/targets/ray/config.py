"""The arguments of a Ray Serve application of tsx; this module does not import Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tsx_archiver import is_model_name
from tsx_runtime.errors import SettingError

IMPORT_PATH = "tsx_runtime.targets.ray.application:build"
NAMESPACE = "tsx"
OBJECT = "object://"
S3 = "s3://"
INGRESS, MODEL = "Ingress", "Model"  # names of an application's deployments


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RayModel(_Strict):
    """An archive and its source.

    `source` is a path that all nodes share, `s3://BUCKET/KEY`, or `object://SHA256` for an archive
    that `archives.upload` has stored.
    """

    name: str
    source: str = Field(min_length=1)
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _check(self) -> RayModel:
        if not is_model_name(self.name):
            raise ValueError(
                f"the model name {self.name!r} cannot be used: letters, digits, '_', '-' and '.'"
                " only, a letter or digit first"
            )
        if self.source.startswith(OBJECT):
            digest = self.source.removeprefix(OBJECT)
            if not re.fullmatch("[0-9a-f]{64}", digest) or self.sha256 not in (None, digest):
                raise ValueError(
                    f"source {self.source!r} must be object:// and the archive's sha-256, the same"
                    " as in sha256"
                )
        if self.source.startswith(S3) and self.sha256 is None:
            raise ValueError(
                f"source {self.source!r} needs sha256, by which each node checks its download"
            )
        return self

    @property
    def digest(self) -> str | None:
        return self.source.removeprefix(OBJECT) if self.source.startswith(OBJECT) else self.sha256


class ReplicaResources(_Strict):
    """The resources that a replica reserves on its node; fractions of a CPU or GPU are allowed."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    memory: int | None = Field(None, ge=1, description="bytes")
    resources: dict[str, float] = {}  # custom resources of the cluster's nodes
    max_ongoing_requests: int = Field(
        100, ge=1, description="requests in a replica at a time, the waiting ones included"
    )


class RayCanary(_Strict):
    """The application that gets some percent of the requests; changes restart no replica."""

    app: str
    percent: float = Field(ge=0, le=100)


class Routing(_Strict):
    """The `user_config` of the ingress, which can be changed without a restart."""

    canary: RayCanary | None = None
    repeat: Literal["idempotent", "all"] = Field(
        "idempotent",
        description=(
            "which requests are repeated where their replica is lost: those of idempotent methods,"
            " or all"
        ),
    )
    release: dict[str, Any] = {}  # data of `tsx deploy`, which the application does not read


class RayApplication(Routing):
    """An application: one model, or several that share replicas (`multiplexed`)."""

    name: str = Field(min_length=1)
    models: list[RayModel] = Field(min_length=1)
    settings: dict[str, Any] = {}  # these override the TSX_* variables of the nodes
    replica: ReplicaResources = ReplicaResources.model_validate({})
    replicas: int | None = Field(None, ge=1)
    autoscaling: dict[str, Any] | None = None  # an `AutoscalingConfig` of Ray Serve
    multiplexed: int | None = Field(
        None,
        ge=1,
        description="models that a replica holds at a time; the one used longest ago makes room",
    )
    ingress_replicas: int = Field(
        2,
        ge=1,
        description=(
            "best one on each node that takes requests; they hold no model and reserve no CPU"
        ),
    )
    ingress_resources: dict[str, float] = Field(
        {}, description="custom resources that an ingress reserves, to bind it to nodes"
    )
    surge: int = Field(
        25,
        ge=0,
        le=100,
        description=(
            "more replicas during an update, in percent; 0: one ends before the next starts"
        ),
    )
    drain: float = Field(
        30.0,
        ge=0,
        description="seconds in which a replica that is removed answers what it has accepted",
    )

    @field_validator("models")
    @classmethod
    def _check_names(cls, models: list[RayModel]) -> list[RayModel]:
        names = [model.name for model in models]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"several models are called {', '.join(duplicates)}; give each its own name"
            )
        return models

    @model_validator(mode="after")
    def _check(self) -> RayApplication:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("give replicas or autoscaling, not both")
        if self.multiplexed is None and len(self.models) > 1:
            raise ValueError(
                f"{len(self.models)} models need multiplexed, the number of them that a replica"
                " holds at a time"
            )
        if self.canary is not None and (
            self.multiplexed is not None or self.canary.app == self.name
        ):
            raise ValueError("canary needs one model and the name of another application")
        return self

    @property
    def routing(self) -> dict[str, Any]:
        """The fields that can be changed without a restart."""
        return self.model_dump(include=set(Routing.model_fields))


def parse_application(args: Mapping[str, Any]) -> RayApplication:
    """Validate the arguments of an application.

    Raises:
        SettingError: Arguments are invalid; the message names each field.
    """
    try:
        return RayApplication.model_validate(args)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'args'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise SettingError(
            f"the arguments of the Ray Serve application are wrong: {problems}"
        ) from error
