"""model-config.yaml: validates the keys that the server reads (contract 3.3); the handler gets the others."""

from __future__ import annotations

import difflib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tsx_archiver.errors import InvalidConfig
from tsx_archiver.metadata.caching import CacheConfig
from tsx_archiver.metadata.configkeys import BACKEND_KEYS, KEYS, TORCHRUN_KEYS, WARM_UP_KEYS, ConfigKey
from tsx_archiver.metadata.huggingface import HuggingFaceConfig
from tsx_archiver.metadata.model_limits import ModelLimits
from tsx_archiver.metadata.safeyaml import load_yaml_file

NEAR = 0.8


class Problem(NamedTuple):
    """A problem in a model-config.yaml, such as an unknown key or an invalid value."""

    kind: str  # "value": a known key whose value cannot be used; "near-miss": an unknown key that looks like a known one
    key: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TorchRun:
    """The keys under `torchrun`."""

    nnodes: int | None = None
    nproc_per_node: int | str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_conf: str | None = None
    monitor_interval: int | None = None
    node_rank: int | None = None
    omp_number_threads: int | None = None


@dataclass(frozen=True)
class WarmUp:
    """An entry of `warmup`: a file that is sent as a request, or a recording of requests, before the model is served."""

    file: str = ""  # its path in the archive
    content_type: str | None = None
    headers: dict[str, str] | None = None
    count: int | None = None  # requests
    strict: bool | None = None  # whether the model is not served where one fails


@dataclass(frozen=True)
class ModelConfig(ModelLimits["int | None"]):
    """What model-config.yaml says to the server; None where a key is missing or its value cannot be used.

    `raw` is the whole document, keys of the handler included: what a handler reads as `context.model_yaml_config`.
    """

    min_workers: int | None = None
    max_workers: int | None = None
    device_type: str | None = None  # cpu, gpu, or what torch calls one: cuda, xpu, mps
    device_ids: tuple[int, ...] | None = None
    parallel_type: str | None = None  # pp, tp, pptp or custom
    parallel_level: int | None = None
    torchrun: TorchRun | None = None
    max_retry_timeout: int | None = None  # seconds
    use_job_ticket: bool | None = None
    sequence_batching: bool | None = None
    continuous_batching: bool | None = None
    async_communication: bool | None = None
    sequence_max_idle_msec: int | None = None
    sequence_timeout_msec: int | None = None
    max_sequence_job_queue_size: int | None = None
    max_num_sequence: int | None = None
    use_venv: bool | None = None
    batch_policy: str | None = None  # "wait", or a plugin's name
    slo: str | None = None  # a latency target, such as p99<50ms
    scale_to_zero: float | None = None  # seconds without a request after which it is unloaded; 0: never
    batch_buckets: tuple[int, ...] | None = None
    cache: CacheConfig | None = None
    overlap_preprocessing: bool | str | None = None  # or "auto"
    retry_failed_batch: bool | None = None
    independent_rows: bool | None = None  # a SageMaker program's requests may share a call
    weights_only: bool | None = None
    init_args: dict[str, Any] | None = None  # of the model's class: plain data
    threads: int | None = None
    precision: str | None = None  # fp32, fp16 or bf16
    forms: tuple[str, ...] | None = None  # of tsx-forms.json, in the order in which they are tried
    huggingface: HuggingFaceConfig | None = None
    input_shape: tuple[int | None, ...] | dict[str, tuple[int | None, ...]] | None = None  # of one row; by input where it has several
    warmup: tuple[WarmUp, ...] | None = None
    raw: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """`raw` as YAML, written once: of 20,000 values that takes half a second."""
        return yaml.safe_dump(self.raw)


