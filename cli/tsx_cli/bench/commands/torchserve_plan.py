"""The YAML files of TorchServe's auto-benchmark and of its models, parsed into cases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.common.failure import CliError, UsageError

# TorchServe's defaults.
DEFAULT_WORKERS, DEFAULT_BATCH_SIZES, DEFAULT_DELAY_MS = [1], [1], 200
DEFAULT_REQUESTS, DEFAULT_CONCURRENCY = 100, 10
USED_KEYS = {
    "url",
    "workers",
    "batch_size",
    "batch_delay",
    "input",
    "content_type",
    "requests",
    "concurrency",
    "processors",
}
USED_KEYS |= {"handler_profiling", "inference_model_url"}
LIST_KEYS = ("workers", "batch_size")
# TorchServe's defaults for keys without effect; other values give a note.
DEFAULT_VALUES = {
    "exec_env": "local",
    "backend_profiling": False,
    "generate_graphs": False,
    "benchmark_engine": "ab",
}
IGNORED_KEYS = {
    "ts_version": (
        "no TorchServe is installed: tsx is measured, or with --against the server that runs there"
    ),
    "metrics_cmd": "that command is not run; results.json has the figures",
    "report_cmd": "that command is not run; the report stays in the directory that --output names",
}
MODEL_FILE_FOLDERS = (".", "models_config", "benchmarks/models_config")


class Case(NamedTuple):
    """One load on one configuration of one model."""

    model: str
    mode: str
    url: str  # URL or path of the archive
    workers: int
    batch_size: int
    batch_delay: int  # milliseconds
    input: Path
    content_type: str | None
    requests: int
    concurrency: int
    device: str  # cpu or cuda
    profiled: bool  # whether the handler's steps are timed
    served_as: str  # the registered name

    @property
    def group(self) -> str:
        """The name of a table, as in TorchServe."""
        return f"{self.mode}_{self.model}" + ("_gpu" if self.device == "cuda" else "")

    @property
    def name(self) -> str:
        """The name of the case's directory, as in TorchServe."""
        return f"{self.group}_w{self.workers}_b{self.batch_size}"

    @property
    def configuration(self) -> Configuration:
        return Configuration(device=self.device, workers=self.workers, batch_size=self.batch_size)


class AutoBenchmarkPlan(NamedTuple):
    cases: list[Case]
    notes: list[str]  # a note for each key without effect


def read_plan(file: Path) -> AutoBenchmarkPlan:
    """Read a configuration of the auto-benchmark, or the file of one model.

    Raises:
        CliError: A file cannot be read.
        UsageError: A file is not a valid configuration.
    """
    mapping = _mapping(file)
    if "models" not in mapping:
        notes: dict[str, str] = {}
        cases = list(_model_cases(mapping, file, "cpu", notes))
        return _plan(cases, notes, file)
    notes = {key: text for key, text in IGNORED_KEYS.items() if key in mapping}
    notes |= {
        key: "tsx does not know this key"
        for key in mapping
        if key not in {*IGNORED_KEYS, "models", "hardware"}
    }
    hardware = str(mapping.get("hardware") or "cpu")
    if hardware not in ("cpu", "gpu"):
        raise UsageError(f"{file}: hardware is '{hardware}'; tsx runs models on cpu and gpu")
    models = mapping["models"]
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise UsageError(f"{file}: models must be a list of YAML files")
    cases = []
    for name in models:
        model_file = _find(name, file)
        cases += list(_model_cases(_mapping(model_file), model_file, hardware, notes))
    return _plan(cases, notes, file)


def _plan(cases: list[Case], notes: Mapping[str, str], file: Path) -> AutoBenchmarkPlan:
    if not cases:
        raise UsageError(
            f"{file} contains no load: a model needs a mode with a url, workers and batch_size"
        )
    return AutoBenchmarkPlan(
        list(dict.fromkeys(cases)), [f"{key}: {text}" for key, text in notes.items()]
    )


def _mapping(file: Path) -> dict[str, Any]:
    try:
        mapping = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A date with an impossible month, for example, raises ValueError.
        raise UsageError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(mapping, dict):
        raise UsageError(
            f"{file} is not a configuration of TorchServe's auto-benchmark: it must contain keys"
            " and values"
        )
    return mapping


def _find(name: str, referrer: Path) -> Path:
    candidates = [referrer.parent / folder / name for folder in MODEL_FILE_FOLDERS]
    model_file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if model_file is None:
        raise CliError(
            f"{referrer}: the model's file {name} does not exist; tsx looked in"
            f" {', '.join(str(candidate.parent) for candidate in candidates)}"
        )
    return model_file


