"""Recorded requests are read from files, directories and S3 in the order of their times."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.monitor.test_data_capture import DOCUMENTED
from tests.support.platforms.s3_server import BUCKET, s3_server
from tsx_cli.common.failure import CliError
from tsx_cli.monitor.recordings import read_any
from tsx_runtime.recordings import Recorded, encode, file_head

LAYOUT = "churn/AllTraffic/2026/02/14/{}/25-49-333-{}.jsonl"


def recording(*times: int) -> bytes:
    entries = [Recorded(float(time), "1.0", "", (), b"") for time in times]
    return file_head("m") + b"".join(map(encode, entries))


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server() as client:
        yield client


@pytest.fixture(params=["directory", "S3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Return a directory or a prefix, a function that writes a file there, and an endpoint."""
    if request.param == "directory":

        def write(name: str, content: bytes) -> None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)

        yield str(tmp_path), write, None
        return
    client = request.getfixturevalue("s3")
    prefix = tmp_path.name

    def put(name: str, content: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=content)

    yield f"s3://{BUCKET}/{prefix}", put, client.meta.endpoint_url


def test_recordings_of_several_servers_are_read_by_their_starts(
    location: tuple[str, Any, Any],
) -> None:
    source, write, endpoint = location
    write("m/pod-b/20260214T172549-000000.tsxrec", recording(1, 2))
    write("m/pod-a/20260214T172550-000000.tsxrec", recording(3, 4))
    write("m/pod-b/20260214T172551-000000.tsxrec", recording(5))
    write("m/notes.txt", b"")
    assert [(entry.at, entry.model) for entry in read_any(source, endpoint)] == [
        (float(time), "m") for time in (1, 2, 3, 4, 5)
    ]


def test_a_capture_of_an_endpoint_is_read_by_hours(location: tuple[str, Any, Any]) -> None:
    source, write, endpoint = location
    times = {"18": "2026-02-14T18:25:49Z", "17": "2026-02-14T17:25:49Z"}
    for hour, time in times.items():
        line = DOCUMENTED.replace("2022-02-14T17:25:49Z", time)
        write(LAYOUT.format(hour, "x"), line.encode())
    first, second = read_any(source, endpoint)
    assert first.at < second.at
    assert (first.model, first.version) == ("churn", "AllTraffic")
    only = f"{source}/{LAYOUT.format('18', 'x')}"
    assert [entry.at for entry in read_any(only, endpoint)] == [second.at]


def test_missing_and_damaged_files_are_named(location: tuple[str, Any, Any]) -> None:
    source, write, endpoint = location
    write("notes.txt", b"")
    with pytest.raises(CliError, match=r"contains neither a \*\.tsxrec nor a \*\.jsonl"):
        list(read_any(source, endpoint))
    write("a.tsxrec", gzip.compress(b""))
    with pytest.raises(CliError, match=f"{source}/a.tsxrec is not a recording"):
        list(read_any(source, endpoint))
    write("b.jsonl", b"x")
    with pytest.raises(CliError, match=r"b\.jsonl, line 1, "):
        list(read_any(f"{source}/b.jsonl", endpoint))
    with pytest.raises(CliError, match=r"missing\.tsxrec"):
        list(read_any(f"{source}/missing.tsxrec", endpoint))
