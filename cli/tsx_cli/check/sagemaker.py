"""SageMaker's contract:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tsx_cli.archive.check import ModelSample
from tsx_cli.check.entry import free_ports, started, try_request
from tsx_cli.check.report import Report
from tsx_cli.check.web import (
    Web,
    answers_samples,
    becomes_ready,
    ends_in_order,
    has_metrics,
    stays_well_under_load,
    takes_the_largest,
)
from tsx_cli.deploy.engine.facts import write_model_data
from tsx_cli.deploy.preflight.limits import LIMITS

PING, CONNECT, STOP = 2.0, 0.25, 30.0  # seconds


def check(
    report: Report,
    archive: Path,
    samples: Sequence[ModelSample],
    env: Mapping[str, str],
    place: Path,
    startup: float,
) -> None:
    """As the host does: the model unpacked at one place, `serve` started, asked, and stopped."""
    unpack_model(archive, place)
    limits = LIMITS["sagemaker"]
    (port,) = free_ports(1)
    web = Web(
        port,
        "/ping",
        "/invocations",
        PING,
        limits["time"].most,
        startup,
        STOP,
        "sagemaker.startup_timeout",
        CONNECT,
    )
    given = {
        "SAGEMAKER_BASE_DIR": str(place),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "TSX_TARGET": "sagemaker",
        **env,
    }
    with started(place, given) as entry:
        if not becomes_ready(web, entry, report):
            return
        most = round(limits["request"].most)
        good = answers_samples(web, samples, most, report)
        takes_the_largest(web, most, report)
        stays_well_under_load(web, good, report)
        _tells(web, report)
        code = "" if entry.is_up else f"ended with {entry.process.returncode}"
        if not report.add("still up after all of that", entry.is_up, code, "", "see its log"):
            report.log = entry.lines
        ends_in_order(web, entry, good, report)


def unpack_model(archive: Path, place: Path) -> None:
    """`model.tar.gz` as `tsx deploy` uploads it, unpacked as the host does."""
    with tarfile.open(write_model_data(archive, place)) as packed:
        (
            packed.extractall(place / "model", filter="data")
            if hasattr(tarfile, "data_filter")
            else packed.extractall(place / "model")
        )
    (place / "model.tar.gz").unlink()


def _tells(web: Web, report: Report) -> None:
    """What the platform reads beside answers."""
    has_metrics(
        web.port, "/metrics at the same port", PING, "leave TSX_METRICS_ADDRESS as it is", report
    )
    batch, what = (
        try_request(web.port, "GET", "/execution-parameters", PING),
        "/execution-parameters, of batch transform",
    )
    if isinstance(batch, str):
        report.add(what, False, batch, "an answer", "see its log")
        return
    if batch.status == 404:
        return  # it may be left out
    try:
        response = json.loads(batch.body)
    except ValueError:
        response = None
    right = (
        isinstance(response, dict)
        and {"MaxConcurrentTransforms", "BatchStrategy", "MaxPayloadInMB"} <= response.keys()
    )
    report.add(
        what,
        right,
        batch.body[:100].decode(errors="replace").strip(),
        "three keys",
        "this is a bug in tsx: please report it",
    )