def _model_cases(
    models: Mapping[str, Any], file: Path, hardware: str, notes: dict[str, str]
) -> Iterator[Case]:
    if "url" in models:  # a file of benchmark-ab, without models and modes
        yield from _mode_cases(file.stem, "custom", models, file, hardware, notes)
        return
    for model, modes in models.items():
        if not isinstance(modes, Mapping):
            raise UsageError(
                f"{file}: '{model}' must hold modes, such as eager_mode or scripted_mode"
            )
        for mode, values in modes.items():
            if not isinstance(values, Mapping):
                raise UsageError(
                    f"{file}: {model}.{mode} must hold keys such as url, workers and batch_size"
                )
            yield from _mode_cases(str(model), str(mode), values, file, hardware, notes)


def _mode_cases(
    model: str,
    mode: str,
    values: Mapping[str, Any],
    file: Path,
    hardware: str,
    notes: dict[str, str],
) -> Iterator[Case]:
    label = f"{file}: {model}.{mode}"
    if "/" in model + mode:  # Both become names of directories.
        raise UsageError(f"{label}: the name of a model or a mode must not contain a /")
    if not isinstance(values.get("content_type"), str | None):
        raise UsageError(
            f"{label}.content_type is {values['content_type']!r}; it must be text, such as"
            " image/png"
        )
    if not isinstance(values.get("url"), str):
        raise UsageError(f"{label} has no url of an archive")
    if values["url"].endswith(".war"):
        notes[f"{model}.{mode}"] = (
            "workflows are not measured by tsx bench; send requests to one with --against"
        )
        return
    for key, value in values.items():
        if key not in USED_KEYS and DEFAULT_VALUES.get(key, ...) != value:
            notes.setdefault(key, "it has no effect")
    counts = {
        key: _numbers(values, key, label, default)
        for key, default in (("workers", DEFAULT_WORKERS), ("batch_size", DEFAULT_BATCH_SIZES))
    }
    (delay,), (requests,), (concurrency,) = (
        _numbers(values, key, label, [default], minimum=minimum)
        for key, default, minimum in (
            ("batch_delay", DEFAULT_DELAY_MS, 0),
            ("requests", DEFAULT_REQUESTS, 1),
            ("concurrency", DEFAULT_CONCURRENCY, 1),
        )
    )
    for device, workers, batch_size in product(
        _devices(values, hardware, label), counts["workers"], counts["batch_size"]
    ):
        yield Case(
            model=model,
            mode=mode,
            url=values["url"],
            workers=workers,
            batch_size=batch_size,
            batch_delay=delay,
            input=_input(values, file, label),
            content_type=values.get("content_type"),
            requests=requests,
            concurrency=concurrency,
            device=device,
            profiled=values.get("handler_profiling") is True,
            served_as=_served_as(values, label),
        )


def _served_as(values: Mapping[str, Any], label: str) -> str:
    url = str(values.get("inference_model_url") or "predictions/benchmark")
    match = re.fullmatch(r"/?predictions/([A-Za-z0-9_.-]+)", url)
    if match is None:
        raise UsageError(
            f"{label}.inference_model_url is {url!r}; the URL of a model is predictions/NAME"
        )
    return match[1]


def _numbers(
    values: Mapping[str, Any], key: str, label: str, default: list[int], *, minimum: int = 1
) -> list[int]:
    value = values.get(key, default)
    numbers = value if isinstance(value, list) else [value]
    if (
        not numbers
        or not all(type(number) is int and number >= minimum for number in numbers)
        or (len(default) == 1 and len(numbers) > 1 and key not in LIST_KEYS)
    ):
        raise UsageError(
            f"{label}.{key} is {value!r}; it must be a whole number of {minimum} or more"
        )
    return numbers


def _devices(values: Mapping[str, Any], hardware: str, label: str) -> list[str]:
    """Return the listed devices that `hardware` allows, by TorchServe's rules.

    An example is `processors: [cpu, {gpus: all}]`.
    """
    processors = values.get("processors", [hardware if hardware == "cpu" else {"gpus": "all"}])
    kinds = {
        "cuda" if isinstance(processor, Mapping) and "gpus" in processor else processor
        for processor in (processors if isinstance(processors, list) else [processors])
    }
    if not kinds <= {"cpu", "cuda"}:
        raise UsageError(
            f'{label}.processors is {processors!r}; it may list "cpu" and "gpus": "all"'
        )
    return sorted(kinds & {"cuda" if hardware == "gpu" else "cpu"})


def _input(values: Mapping[str, Any], file: Path, label: str) -> Path:
    """Return the path of an input file.

    TorchServe's own files give paths relative to the repository's root, so the parents of the file
    are searched too.
    """
    name = values.get("input")
    if not isinstance(name, str):
        raise UsageError(f"{label} has no input: name the file to send")
    bases = [Path.cwd(), file.parent, *file.absolute().parents]
    input_file = next((path for base in bases if (path := base / name).is_file()), None)
    if input_file is None:
        raise UsageError(
            f"{label}.input: {name} does not exist; paths are relative to this directory, or to"
            f" that of {file.name}"
        )
    return input_file
