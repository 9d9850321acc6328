"""Schemas of the HTTP API's JSON and parameters, with TorchServe's names and order."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError

from tsx_archiver.metadata.model_limits import CHANGEABLE, LIMITS
from tsx_runtime.api.management.camel import Camel, FeatureDescription
from tsx_runtime.core.workers.signature import ModelSignature
from tsx_runtime.errors import BadRequest
from tsx_runtime.feature import extended
from tsx_runtime.settings.fields import SloText
from tsx_runtime.settings.model_limits import described, with_limits
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.version import __version__

_IGNORED = "accepted for TorchServe's clients; has no effect in TorchServe or tsx"
MAX_PROBLEMS = 5  # reported problems of one request; a body may have thousands
_EXCERPT = reprlib.Repr()  # shortens a client's value, even if it is large or nested
_EXCERPT.maxstring = _EXCERPT.maxother = _EXCERPT.maxlong = 200

ParametersT = TypeVar("ParametersT", bound=BaseModel)


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(_lower)]  # a boolean of a query string, in any case


class ErrorBody(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: XXX"}
            ]
        }
    )

    code: int
    type: str
    message: str


class Status(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"status": 'Model "digits" Version: 1.0 registered with 1 initial workers'}
            ]
        }
    )

    status: str


class Health(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "Healthy"}]})

    status: str


class NotReadyModel(Camel):
    """A version that cannot serve, and the reason."""

    model_name: str
    model_version: str
    reason: str


_NOT_READY_EXAMPLE: dict[str, Any] = {
    "modelName": "digits",
    "modelVersion": "1.0",
    "reason": "no worker is ready; workers: 1 LOADING",
}


class Readiness(Camel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"status": "Not ready", "notReady": [_NOT_READY_EXAMPLE]}]}
    )

    status: str = Field(description="Ready, Not ready, or Stopping")
    not_ready: list[NotReadyModel]


@with_limits(CHANGEABLE)
class RegisterParameters(BaseModel):
    """Parameters of a registration, from the query string or a JSON body, which has precedence."""

    model_config = ConfigDict(
        protected_namespaces=(),
        json_schema_extra={"examples": [{"url": "digits.mar", "initial_workers": 1}]},
    )

    url: str | None = Field(
        None,
        description=(
            "name of the archive's file in the model store, or a URL that allowed_urls allows;"
            " required"
        ),
    )
    model_name: str | None = Field(None, description="the archive's own if not given")
    runtime: str | None = Field(None, description="the archive's own if not given")
    handler: str | None = Field(None, description="the archive's own if not given")
    initial_workers: int | None = Field(
        None,
        ge=0,
        description="if the archive has no minWorkers; default_workers_per_model if not given",
    )
    slo: SloText | None = Field(
        None,
        description="latency target, such as p99<50ms, in place of batch_size and job_queue_size",
    )
    max_workers: int | None = Field(
        None,
        ge=0,
        description=(
            "most workers, which come and go with the load; initial_workers if not given; not used"
            " if the archive has minWorkers"
        ),
    )
    synchronous: Flag = Field(True, description="answer when the workers are ready")
    replace: Flag = Field(
        False,
        description=(
            "replace the version with the same number, or else the default version, once loaded; no"
            " request in flight is lost"
        ),
    )
    s3_sse_kms: Flag = Field(
        False, description="request decryption by KMS if the URL is an S3 URL over http"
    )


@with_limits(CHANGEABLE)
class ScaleParameters(BaseModel):
    min_worker: int | None = Field(
        None, ge=0, description="least workers; 1 if nothing at all is given"
    )
    max_worker: int | None = Field(
        None,
        ge=0,
        description="most workers, which come and go with the load; min_worker if not given",
    )
    slo: SloText | None = Field(
        None, description="another latency target for a version that has one"
    )
    synchronous: Flag = Field(False, description="answer when it is done")
    model_version: str | None = Field(None, description="this version instead of the default one")
    number_gpu: str | None = Field(None, deprecated=True, description=_IGNORED)
    timeout: str | None = Field(None, deprecated=True, description=_IGNORED)


class ListedModel(Camel):
    model_name: str
    model_url: str


class ModelList(Camel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"models": [{"modelName": "digits", "modelUrl": "digits.mar"}]}]
        }
    )

    next_page_token: str | None = None
    models: list[ListedModel]


class DescribedWorker(Camel):
    id: str
    start_time: str
    status: str
    memory_usage: int = Field(description="resident bytes")
    pid: int | None = None
    gpu: bool
    gpu_usage: str
    restarts: int = 0


class JobQueue(Camel):
    remaining_capacity: int
    pending_requests: int


_WORKER_EXAMPLE: dict[str, Any] = {
    "id": "9000",
    "startTime": "2026-02-08T11:03:20.974Z",
    "status": "READY",
    "memoryUsage": 209715200,
    "pid": 98972,
}
_MODEL_EXAMPLE: dict[str, Any] = {
    "modelName": "digits",
    "modelVersion": "1.0",
    "modelUrl": "digits.mar",
    "runtime": "python",
    "minWorkers": 1,
    "maxWorkers": 1,
    "loadedAtStartup": True,
    "workers": [{**_WORKER_EXAMPLE, "gpu": False, "gpuUsage": "N/A", "restarts": 0}],
    "jobQueueStatus": {"remainingCapacity": 100, "pendingRequests": 0},
    "workerRestarts": 0,
    **{LIMITS[name].key: LIMITS[name].default for name in CHANGEABLE},
}


class DescribedMeasurement(Camel):
    """Measurements that `tsx bench --write` has stored in the archive."""

    date: str
    machine: str
    here: bool = Field(
        description=(
            "whether this machine computes like the measured one; if not, the figures do not apply"
            " here"
        )
    )
    configuration: str
    throughput: float = Field(description="accepted answers per second")
    p99_ms: float
    slo: str | None = Field(None, description="the bounds that were set")


class _TorchServeDescription(Camel):
    """The fields of TorchServe's description, in its order."""

    model_name: str
    model_version: str
    model_url: str | None = Field(
        None, description="its archive; a workflow's function has no archive of its own"
    )
    runtime: str
    min_workers: int
    max_workers: int
    batch_size: int = described("batch_size")
    max_batch_delay: int = described("max_batch_delay")
    response_timeout: int = described("response_timeout")
    startup_timeout: int = described("startup_timeout")
    max_retry_timeout_in_sec: int | None = None
    client_timeout: int = described("client_timeout")
    parallel_type: str | None = None
    parallel_level: int | None = None
    device_type: str | None = None
    device_ids: list[int] | None = None
    continuous_batching: bool = False
    use_job_ticket: bool = False
    use_venv: bool = False
    stateful: bool = False
    sequence_max_idle_m_sec: int = 0
    sequence_timeout_m_sec: int = 0
    max_num_sequence: int = 0
    max_sequence_job_queue_size: int = 0
    loaded_at_startup: bool
    workers: list[DescribedWorker]
    job_queue_status: JobQueue
    customized_metadata: Any = Field(
        default=None,
        description="what the handler's describe_handle returns; only with customized=true",
    )


