"""The YAML of TorchServe's auto-benchmark and of its models (contract section 9.2), as cases to
measure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.common.failure import CliError, UsageError

WORKERS, BATCH_SIZES, DELAY, REQUESTS, CONCURRENCY = (
    [1],
    [1],
    200,
    100,
    10,
)  # where nothing is said, as TorchServe has it
USED = {
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
USED |= {"handler_profiling", "inference_model_url"}
LISTS = ("workers", "batch_size")
ALWAYS = {
    "exec_env": "local",
    "backend_profiling": False,
    "generate_graphs": False,
    "benchmark_engine": "ab",
}  # the defaults need no note
UNUSED = {
    "ts_version": (
        "no TorchServe is installed: tsx is measured, or with --against the server that runs there"
    ),
    "metrics_cmd": "that command is not run; results.json has the figures",
    "report_cmd": "that command is not run; the report stays in the directory that --output names",
}
FOLDERS = (
    ".",
    "models_config",
    "benchmarks/models_config",
)  # where the files of models are looked for


class Case(NamedTuple):
    """One load on one configuration of one model."""

    model: str
    mode: str
    url: str  # of the archive
    workers: int
    batch_size: int
    batch_delay: int  # milliseconds
    input: Path
    content_type: str | None
    requests: int
    concurrency: int
    device: str  # cpu or cuda
    profiled: bool  # the handler's own steps
    served_as: str  # the name that it is registered under

    @property
    def group(self) -> str:
        """TorchServe's name for what goes in one table."""
        return f"{self.mode}_{self.model}" + ("_gpu" if self.device == "cuda" else "")

    @property
    def name(self) -> str:
        """TorchServe's name of its directory."""
        return f"{self.group}_w{self.workers}_b{self.batch_size}"

    @property
    def configuration(self) -> Configuration:
        return Configuration(device=self.device, workers=self.workers, batch_size=self.batch_size)


class AutoBenchmarkPlan(NamedTuple):
    cases: list[Case]
    notes: list[str]  # of keys that mean nothing here


def read_plan(file: Path) -> AutoBenchmarkPlan:
    """The auto-benchmark's file, or one of a model. Raises CliError and UsageError."""
    given = _mapping(file)
    if "models" not in given:
        notes: dict[str, str] = {}
        cases = list(_of_model(given, file, "cpu", notes))
        return _plan(cases, notes, file)
    notes = {key: text for key, text in UNUSED.items() if key in given}
    notes |= {
        key: "tsx does not know this key"
        for key in given
        if key not in {*UNUSED, "models", "hardware"}
    }
    hardware = str(given.get("hardware") or "cpu")
    if hardware not in ("cpu", "gpu"):
        raise UsageError(f"{file}: hardware is '{hardware}'; tsx runs models on cpu and gpu")
    models = given["models"]
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise UsageError(f"{file}: models must be a list of YAML files")
    cases = []
    for name in models:
        found = _find(name, file)
        cases += list(_of_model(_mapping(found), found, hardware, notes))
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
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror or error}") from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # a date may have a thirteenth month
        raise UsageError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise UsageError(
            f"{file} is not a configuration of TorchServe's auto-benchmark: it must contain keys"
            " and values"
        )
    return given


def _find(name: str, beside: Path) -> Path:
    places = [beside.parent / folder / name for folder in FOLDERS]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise CliError(
            f"{beside}: the model's file {name} does not exist; tsx looked in"
            f" {', '.join(str(place.parent) for place in places)}"
        )
    return found


def _of_model(
    given: Mapping[str, Any], file: Path, hardware: str, notes: dict[str, str]
) -> Iterator[Case]:
    if "url" in given:  # the flat form, which benchmark-ab takes
        yield from _of_mode(file.stem, "custom", given, file, hardware, notes)
        return
    for model, modes in given.items():
        if not isinstance(modes, Mapping):
            raise UsageError(
                f"{file}: '{model}' must hold modes, such as eager_mode or scripted_mode"
            )
        for mode, values in modes.items():
            if not isinstance(values, Mapping):
                raise UsageError(
                    f"{file}: {model}.{mode} must hold keys such as url, workers and batch_size"
                )
            yield from _of_mode(str(model), str(mode), values, file, hardware, notes)