def parse_model_config(data: Any) -> tuple[ModelConfig, list[Problem]]:
    """Read what `yaml.safe_load` gave; never raises. A wrong value is a Problem and counts as absent, as in TorchServe."""
    if data is None:
        return ModelConfig(), []
    if not isinstance(data, dict):
        return ModelConfig(), [
            Problem("value", "", f"the file holds a {type(data).__name__} instead of keys and values, such as 'batchSize: 8'")
        ]
    values, problems = _read(data, KEYS, known=[*(key.name for key in KEYS), *BACKEND_KEYS])
    nested = values.pop("torchrun", None)
    if nested is not None:
        inner, inner_problems = _read(nested, TORCHRUN_KEYS, known=[key.name for key in TORCHRUN_KEYS], under="torchrun.")
        values["torchrun"] = TorchRun(**inner)
        problems += inner_problems
    if values.get("warmup") is not None:
        values["warmup"], entry_problems = _read_warm_up(values["warmup"])
        problems += entry_problems
    problems += _workers_problem(values)
    return ModelConfig(**values, raw=data), problems


def load_model_config(path: Path) -> tuple[ModelConfig, list[Problem]]:
    """Read a model-config.yaml; raises InvalidConfig where it is no YAML at all."""
    return parse_model_config(load_yaml_file(path))


def check_model_config(path: Path) -> list[Problem]:
    """The problems of a file that is about to be packed; a document that is no mapping raises InvalidConfig."""
    data = load_yaml_file(path)
    _, problems = parse_model_config(data)
    if data is not None and not isinstance(data, dict):
        raise InvalidConfig(f"{path} is not a valid model configuration: {problems[0].text}.")
    return problems


def missing_warm_up(config: ModelConfig, present: Container[str]) -> list[str]:
    """Of the files that are to be sent, those that are not there, in words."""
    return [f"warmup: {entry.file} is not in the archive" for entry in config.warmup or () if entry.file not in present]


def _read_warm_up(given: list[Any]) -> tuple[tuple[WarmUp, ...], list[Problem]]:
    """An entry that names no file is none."""
    entries, problems = [], []
    names = [key.name for key in WARM_UP_KEYS]
    for number, said in enumerate(given, 1):
        under = f"warmup[{number}]."
        entry = {"file": said} if isinstance(said, str) else said
        if not isinstance(entry, dict):
            text = f"{under[:-1]}: {said!r} is invalid: it must hold keys, such as 'file: sample.png'"
            problems.append(Problem("value", under[:-1], text))
            continue
        inner, faults = _read(entry, WARM_UP_KEYS, known=names, under=under)
        faulty = {fault.key for fault in faults}
        for name in entry:
            if name not in names and f"{under}{name}" not in faulty:
                text = f"{under}{name} is not a known key; the known keys are {', '.join(names)}"
                faults.append(Problem("near-miss", f"{under}{name}", text))
        problems += faults
        if inner.get("file"):
            entries.append(WarmUp(**inner))
        elif f"{under}file" not in faulty:
            problems.append(Problem("value", f"{under}file", f"{under}file is missing: it names the file of the archive that is sent"))
    return tuple(entries), problems


def _read(
    data: Mapping[Any, Any], keys: tuple[ConfigKey, ...], *, known: list[str], under: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    by_name = {key.name: key for key in keys}
    values: dict[str, Any] = {}
    problems = []
    for name, value in data.items():
        key = by_name.get(name) if isinstance(name, str) else None
        if key is None:
            near = _near(str(name), known) if name not in known else None
            if near:
                problems.append(Problem("near-miss", under + str(name), f"{under}{name} is not a known key; did you mean {under}{near}?"))
        elif value is not None:
            values[key.field], fault = key.read(value)
            if fault:
                problems.append(Problem("value", under + name, f"{under}{name}: {value!r} is invalid: {fault}"))
    return values, problems


def _near(name: str, known: list[str]) -> str | None:
    """The known key that `name` probably means; most often the case or a separator differs."""
    folded = {_fold(candidate): candidate for candidate in known}
    match = difflib.get_close_matches(_fold(name), folded, n=1, cutoff=NEAR)
    return folded[match[0]] if match else None


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _workers_problem(values: Mapping[str, Any]) -> list[Problem]:
    low, high = values.get("min_workers"), values.get("max_workers")
    if low is None or high is None or low <= high:
        return []
    return [Problem("value", "maxWorkers", f"maxWorkers: {high} is less than minWorkers: {low}; raise it, or leave it out")]
