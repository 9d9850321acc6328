"""The texts of a report besides its figures: the winner, the environment, the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from tsx_cli.bench.load.results import Environment, Inputs, ModelInfo, Results, Usage
from tsx_cli.bench.report import shown
from tsx_cli.common.output import number


def title(results: Results) -> str:
    version = f" {results.model.version}" if results.model.version else ""
    return f"{results.model.name or results.against}{version}"


def subtitle(results: Results) -> str:
    bound = f"bound {results.slo}" if results.slo else "no bound was given"
    location = f"at {results.against}" if results.against else f"on {machine(results.environment)}"
    return f"tsx bench, {shown.moment(results.started)}, {location}; {bound}"


def machine(environment: Environment) -> str:
    gpus = f", {', '.join(environment.gpus)}" if environment.gpus else ""
    cores = f"{environment.cores} core{'s' if environment.cores != 1 else ''}"
    return f"{cores}, {environment.cpu or 'an unknown CPU'}{gpus}"


def pinned(results: Results) -> str:
    if results.pinning is None:
        return ""
    cores_by_side = {"server": results.pinning.server, "generator": results.pinning.generator}
    return ", ".join(
        f"{side} {','.join(map(str, cores))}" for side, cores in cores_by_side.items() if cores
    )


def heading(results: Results) -> str:
    if results.against is not None and results.winner is None:
        return "Measured at"
    if results.winner is None:
        return "No configuration was chosen"
    if results.tied:
        return "Recommended, of several that differ within the noise"
    title = "Highest throughput" if results.winner_leads else "Recommended"
    return f"{title} within {results.slo}" if results.slo else title


def best(results: Results) -> str:
    if results.winner is not None:
        return shown.name(results.trials[results.winner], results)
    if results.against is not None:
        return results.against
    if results.faster_unmeasured:
        return "The time was too short to choose"
    return (
        "No configuration met the bound"
        if results.slo and any(trial.points for trial in results.trials)
        else "Nothing was measured"
    )


def keys(results: Results) -> str:
    """Return the winner's settings in the format of model-config.yaml."""
    if results.winner is None or not results.trials[results.winner].configuration:
        return ""
    settings: dict[str, Any] = {
        key: value
        for key, value in results.trials[results.winner].as_configuration().keys().items()
        if value is not None
    }
    return yaml.safe_dump(settings, sort_keys=False).rstrip()


def failures(results: Results) -> list[tuple[str, str]]:
    """Return the name and the full log of each failure that the table abbreviates."""
    failed = [trial for trial in results.trials if trial.state == "failed" and trial.reason]
    return [
        (shown.name(trial, results), trial.reason or "")
        for trial in failed
        if shown.brief(trial.reason or "") != trial.reason
    ]


def facts(results: Results) -> list[tuple[str, str]]:
    """Return the names and values of the environment and the inputs, except unknown ones."""
    rows = [
        ("protocol", results.protocol),
        (
            "price per hour",
            None if results.price_per_hour is None else number(results.price_per_hour),
        ),
        ("pinned to cores", pinned(results)),
        (
            "server at that load",
            usage(trial.usage) if (trial := shown.detailed_trial(results)) else None,
        ),
        *moments(results.started, results.ended),
    ]
    return common_facts(results.model, results.environment, results.inputs) + [
        (name, value) for name, value in rows if value
    ]


def usage(samples: Sequence[Usage]) -> str:
    """Return the mean use of the cores and the GPU, and the maximum memory."""
    if not samples:
        return ""
    gpu_uses = [sample.gpu for sample in samples if sample.gpu is not None]
    parts = [
        f"{number(fmean(sample.cpu for sample in samples))} cores",
        f"{max(sample.memory_mib for sample in samples):,.0f} MiB at most",
        f"{fmean(gpu_uses):.0%} of the GPU" if gpu_uses else "",
    ]
    return ", ".join(filter(None, parts))


def common_facts(
    model: ModelInfo, environment: Environment, inputs: Inputs
) -> list[tuple[str, str]]:
    """Return the facts that the reports of `tsx bench` and `tsx optimize` share."""
    kinds = ", ".join(
        f"{kind or 'no type'} ({count})" for kind, count in inputs.content_types.items()
    )
    versions = {"tsx": environment.tsx, "torch": environment.torch, "Python": environment.python}
    rows = [
        ("model", model.archive or model.name),
        ("sha-256", model.sha256),
        ("size", None if model.size_mib is None else f"{model.size_mib:,.1f} MiB"),
        ("inputs", f"{inputs.count} different from {inputs.source}; {size_range(inputs)}"),
        ("content types", kinds),
        ("processor", machine(environment)),
        ("memory", f"{environment.memory_mib:,} MiB" if environment.memory_mib else None),
        ("system", environment.system),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
        (
            "noise",
            None
            if environment.noise is None
            else f"a fixed computation varied by {environment.noise:.1%}",
        ),
    ]
    return [(name, value) for name, value in rows if value]


def size_range(inputs: Inputs) -> str:
    if inputs.smallest == inputs.largest:
        return f"{inputs.smallest:,} bytes"
    return f"{inputs.smallest:,} to {inputs.largest:,} bytes, median {inputs.median:,}"


def moments(started: str, ended: str | None) -> list[tuple[str, str | None]]:
    return [("began", shown.moment(started)), ("ended", shown.moment(ended))]


def files(directory: Path) -> list[tuple[str, str]]:
    """Return the files of `--profile` in the report's directory.

    A file that a browser cannot show comes with a command that shows it.
    """
    profile = directory / "profile"
    paths = (
        sorted(
            file.relative_to(directory).as_posix() for file in profile.rglob("*") if file.is_file()
        )
        if profile.is_dir()
        else []
    )
    return [(file, f"snakeviz {file}" if file.endswith(".prof") else "") for file in paths]
