"""The table of the keys of model-config.yaml: a new key is one row here and one field in `ModelConfig`. Limits are in model_limits.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from tsx_archiver.metadata.caching import read_cache
from tsx_archiver.metadata.forms import NAME
from tsx_archiver.metadata.huggingface import read_huggingface
from tsx_archiver.metadata.model_limits import LIMITS
from tsx_archiver.metadata.slo import read_target
from tsx_archiver.names import normal, path_fault
from tsx_archiver.quantities import parse_seconds

# A reader gives the value, or None and the reason why it cannot be used.
Read: TypeAlias = Callable[[Any], "tuple[Any, str | None]"]


class ConfigKey(NamedTuple):
    name: str  # in the file
    field: str  # of ModelConfig
    read: Read


def whole(minimum: int = 0, below: int = 1 << 31) -> Read:
    def read(value: Any) -> tuple[int | None, str | None]:
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value < below:
            return value, None
        return None, f"it must be a whole number, {minimum} or more"

    return read


def flag(value: Any) -> tuple[bool | None, str | None]:
    return (value, None) if isinstance(value, bool) else (None, "it must be true or false")


def flag_or_auto(value: Any) -> tuple[bool | str | None, str | None]:
    return (value, None) if isinstance(value, bool) or value == "auto" else (None, "it must be true, false or auto")


def idle_time(value: Any) -> tuple[float | None, str | None]:
    """In seconds; 0 is never."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            return parse_seconds(str(value)), None
    return None, "it must be a number of seconds, or a time such as 30s, 10m or 2h"


def text(value: Any) -> tuple[str | None, str | None]:
    return (value, None) if isinstance(value, str) else (None, "it must be a string")


def one_of(*choices: str) -> Read:
    def read(value: Any) -> tuple[str | None, str | None]:
        if isinstance(value, str) and value.lower() in choices:
            return value.lower(), None
        return None, f"it must be {' or '.join(choices)}"

    return read


def choice(*choices: int) -> Read:
    def read(value: Any) -> tuple[int | None, str | None]:
        return (value, None) if value in choices else (None, f"it must be {' or '.join(map(str, choices))}")

    return read


def whole_or_text(value: Any) -> tuple[int | str | None, str | None]:
    usable = isinstance(value, str) or whole(1)(value)[0] is not None
    return (value, None) if usable else (None, "it must be a whole number or a string")


def device_ids(value: Any) -> tuple[tuple[int, ...] | None, str | None]:
    numbers = whole(0)
    if isinstance(value, list) and value and all(numbers(item)[0] is not None for item in value):
        return tuple(value), None
    return None, "it must be a list of device numbers, such as [0, 1]"


def shape(value: Any) -> tuple[tuple[int | None, ...] | None, str | None]:
    """Of a row, without the dimension of the batch; null, or -1, where any size fits."""
    size = whole(1)
    if isinstance(value, list) and all(entry in (None, -1) or size(entry)[0] is not None for entry in value):
        return tuple(None if entry == -1 else entry for entry in value), None
    return None, "it must be a list of the sizes of one row, such as [3, 224, 224], null where any size fits; or such lists by name"


def input_shape(value: Any) -> tuple[Any, str | None]:
    """Read the shape of a model's only input, or a mapping of its inputs' names to their shapes."""
    if not isinstance(value, dict):
        return shape(value)
    shapes = {name: shape(entry)[0] for name, entry in value.items()}
    return (shapes, None) if None not in shapes.values() else shape(None)


def batch_sizes(value: Any) -> tuple[tuple[int, ...] | None, str | None]:
    if isinstance(value, list) and value and all(whole(1)(size)[0] is not None for size in value):
        return tuple(value), None
    return None, "it must be a list of numbers of requests, such as [1, 2, 4, 8]"


def mapping(value: Any) -> tuple[dict[Any, Any] | None, str | None]:
    return (value, None) if isinstance(value, dict) else (None, "it must be a mapping of keys to values")


def sequence(value: Any) -> tuple[list[Any] | None, str | None]:
    return (value, None) if isinstance(value, list) else (None, "it must be a list")


def member_file(value: Any) -> tuple[str | None, str | None]:
    if not isinstance(value, str) or not value or (fault := path_fault(value)):
        return None, "it must be the name of a file in the archive" + (f": {fault}" if isinstance(value, str) and value else "")
    return normal(value), None


def form_names(value: Any) -> tuple[tuple[str, ...] | None, str | None]:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
        return tuple(names), None
    return None, "it must be a list of names of forms, such as [openvino-int8, bf16]: tsx optimize writes it"


