"""The checks of an image against the contract of a container or pod.

They cover the health check, requests, and termination within the grace period.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tsx_archiver import open_archive
from tsx_cli.archive.check import ModelSample
from tsx_cli.check.entry import environment, free_ports, start_entry
from tsx_cli.check.report import Report
from tsx_cli.check.web import (
    HttpPlatform,
    check_health_under_load,
    check_metrics,
    check_ready,
    check_samples,
    check_stop,
)
from tsx_cli.common.options import archive_limits
from tsx_runtime.shared.safe_path import run_module

HEALTH_TIMEOUT_S = 5.0  # the timeout of HEALTHCHECK
RESPONSE_TIMEOUT_S = 120.0  # the server's default
GRACE_PERIOD_S = 30.0  # time between SIGTERM and SIGKILL
MAX_BODY_BYTES = 6553500  # the default of max_request_size, as in TorchServe


def check(
    report: Report,
    archive: Path,
    samples: Sequence[ModelSample],
    env: Mapping[str, str],
    directory: Path,
    startup: float,
) -> None:
    """Check the image's entry point, running as a container with the unpacked model."""
    name = unpack_model(archive, directory)
    inference, management, metrics = free_ports(3)
    ports = {"INFERENCE": inference, "MANAGEMENT": management, "METRICS": metrics}
    variables = {f"TSX_{role}_ADDRESS": f"http://127.0.0.1:{port}" for role, port in ports.items()}
    variables |= {
        "TSX_MODEL_DIR": str(directory / "model"),
        "TSX_TARGET": "container",
        "TSX_ENABLE_GRPC": "false",
        **env,
    }
    platform = HttpPlatform(
        inference,
        "/readyz",
        f"/predictions/{name}",
        HEALTH_TIMEOUT_S,
        RESPONSE_TIMEOUT_S,
        startup,
        GRACE_PERIOD_S,
        "container.startup_timeout",
    )
    with start_entry(directory, variables) as entry:
        if not check_ready(platform, entry, report):
            return
        _health_check(report, variables, directory)
        sample = check_samples(platform, samples, MAX_BODY_BYTES, report)
        check_health_under_load(platform, sample, report)
        check_metrics(metrics, "/metrics", HEALTH_TIMEOUT_S, "look at TSX_METRICS_ADDRESS", report)
        check_stop(platform, entry, sample, report)


def unpack_model(archive: Path, directory: Path) -> str:
    """Unpack the archive into `directory`, and return the model's name."""
    with open_archive(
        archive, cache=directory / "unpacking", limits=archive_limits()
    ) as opened_archive:
        opened_archive.directory.rename(directory / "model")
        return opened_archive.manifest.model_name


def _health_check(report: Report, env: Mapping[str, str], directory: Path) -> None:
    """Run the command of the image's HEALTHCHECK."""
    start = time.monotonic()
    try:
        process = subprocess.run(
            [sys.executable, *run_module("tsx_runtime.targets.health")],
            cwd=directory,
            env=environment(env),
            capture_output=True,
            text=True,
            timeout=HEALTH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        report.add(
            "the image's health check",
            False,
            f"nothing after {HEALTH_TIMEOUT_S:g} s",
            f"within {HEALTH_TIMEOUT_S:g} s",
            "the machine is too busy",
            timed=True,
        )
        return
    if process.returncode != 0:
        report.add(
            "the image's health check",
            False,
            f"exit code {process.returncode}",
            "0",
            process.stderr.strip()[-200:] or "it says nothing",
        )
        return
    report.within(
        "the image's health check",
        time.monotonic() - start,
        HEALTH_TIMEOUT_S,
        "the machine is too busy",
    )
