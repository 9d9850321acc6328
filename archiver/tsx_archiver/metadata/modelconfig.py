"""model-config.yaml: the keys that the server reads, each declared once for pydantic; the handler
gets the others.

A new key is one field of `ModelConfig`. Limits are in model_limits.py.
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
from tsx_archiver.names import normal, path_fault
from tsx_archiver.quantities import for_text, parse_bytes, parse_seconds

# The keys that handlers read and the server does not: a slip in one of them is noticed too.
BACKEND_KEYS = ("handler", "pt2", "micro_batching", "pippy", "deepspeed", "dali")
_KEYS = ConfigDict(alias_generator=to_camel, populate_by_name=True)

RowSize = Annotated[Positive | None, BeforeValidator(lambda size: None if size == -1 else size)]
Bytes = BeforeValidator(for_text(parse_bytes))
Seconds = BeforeValidator(for_text(parse_seconds))
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
any_case = BeforeValidator(for_text(str.lower))
one_or_several = BeforeValidator(
    lambda value: (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )
)


def _checked_task(text: str) -> str:
    try:
        return checked_task(text)
    except CannotPack as error:
        raise ValueError(error.message) from error


def _member(name: str) -> str:
    if fault := path_fault(name):
        raise ValueError(f"it must be the name of a file in the archive: {fault}")
    return normal(name)


def _argument(name: str) -> str:
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
    """The keys under `cache`: how many bytes of answers the server stores, for how long, and which
    headers tell requests apart.
    """

    size: Annotated[StrictInt, Bytes, Field(ge=0)] = 64 << 20  # bytes; 0 turns the cache off
    ttl: Annotated[Number, Seconds, Field(gt=0, lt=1e9)] = 60.0  # seconds
    key: Annotated[
        tuple[
            Annotated[
                str, StringConstraints(pattern=r"^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$", to_lower=True)
            ],
            ...,
        ],
        one_or_several,
    ] = ()  # names of headers


@dataclass(frozen=True, config=_KEYS)
class HuggingFaceConfig:
    """The keys under `huggingface`."""

    task: Annotated[StrictStr, AfterValidator(_checked_task)] | None = None
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    engine: Literal["auto", "transformers", "vllm"] = "auto"  # of text generation
    max_sequences: Annotated[StrictInt, Field(ge=1, lt=1 << 20)] | None = (
        None  # that text generation runs together
    )
    cache_memory: Annotated[StrictInt, Bytes, Field(ge=1)] | None = (
        None  # bytes, for the cache of text generation
    )


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
    """An entry of `warmup`: a file that is sent as a request, or a recording of requests, before
    the model is served.
    """

    file: Annotated[StrictStr, AfterValidator(_member)]  # its path in the archive
    content_type: StrictStr | None = None
    headers: Annotated[dict[str, str], BeforeValidator(_header_values)] | None = None
    count: Positive | None = None  # requests
    strict: StrictBool | None = None  # whether the model is not served where one fails


@dataclass(frozen=True, kw_only=True, config=_KEYS)
class ModelConfig(ModelLimits["int | None"]):
    """What model-config.yaml says to the server; None where a key is missing or its value cannot be
    used.

    `raw` is the whole document, keys of the handler included: what a handler reads as
    `context.model_yaml_config`.
    """

    min_workers: Count | None = None
    max_workers: Count | None = None
    device_type: Annotated[Literal["cpu", "gpu", "cuda", "xpu", "mps"], any_case] | None = None
    device_ids: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    parallel_type: Annotated[Literal["pp", "tp", "pptp", "custom"], any_case] | None = None
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
    # What tsx adds; TorchServe passes over these.
    batch_policy: StrictStr | None = None  # "wait", or a plugin's name
    slo: Annotated[StrictStr, AfterValidator(checked_target)] | None = (
        None  # a latency target, such as p99<50ms
    )
    scale_to_zero: Annotated[Number, Seconds, Field(ge=0)] | None = (
        None  # seconds without a request after which it is unloaded; 0: never
    )
    batch_buckets: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    cache: CacheConfig | None = None
    overlap_preprocessing: StrictBool | Literal["auto"] | None = None
    retry_failed_batch: StrictBool | None = None
    independent_rows: StrictBool | None = None  # a SageMaker program's requests may share a call
    weights_only: StrictBool | None = None
    # The arguments of the model's class: JSON's kinds of values only, so that a configuration can
    # build no other object.
    init_args: dict[Annotated[StrictStr, AfterValidator(_argument)], JsonValue] | None = Field(
        default=None, alias="init_args"
    )
    threads: Positive | None = None
    precision: Annotated[Literal["fp32", "fp16", "bf16"], any_case] | None = None
    # The names of forms in tsx-forms.json, in the order in which they are tried.
    forms: (
        Annotated[
            tuple[Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")], ...],
            one_or_several,
            Field(min_length=1),
        ]
        | None
    ) = None
    huggingface: HuggingFaceConfig | None = None
    # The shape of one row, without the dimension of the batch; None, or -1, where any size fits. A
    # mapping for several inputs.
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
        """`raw` as YAML, written once: of 20,000 values that takes half a second."""
        return yaml.safe_dump(self.raw)

    def missing_warm_up(self, present: Container[str]) -> list[str]:
        """Of the files that are to be sent, those that are not there, in words."""
        return [
            f"warmup: {entry.file} is not in the archive"
            for entry in self.warmup or ()
            if entry.file not in present
        ]


def parse_model_config(data: Any) -> tuple[ModelConfig, list[str]]:
    """Read what `yaml.safe_load` gave; never raises.

    A wrong value is a problem and counts as absent, as in TorchServe.
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
        "huggingface": HuggingFaceConfig,
    }
    for name, kind in sections.items():
        if values.get(name) is not None:
            section, faults = read_keys(kind, values[name], name, closed=kind is not TorchRun)
            values[name] = None if faults and kind is not TorchRun else section
            problems += faults
    if isinstance(values.get("warmup"), list):
        entries = list[Any]()
        for number, entry in enumerate(values["warmup"], 1):
            given = {"file": entry} if isinstance(entry, str) else entry
            section, faults = read_keys(WarmUp, given, f"warmup[{number}]", closed=True)
            entries += [section] if section else []
            problems += faults
        values["warmup"] = entries
    config, faults = read_keys(ModelConfig, values, raw=data, others=BACKEND_KEYS)
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
    """Read a model-config.yaml; raises InvalidConfig where it is no YAML at all."""
    return parse_model_config(load_yaml_file(path))
