"""Recordings of platforms whose disk is lost reach S3: a Lambda function, SageMaker, and Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.platforms.lambda_api import function, function_url
from tests.support.platforms.s3_server import BUCKET, s3_server
from tests.support.platforms.sagemaker_host import container, unpack
from tests.support.servers import FreePorts
from tsx_cli.monitor.recordings import read_any
from tsx_runtime.recordings import Recorded

pytestmark = pytest.mark.usefixtures("processes")
ECHO = """
def handle(data, context):
    return None if data is None else [len(row.get("body") or row.get("data")) for row in data]
"""
CONFIG = "record: {answers: true}\n"


@pytest.fixture
def s3() -> Iterator[Any]:
    with s3_server() as client:
        yield client


def variables(s3: Any, directory: Path) -> dict[str, str]:
    return {
        "TSX_STATE_DIR": str(directory / "state"),
        "TSX_RECORD_URL": f"s3://{BUCKET}/recordings",
        "TSX_S3_ENDPOINT_URL": s3.meta.endpoint_url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


def uploaded(s3: Any) -> list[Recorded]:
    if not s3.list_objects_v2(Bucket=BUCKET).get("Contents"):
        return []
    return list(read_any(f"s3://{BUCKET}/recordings", s3.meta.endpoint_url))


def invoke_until_uploaded(host: Any, s3: Any) -> int:
    """Send large requests until an invocation uploads, and return their number."""
    # The thread that writes a request may be frozen until a later invocation.
    for number in range(1, 100):
        assert host.invoke({"body": "x" * 1_100_000}).json() == 1_100_000
        if uploaded(s3):
            return number
    raise AssertionError(host.log)


@pytest.mark.nightly
def test_a_frozen_function_uploads_a_megabyte_before_its_answer(tmp_path: Path, s3: Any) -> None:
    make_model(tmp_path / "model" / "echo.mar", ECHO, config=CONFIG)
    with function(tmp_path, variables(s3, tmp_path)) as host:
        number = invoke_until_uploaded(host, s3)
        entries = uploaded(s3)
        assert 1 <= len(entries) <= number
        assert (entries[0].model, entries[0].version, entries[0].answer) == (
            "echo",
            "1.0",
            b"1100000",
        )
        assert entries[0].request_id


def test_a_function_that_gets_a_signal_uploads_all_requests(tmp_path: Path, s3: Any) -> None:
    make_model(tmp_path / "model" / "echo.mar", ECHO, config=CONFIG)
    environment = {**variables(s3, tmp_path), "TSX_LAMBDA_RUNTIME": "tsx"}
    with function(tmp_path, environment, freezes=False) as host:
        assert host.invoke({"body": "direct"}).json() == 6
        event = function_url("/predictions/echo", "http", headers={"content-type": "text/plain"})
        answer = host.invoke(event).json()
        assert host.stop(10) == 0
    direct, over_http = uploaded(s3)
    assert over_http.request_id == answer["headers"]["x-request-id"]
    assert (direct.answer, over_http.answer) == (b"6", b"4")


def test_a_container_of_sagemaker_uploads_all_requests_at_its_end(
    tmp_path: Path, s3: Any, free_ports: FreePorts
) -> None:
    unpack(make_model(tmp_path / "echo.mar", ECHO, config=CONFIG), tmp_path)
    with container(tmp_path, *free_ports(1), variables(s3, tmp_path)) as host:
        host.wait_until_healthy()
        assert host.invoke(b"abc", "text/plain").body == b"3"
        assert host.stop() == 0
    [entry] = uploaded(s3)
    assert (entry.model, entry.body, entry.answer) == ("echo", b"abc", b"3")


@pytest.mark.nightly
def test_a_replica_of_ray_uploads_all_requests_at_its_end(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tsx_runtime.targets.ray.replica import ModelReplica

    for name, value in variables(s3, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TSX_CACHE_DIR", str(tmp_path / "cache"))
    archive = make_model(tmp_path / "echo.mar", ECHO, config=CONFIG)
    arguments = {
        "name": "app",
        "models": [{"name": "echo", "source": str(archive)}],
        "replica": {"num_cpus": 1},
    }
    scope = {
        "type": "http",
        "http_version": "1.1",
        "client": ("127.0.0.1", 1),
        "method": "POST",
        "path": "/predictions/echo",
        "raw_path": b"/predictions/echo",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"h"), (b"content-type", b"text/plain"), (b"content-length", b"3")],
    }

    async def run() -> None:
        # Ray Serve awaits the constructor and the end of an actor in the same way.
        replica: Any = object.__new__(ModelReplica)
        await ModelReplica.__init__(replica, arguments)  # type: ignore[misc]
        messages = [batch async for batch in replica.http(scope, b"abc", "echo")]
        assert b"3" in [message.get("body") for batch in messages for message in batch]
        await replica.__del__()
        replica.__dict__.pop("_resources")

    asyncio.run(run())
    [entry] = uploaded(s3)
    assert json.loads(entry.answer or b"") == 3