@with_limits(make=described)
class DescribedModel(_TorchServeDescription):
    """The description of one version; a field that does not apply is absent."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MODEL_EXAMPLE]})

    worker_restarts: int = Field(0, description="how often a worker of this version was restarted")
    worker_recycles: dict[str, int] | None = Field(
        None, description="how often workers were replaced, by the limit that they reached"
    )
    scale_to_zero: float | None = Field(
        None, description="seconds without a request after which it is unloaded"
    )
    asleep: bool | None = Field(
        None, description="true while it is unloaded: the next request loads it"
    )
    last_scaling: str | None = Field(
        None,
        description=(
            "why its number of workers was last changed by the server itself, with the numbers"
        ),
    )
    last_error: str | None = Field(
        None, description="why a worker last failed to load the model, or how it ended"
    )
    measured: DescribedMeasurement | None = None
    signature: ModelSignature | None = Field(
        None, description="the types of requests and responses, for handlers that report them"
    )
    form: str | None = Field(
        None,
        description=(
            "the form of the model that its workers run, by its name in tsx-forms.json; reference:"
            " the original"
        ),
    )
    forms_passed_over: list[str] | None = Field(
        None, description="for each form that model-config.yaml names before it, why it is not used"
    )


if not TYPE_CHECKING:
    DescribedModel = extended(DescribedModel, FeatureDescription, "description")


class DescribedModels(RootModel[list[DescribedModel]]):
    pass


class ServerMetadata(BaseModel):
    """`GET /v2`."""

    name: str = "Torchserve"  # KServe's runtimes expect this name.
    version: str = __version__
    extensions: list[str] = ["kserve", "kubeflow"]
    extenstion: list[str] = Field(
        default=["kserve", "kubeflow"], description="as TorchServe spells it"
    )


def dump_json(model: BaseModel) -> str:
    """Return formatted JSON with the public names of fields; None is left out."""
    return model.model_dump_json(by_alias=True, exclude_none=True, indent=2)


def parameters_of(kind: type[ParametersT], values: dict[str, Any], **overrides: Any) -> ParametersT:
    """Validate parameters; `overrides` takes precedence over `values`.

    Raises:
        BadRequest: A parameter is invalid.
    """
    try:
        return kind.model_validate(values | overrides)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False), kind.model_fields) from error


def from_validation(problems: Any, known: Collection[str] = ()) -> BadRequest:
    """Return the error for invalid parameters, with the name and value of each.

    TorchServe would use the default for a number that it cannot parse. `known` are the valid names.
    """
    texts = []
    for problem in problems[:MAX_PROBLEMS]:
        name = ".".join(
            str(part) for part in problem["loc"] if part not in ("query", "body", "path")
        )
        if problem["type"] == "extra_forbidden" and known:
            choices = f"; there are {', '.join(known)}."
            texts.append(f"Parameter {name} is not known{suggestion(name, known) or choices}")
            continue
        texts.append(
            f"Parameter {name or 'body'} is {_EXCERPT.repr(problem.get('input'))}:"
            f" {problem['msg'].removeprefix('Value error, ')}."
        )
    if len(problems) > MAX_PROBLEMS:
        texts.append(f"There are {len(problems) - MAX_PROBLEMS} more problems.")
    return BadRequest(" ".join(texts))
