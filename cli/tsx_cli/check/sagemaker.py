"""The checks of an image against SageMaker's contract.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tsx_cli.archive.check import ModelSample
from tsx_cli.check.entry import free_ports, start_entry, try_request
from tsx_cli.check.report import Report
from tsx_cli.check.web import (
    HttpPlatform,
    check_health_under_load,
    check_largest_body,
    check_metrics,
    check_ready,
    check_samples,
    check_stop,
)
from tsx_cli.deploy.engine.facts import write_model_data
from tsx_cli.deploy.preflight.limits import LIMITS

PING_TIMEOUT_S, CONNECT_TIMEOUT_S, STOP_TIMEOUT_S = 2.0, 0.25, 30.0


def check(
    report: Report,
    archive: Path,
    samples: Sequence[ModelSample],
    env: Mapping[str, str],
    directory: Path,
    startup: float,
) -> None:
    """Check `serve` in the way SageMaker's host runs it: start, requests, stop."""
    unpack_model(archive, directory)
    limits = LIMITS["sagemaker"]
    (port,) = free_ports(1)
    platform = HttpPlatform(
        port,
        "/ping",
        "/invocations",
        PING_TIMEOUT_S,
        limits["time"].most,
        startup,
        STOP_TIMEOUT_S,
        "sagemaker.startup_timeout",
        CONNECT_TIMEOUT_S,
    )
    variables = {
        "SAGEMAKER_BASE_DIR": str(directory),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "TSX_TARGET": "sagemaker",
        **env,
    }
    with start_entry(directory, variables) as entry:
        if not check_ready(platform, entry, report):
            return
        max_bytes = round(limits["request"].most)
        sample = check_samples(platform, samples, max_bytes, report)
        check_largest_body(platform, max_bytes, report)
        check_health_under_load(platform, sample, report)
        _check_endpoints(platform, report)
        code = "" if entry.is_up else f"ended with {entry.process.returncode}"
        if not report.add("still up after all of that", entry.is_up, code, "", "see its log"):
            report.log = entry.lines
        check_stop(platform, entry, sample, report)


def unpack_model(archive: Path, directory: Path) -> None:
    """Unpack the `model.tar.gz` that `tsx deploy` uploads, as SageMaker's host does."""
    with tarfile.open(write_model_data(archive, directory)) as packed:
        (
            packed.extractall(directory / "model", filter="data")
            if hasattr(tarfile, "data_filter")
            else packed.extractall(directory / "model")
        )
    (directory / "model.tar.gz").unlink()


def _check_endpoints(platform: HttpPlatform, report: Report) -> None:
    """Check the endpoints that the platform reads in addition to predictions."""
    check_metrics(
        platform.port,
        "/metrics at the same port",
        PING_TIMEOUT_S,
        "leave TSX_METRICS_ADDRESS as it is",
        report,
    )
    batch = try_request(platform.port, "GET", "/execution-parameters", PING_TIMEOUT_S)
    label = "/execution-parameters, of batch transform"
    if isinstance(batch, str):
        report.add(label, False, batch, "an answer", "see its log")
        return
    if batch.status == 404:
        return  # The endpoint is optional.
    try:
        response = json.loads(batch.body)
    except ValueError:
        response = None
    is_valid = (
        isinstance(response, dict)
        and {"MaxConcurrentTransforms", "BatchStrategy", "MaxPayloadInMB"} <= response.keys()
    )
    report.add(
        label,
        is_valid,
        batch.body[:100].decode(errors="replace").strip(),
        "three keys",
        "this is a bug in tsx: please report it",
    )