def texts(value: Any) -> tuple[dict[str, str] | None, str | None]:
    if isinstance(value, dict) and all(isinstance(name, str) and not isinstance(text, (dict, list)) for name, text in value.items()):
        return {name: str(text) for name, text in value.items() if text is not None}, None
    return None, "it must be a mapping of names to values, such as {accept-language: de}"


def plain_arguments(value: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Arguments of a model's class: JSON's kinds of values only, so that a configuration can build no other object."""
    if isinstance(value, dict) and all(isinstance(name, str) and name.isidentifier() for name in value) and _is_plain(value):
        return value, None
    return None, "it must be a mapping of argument names to numbers, strings, true, false, null, lists and mappings, such as {width: 64}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else value is None or isinstance(value, str | int | float)


LIMIT_KEYS = tuple(
    ConfigKey(limit.key, name, choice(*limit.choices) if limit.choices else whole(limit.own_minimum or limit.minimum, limit.below))
    for name, limit in LIMITS.items()
)

TORCHSERVE_KEYS = (
    ConfigKey("minWorkers", "min_workers", whole(0)),
    ConfigKey("maxWorkers", "max_workers", whole(0)),
    ConfigKey("deviceType", "device_type", one_of("cpu", "gpu", "cuda", "xpu", "mps")),
    ConfigKey("deviceIds", "device_ids", device_ids),
    ConfigKey("parallelType", "parallel_type", one_of("pp", "tp", "pptp", "custom")),
    ConfigKey("parallelLevel", "parallel_level", whole(1)),
    ConfigKey("torchrun", "torchrun", mapping),
    ConfigKey("maxRetryTimeoutInSec", "max_retry_timeout", whole(0)),
    ConfigKey("useJobTicket", "use_job_ticket", flag),
    ConfigKey("sequenceBatching", "sequence_batching", flag),
    ConfigKey("continuousBatching", "continuous_batching", flag),
    ConfigKey("asyncCommunication", "async_communication", flag),
    ConfigKey("sequenceMaxIdleMSec", "sequence_max_idle_msec", whole(0)),
    ConfigKey("sequenceTimeoutMSec", "sequence_timeout_msec", whole(0)),
    ConfigKey("maxSequenceJobQueueSize", "max_sequence_job_queue_size", whole(1)),
    ConfigKey("maxNumSequence", "max_num_sequence", whole(1)),
    ConfigKey("useVenv", "use_venv", flag),
)

# What tsx adds; TorchServe passes over these.
TSX_KEYS = (
    ConfigKey("batchPolicy", "batch_policy", text),
    ConfigKey("slo", "slo", read_target),
    ConfigKey("scaleToZero", "scale_to_zero", idle_time),
    ConfigKey("batchBuckets", "batch_buckets", batch_sizes),
    ConfigKey("cache", "cache", read_cache),
    ConfigKey("overlapPreprocessing", "overlap_preprocessing", flag_or_auto),
    ConfigKey("retryFailedBatch", "retry_failed_batch", flag),
    ConfigKey("independentRows", "independent_rows", flag),
    ConfigKey("weightsOnly", "weights_only", flag),
    ConfigKey("init_args", "init_args", plain_arguments),
    ConfigKey("threads", "threads", whole(1)),
    ConfigKey("precision", "precision", one_of("fp32", "fp16", "bf16")),
    ConfigKey("forms", "forms", form_names),
    ConfigKey("huggingface", "huggingface", read_huggingface),
    ConfigKey("input_shape", "input_shape", input_shape),
    ConfigKey("warmup", "warmup", sequence),
)

KEYS = LIMIT_KEYS + TORCHSERVE_KEYS + TSX_KEYS

TORCHRUN_KEYS = (
    ConfigKey("nnodes", "nnodes", whole(1)),
    ConfigKey("nproc-per-node", "nproc_per_node", whole_or_text),
    ConfigKey("rdzv-backend", "rdzv_backend", text),
    ConfigKey("rdzv-endpoint", "rdzv_endpoint", text),
    ConfigKey("rdzv-conf", "rdzv_conf", text),
    ConfigKey("monitor-interval", "monitor_interval", whole(0)),
    ConfigKey("node-rank", "node_rank", whole(0)),
    ConfigKey("OMP_NUMBER_THREADS", "omp_number_threads", whole(1)),
)

WARM_UP_KEYS = (
    ConfigKey("file", "file", member_file),
    ConfigKey("contentType", "content_type", text),
    ConfigKey("headers", "headers", texts),
    ConfigKey("count", "count", whole(1)),
    ConfigKey("strict", "strict", flag),
)

# Read by handlers, not by the server; known here so that a slip in one of them is noticed.
BACKEND_KEYS = ("handler", "pt2", "micro_batching", "pippy", "deepspeed", "dali")
