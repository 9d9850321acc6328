"""The keys of model-config.yaml that the server reads, declared for pydantic.

A new key is a field of `ModelConfig`; limits are in model_limits.py. Handlers get all keys.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SkipValidation,
    StrictBool,
    StrictInt,
    StrictStr,
    StringConstraints,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.forms import NAME
from tsx_archiver.metadata.huggingface import checked_task
from tsx_archiver.metadata.keys import KEBAB_KEYS, Count, Positive, read_keys
from tsx_archiver.metadata.model_limits import LIMITS, ModelLimits
from tsx_archiver.metadata.safeyaml import load_yaml_file
from tsx_archiver.metadata.slo import checked_target
from tsx_archiver.monitor.config import MonitorConfig
from tsx_archiver.monitor.recording import RecordingKeys
from tsx_archiver.names import normal, path_fault
from tsx_archiver.quantities import for_text, parse_bytes, parse_seconds

# Keys that only handlers read. They are listed so that a typo in them is noticed.
BACKEND_KEYS = ("handler", "pt2", "micro_batching", "pippy", "deepspeed", "dali")
_KEYS = ConfigDict(alias_generator=to_camel, populate_by_name=True)

RowSize = Annotated[Positive | None, BeforeValidator(lambda size: None if size == -1 else size)]
Bytes = BeforeValidator(for_text(parse_bytes))
Seconds = BeforeValidator(for_text(parse_seconds))
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
ignore_case = BeforeValidator(for_text(str.lower))
text_or_list = BeforeValidator(
    lambda value: (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )
)


def _checked_task(text: str) -> str:
    try:
        return checked_task(text)
    except CannotPack as error:
        raise ValueError(error.message) from error


def _check_member_name(name: str) -> str:
    if fault := path_fault(name):
        raise ValueError(f"it must be the name of a file in the archive: {fault}")
    return normal(name)


def _check_argument_name(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("it must be the name of an argument, such as width")
    return name


def _header_values(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: text if isinstance(text, dict | list) else str(text)
        for name, text in value.items()
        if text is not None
    }


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CacheConfig:
    """The keys under `cache`: the size, the lifetime, and the headers that belong to the key."""

    size: Annotated[StrictInt, Bytes, Field(ge=0)] = 64 << 20  # bytes; 0 = off
    ttl: Annotated[Number, Seconds, Field(gt=0, lt=1e9)] = 60.0  # seconds
    key: Annotated[
        tuple[
            Annotated[
                str, StringConstraints(pattern=r"^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$", to_lower=True)
            ],
            ...,
        ],
        text_or_list,
    ] = ()  # names of request headers


@dataclass(frozen=True, config=_KEYS)
class HuggingFaceConfig:
    """The keys under `huggingface`."""

    task: Annotated[StrictStr, AfterValidator(_checked_task)] | None = None
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    engine: Literal["auto", "transformers", "vllm"] = "auto"  # text generation
    # The number of sequences that text generation runs at the same time.
    max_sequences: Annotated[StrictInt, Field(ge=1, lt=1 << 20)] | None = None
    # The size in bytes of text generation's key-value cache.
    cache_memory: Annotated[StrictInt, Bytes, Field(ge=1)] | None = None


@dataclass(frozen=True, config=KEBAB_KEYS)
class TorchRun:
    """The keys under `torchrun`."""

    nnodes: Positive | None = None
    nproc_per_node: Positive | StrictStr | None = None
    rdzv_backend: StrictStr | None = None
    rdzv_endpoint: StrictStr | None = None
    rdzv_conf: StrictStr | None = None
    monitor_interval: Count | None = None
    node_rank: Count | None = None
    omp_number_threads: Positive | None = Field(default=None, alias="OMP_NUMBER_THREADS")


@dataclass(frozen=True, config=_KEYS)
class WarmUp:
    """An entry of `warmup`: a request or a recording that is sent before the model is served."""

    file: Annotated[StrictStr, AfterValidator(_check_member_name)]  # path in the archive
    content_type: StrictStr | None = None
    headers: Annotated[dict[str, str], BeforeValidator(_header_values)] | None = None
    count: Positive | None = None  # requests
    strict: StrictBool | None = None  # Whether a failed request keeps the model from being served.


@dataclass(frozen=True, kw_only=True, config=_KEYS)
class ModelConfig(ModelLimits["int | None"]):
    """The server's keys of model-config.yaml; None for a missing key or an invalid value.

    Attributes:
        raw: The whole document, which a handler reads as `context.model_yaml_config`.
    """

    min_workers: Count | None = None
    max_workers: Count | None = None
    device_type: Annotated[Literal["cpu", "gpu", "cuda", "xpu", "mps"], ignore_case] | None = None
    device_ids: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    parallel_type: Annotated[Literal["pp", "tp", "pptp", "custom"], ignore_case] | None = None
    parallel_level: Positive | None = None
    torchrun: TorchRun | None = None
    max_retry_timeout: Count | None = Field(default=None, alias="maxRetryTimeoutInSec")
    use_job_ticket: StrictBool | None = None
    sequence_batching: StrictBool | None = None
    continuous_batching: StrictBool | None = None
    async_communication: StrictBool | None = None
    sequence_max_idle_msec: Count | None = Field(default=None, alias="sequenceMaxIdleMSec")
    sequence_timeout_msec: Count | None = Field(default=None, alias="sequenceTimeoutMSec")
    max_sequence_job_queue_size: Positive | None = None
    max_num_sequence: Positive | None = None
    use_venv: StrictBool | None = None
    # The following keys are tsx's own; TorchServe ignores them.
    batch_policy: StrictStr | None = None  # "wait", or a plugin's name
    # A latency target, such as p99<50ms.
    slo: Annotated[StrictStr, AfterValidator(checked_target)] | None = None
    # Seconds without a request after which the model is unloaded; 0 = never.
    scale_to_zero: Annotated[Number, Seconds, Field(ge=0)] | None = None
    batch_buckets: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    cache: CacheConfig | None = None
    record: RecordingKeys | None = None  # the recording that starts with the model
    mcp: StrictBool | None = None  # whether the model is a tool of agents
    monitor: MonitorConfig | None = None
    overlap_preprocessing: StrictBool | Literal["auto"] | None = None
    retry_failed_batch: StrictBool | None = None
    # Whether several requests to a SageMaker program may share one call.
    independent_rows: StrictBool | None = None
    weights_only: StrictBool | None = None
    # The arguments of the model's class. Only JSON values are allowed, so that a configuration
    # cannot create other objects.
    init_args: (
        dict[Annotated[StrictStr, AfterValidator(_check_argument_name)], JsonValue] | None
    ) = Field(default=None, alias="init_args")
    threads: Positive | None = None
    precision: Annotated[Literal["fp32", "fp16", "bf16"], ignore_case] | None = None
    # Names of forms in tsx-forms.json, in the order in which the server tries them.
    forms: (
        Annotated[
            tuple[Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")], ...],
            text_or_list,
            Field(min_length=1),
        ]
        | None
    ) = None
    huggingface: HuggingFaceConfig | None = None
    # The shape of one row; None or -1 is a dimension of any size. Several inputs are a mapping.
    input_shape: tuple[RowSize, ...] | dict[str, tuple[RowSize, ...]] | None = Field(
        default=None, alias="input_shape"
    )
    warmup: tuple[WarmUp, ...] | None = None
    raw: SkipValidation[dict[str, Any]] = Field(default_factory=dict, exclude=True)

    @field_validator(*(name for name, limit in LIMITS.items() if limit.choices))
    @classmethod
    def _check_choice(cls, value: int | None, info: Any) -> int | None:
        choices = LIMITS[info.field_name].choices
        if value not in (None, *choices):
            raise ValueError(f"it must be {' or '.join(map(str, choices))}")
        return value

    @cached_property
    def text(self) -> str:
        """The YAML of `raw`, cached because writing 20,000 values takes half a second."""
        return yaml.safe_dump(self.raw)

    def missing_warm_up(self, present: Container[str]) -> list[str]:
        """Return a message for each missing file of `warmup`."""
        return [
            f"warmup: {entry.file} is not in the archive"
            for entry in self.warmup or ()
            if entry.file not in present
        ]


def parse_model_config(data: Any) -> tuple[ModelConfig, list[str]]:
    """Parse the content of a model-config.yaml, and return it with a list of problems.

    A wrong value is reported as a problem and then treated as missing, as in TorchServe.
    """
    if data is None:
        return ModelConfig(), []
    if not isinstance(data, dict):
        return ModelConfig(), [
            f"the file holds a {type(data).__name__} instead of keys and values, such as"
            " 'batchSize: 8'"
        ]
    values, problems = dict(data), list[str]()
    sections: dict[str, Any] = {
        "torchrun": TorchRun,
        "cache": CacheConfig,
        "record": RecordingKeys,
        "huggingface": HuggingFaceConfig,
        "monitor": MonitorConfig,
    }
    for name in ("monitor", "record"):
        if isinstance(values.get(name), bool):
            values[name] = {} if values[name] else None
        elif isinstance(values.get(name), dict):
            values[name] = {to_camel(str(key)): value for key, value in values[name].items()}
    for name, kind in sections.items():
        if values.get(name) is not None:
            section, faults = read_keys(kind, values[name], name, closed=kind is not TorchRun)
            values[name] = None if faults and kind is not TorchRun else section
            problems += faults
    if isinstance(values.get("warmup"), list):
        entries = list[Any]()
        for number, entry in enumerate(values["warmup"], 1):
            keys = {"file": entry} if isinstance(entry, str) else entry
            section, faults = read_keys(WarmUp, keys, f"warmup[{number}]", closed=True)
            entries += [section] if section else []
            problems += faults
        values["warmup"] = entries
    config, faults = read_keys(ModelConfig, values, raw=data, ignored=BACKEND_KEYS)
    problems += faults
    if (
        config.min_workers is not None
        and config.max_workers is not None
        and config.max_workers < config.min_workers
    ):
        problems.append(
            f"maxWorkers: {config.max_workers} is less than minWorkers: {config.min_workers}; raise"
            " it, or leave it out"
        )
    return config, problems


def load_model_config(path: Path) -> tuple[ModelConfig, list[str]]:
    """Read a model-config.yaml, and return it with a list of problems.

    Raises:
        InvalidConfig: The file is missing or is not YAML.
    """
    return parse_model_config(load_yaml_file(path))