def _of_mode(
    model: str,
    mode: str,
    values: Mapping[str, Any],
    file: Path,
    hardware: str,
    notes: dict[str, str],
) -> Iterator[Case]:
    place = f"{file}: {model}.{mode}"
    if "/" in model + mode:  # they name directories
        raise UsageError(f"{place}: the name of a model or a mode must not contain a /")
    if not isinstance(values.get("content_type"), str | None):
        raise UsageError(
            f"{place}.content_type is {values['content_type']!r}; it must be text, such as"
            " image/png"
        )
    if not isinstance(values.get("url"), str):
        raise UsageError(f"{place} has no url of an archive")
    if values["url"].endswith(".war"):
        notes[f"{model}.{mode}"] = (
            "workflows are not measured by tsx bench; send requests to one with --against"
        )
        return
    for key, value in values.items():
        if key not in USED and ALWAYS.get(key, ...) != value:
            notes.setdefault(key, "it has no effect")
    counts = {
        key: _numbers(values, key, place, default)
        for key, default in (("workers", WORKERS), ("batch_size", BATCH_SIZES))
    }
    (delay,), (requests,), (concurrency,) = (
        _numbers(values, key, place, [default], least=least)
        for key, default, least in (
            ("batch_delay", DELAY, 0),
            ("requests", REQUESTS, 1),
            ("concurrency", CONCURRENCY, 1),
        )
    )
    for device, workers, batch_size in product(
        _devices(values, hardware, place), counts["workers"], counts["batch_size"]
    ):
        yield Case(
            model=model,
            mode=mode,
            url=values["url"],
            workers=workers,
            batch_size=batch_size,
            batch_delay=delay,
            input=_input(values, file, place),
            content_type=values.get("content_type"),
            requests=requests,
            concurrency=concurrency,
            device=device,
            profiled=values.get("handler_profiling") is True,
            served_as=_served_as(values, place),
        )


def _served_as(values: Mapping[str, Any], place: str) -> str:
    given = str(values.get("inference_model_url") or "predictions/benchmark")
    found = re.fullmatch(r"/?predictions/([A-Za-z0-9_.-]+)", given)
    if found is None:
        raise UsageError(
            f"{place}.inference_model_url is {given!r}; the URL of a model is predictions/NAME"
        )
    return found[1]


def _numbers(
    values: Mapping[str, Any], key: str, place: str, default: list[int], *, least: int = 1
) -> list[int]:
    given = values.get(key, default)
    found = given if isinstance(given, list) else [given]
    if (
        not found
        or not all(type(each) is int and each >= least for each in found)
        or (len(default) == 1 and len(found) > 1 and key not in LISTS)
    ):
        raise UsageError(
            f"{place}.{key} is {given!r}; it must be a whole number of {least} or more"
        )
    return found


def _devices(values: Mapping[str, Any], hardware: str, place: str) -> list[str]:
    """Of `processors: [cpu, {gpus: all}]` those that `hardware` names, as TorchServe chooses."""
    given = values.get("processors", [hardware if hardware == "cpu" else {"gpus": "all"}])
    kinds = {
        "cuda" if isinstance(each, Mapping) and "gpus" in each else each
        for each in (given if isinstance(given, list) else [given])
    }
    if not kinds <= {"cpu", "cuda"}:
        raise UsageError(f'{place}.processors is {given!r}; it may list "cpu" and "gpus": "all"')
    return sorted(kinds & {"cuda" if hardware == "gpu" else "cpu"})


def _input(values: Mapping[str, Any], file: Path, place: str) -> Path:
    """A path in TorchServe's own files begins where its repository does: above the file, where that
    is one of it.
    """
    given = values.get("input")
    if not isinstance(given, str):
        raise UsageError(f"{place} has no input: name the file to send")
    bases = [Path.cwd(), file.parent, *file.absolute().parents]
    found = next((path for base in bases if (path := base / given).is_file()), None)
    if found is None:
        raise UsageError(
            f"{place}.input: {given} does not exist; paths are relative to this directory, or to"
            f" that of {file.name}"
        )
    return found
