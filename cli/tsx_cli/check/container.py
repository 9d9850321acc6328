"""The contract of a container or pod: the health check, requests, and the end within the grace
period.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tsx_archiver import open_archive
from tsx_cli.archive.check import ModelSample
from tsx_cli.check.entry import environment, free_ports, started
from tsx_cli.check.report import Report
from tsx_cli.check.web import (
    Web,
    answers_samples,
    becomes_ready,
    ends_in_order,
    has_metrics,
    stays_well_under_load,
)
from tsx_cli.common.options import archive_limits
from tsx_runtime.shared.safe_path import run_module

HEALTH, ANSWER, GRACE = (
    5.0,
    120.0,
    30.0,
)  # seconds: HEALTHCHECK's time-out, the server's own, and from SIGTERM to SIGKILL
MOST = 6553500  # bytes: TorchServe's own limit, and the setting's


def check(
    report: Report,
    archive: Path,
    samples: Sequence[ModelSample],
    env: Mapping[str, str],
    place: Path,
    startup: float,
) -> None:
    """The model lies there unpacked, as the image has it."""
    name = unpack_model(archive, place)
    inference, management, metrics = free_ports(3)
    ports = {"INFERENCE": inference, "MANAGEMENT": management, "METRICS": metrics}
    given = {f"TSX_{role}_ADDRESS": f"http://127.0.0.1:{port}" for role, port in ports.items()}
    given |= {
        "TSX_MODEL_DIR": str(place / "model"),
        "TSX_TARGET": "container",
        "TSX_ENABLE_GRPC": "false",
        **env,
    }
    web = Web(
        inference,
        "/readyz",
        f"/predictions/{name}",
        HEALTH,
        ANSWER,
        startup,
        GRACE,
        "container.startup_timeout",
    )
    with started(place, given) as entry:
        if not becomes_ready(web, entry, report):
            return
        _health_check(report, given, place)
        good = answers_samples(web, samples, MOST, report)
        stays_well_under_load(web, good, report)
        has_metrics(metrics, "/metrics", HEALTH, "look at TSX_METRICS_ADDRESS", report)
        ends_in_order(web, entry, good, report)


def unpack_model(archive: Path, place: Path) -> str:
    """Returns the model's name."""
    with open_archive(archive, cache=place / "unpacking", limits=archive_limits()) as opened:
        opened.directory.rename(place / "model")
        return opened.manifest.model_name


def _health_check(report: Report, env: Mapping[str, str], place: Path) -> None:
    """The very command of the image's HEALTHCHECK."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *run_module("tsx_runtime.targets.health")],
            cwd=place,
            env=environment(env),
            capture_output=True,
            text=True,
            timeout=HEALTH,
            check=False,
        )
    except subprocess.TimeoutExpired:
        report.add(
            "the image's health check",
            False,
            f"nothing after {HEALTH:g} s",
            f"within {HEALTH:g} s",
            "the machine is too busy",
            timed=True,
        )
        return
    if done.returncode != 0:
        report.add(
            "the image's health check",
            False,
            f"exit code {done.returncode}",
            "0",
            done.stderr.strip()[-200:] or "it says nothing",
        )
        return
    report.within(
        "the image's health check", time.monotonic() - begin, HEALTH, "the machine is too busy"
    )
