"""The limits of one model, each declared once in a row.

A row gives the key of model-config.yaml, the parameter of a registration and of a later change, the
setting of `[models.NAME]`, the fields of `RegisterOrder` and `Plan`, the fields of descriptions and
snapshots, and the table of docs/reference/configuration.md.
"""

# ruff: noqa: RUF009  (each row is a dataclass field)

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

MAX_BYTES = 1 << 60
ValueT = TypeVar("ValueT", bound="int | None")


class ModelLimit(NamedTuple):
    """The declaration of a limit.

    Attributes:
        key: The key of model-config.yaml and of descriptions, TorchServe's if it has one.
        description: The description in the documentation.
        default: The default.
        setting: The server's setting with the default of all models.
        minimum: The smallest value.
        config_minimum: The smallest value in model-config.yaml, if it differs. TorchServe accepts 0
            only in its API.
        below: The exclusive upper limit.
        choices: The allowed values, instead of a range.
        changeable: Whether a registration, or a change while the model is served, may set it.
            Otherwise only settings may, and 0 means no limit.
        saved: Whether snapshots contain it; their layout is TorchServe's.
    """

    key: str
    description: str
    default: int
    setting: str = ""
    minimum: int = 1
    config_minimum: int | None = None
    below: int = 1 << 31
    choices: tuple[int, ...] = ()
    changeable: bool = True
    saved: bool = False


def row(*args: Any, **options: Any) -> Any:
    """Declare a field of `ModelLimits` by the arguments of `ModelLimit`."""
    limit = ModelLimit(*args, **options)
    # All keys of `metadata` except `limit` are options of pydantic's `Field`, for `ModelConfig`.
    bounds = (
        {} if limit.choices else {"ge": limit.config_minimum or limit.minimum, "lt": limit.below}
    )
    return field(
        default=None, metadata={"limit": limit, "alias": limit.key, "strict": True, **bounds}
    )


@dataclass(frozen=True, kw_only=True)
class ModelLimits(Generic[ValueT]):
    """The limits of a model; `ValueT` is `int`, or `int | None` if limits may be missing."""

    batch_size: ValueT = row(
        "batchSize",
        "maximum number of requests in one batch; 0 counts as 1",
        1,
        minimum=0,
        config_minimum=1,
        saved=True,
    )
    max_batch_bytes: ValueT = row(
        "maxBatchBytes",
        "maximum bytes of all bodies in one batch; a single body may be larger",
        64 << 20,
        below=MAX_BYTES,
    )
    max_batch_cost: ValueT = row(
        "maxBatchCost",
        "maximum cost of all requests in one batch; 0 = no limit",
        0,
        minimum=0,
        below=MAX_BYTES,
        changeable=False,
    )
    max_batch_tokens: ValueT = row(
        "maxBatchTokens",
        "the same in tokens, which are never guessed from bytes",
        0,
        minimum=0,
        below=MAX_BYTES,
        changeable=False,
    )
    split_rows: ValueT = row(
        "splitRows",
        "rows above which a request of the Open Inference Protocol is split; 0 = never",
        0,
        minimum=0,
        changeable=False,
    )
    max_batch_delay: ValueT = row(
        "maxBatchDelay",
        "with `batchPolicy: wait`, maximum milliseconds that a request waits for others",
        100,
        minimum=0,
        saved=True,
    )
    job_queue_size: ValueT = row(
        "jobQueueSize",
        "maximum requests in the queue; further ones are refused",
        100,
        "job_queue_size",
    )
    max_queue_bytes: ValueT = row(
        "maxQueueBytes",
        "maximum bytes of all bodies in the queue; a single body may be larger",
        1 << 30,
        "max_queue_bytes",
        below=MAX_BYTES,
    )
    response_timeout: ValueT = row(
        "responseTimeout",
        "maximum seconds for a batch; a worker that takes longer is replaced; with 0, every request"
        " fails",
        120,
        "default_response_timeout",
        minimum=0,
        config_minimum=1,
        saved=True,
    )
    startup_timeout: ValueT = row(
        "startupTimeout",
        "maximum seconds for loading the model; with 0, loading fails",
        120,
        "default_startup_timeout",
        minimum=0,
        config_minimum=1,
        saved=True,
    )
    client_timeout: ValueT = row(
        "clientTimeoutInMills",
        "milliseconds within which a request must be answered; 0 = no limit",
        0,
        minimum=0,
    )
    overload_status: ValueT = row(
        "overloadStatus",
        "status of requests refused by a full queue: 503 or 429",
        503,
        "overload_status",
        choices=(503, 429),
    )
    max_worker_requests: ValueT = row(
        "maxWorkerRequests",
        "requests after which a worker is replaced; 0 = never",
        0,
        "max_worker_requests",
        minimum=0,
        changeable=False,
    )
    max_worker_memory: ValueT = row(
        "maxWorkerMemory",
        "resident megabytes at which a worker is replaced; 0 = never",
        0,
        "max_worker_memory",
        minimum=0,
        changeable=False,
    )
    max_worker_age: ValueT = row(
        "maxWorkerAge",
        "seconds after which a worker is replaced; 0 = never",
        0,
        "max_worker_age",
        minimum=0,
        changeable=False,
    )


LIMITS: dict[str, ModelLimit] = {
    limit_field.name: limit_field.metadata["limit"] for limit_field in fields(ModelLimits)
}
BY_KEY: dict[str, str] = {limit.key: name for name, limit in LIMITS.items()}
CHANGEABLE = tuple(name for name, limit in LIMITS.items() if limit.changeable)
SAVED = tuple(name for name, limit in LIMITS.items() if limit.saved)
