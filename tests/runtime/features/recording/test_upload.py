"""Recordings are uploaded to S3 once, also after failures and restarts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.features.recording.test_recorder import record_request
from tests.support.clients.talker import until
from tests.support.platforms.s3_server import BUCKET, s3_server
from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.features.recording.recorder import HeaderFilter, Recorder
from tsx_runtime.features.recording.segments import Segments
from tsx_runtime.features.recording.upload import RecordingUploader
from tsx_runtime.recordings import read

pytestmark = pytest.mark.anyio
numbers = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server() as client:
        yield client


@pytest.fixture
def prefix() -> str:
    return f"s3://{BUCKET}/{next(numbers)}/"


@asynccontextmanager
async def uploading(
    directory: Path, url: str, s3: Any, **values: object
) -> AsyncIterator[Recorder]:
    config = RecordingConfig.model_validate(values)
    uploader = RecordingUploader(url, s3.meta.endpoint_url)
    recorder = Recorder("m", config, directory / "m", HeaderFilter(None), uploader)
    try:
        yield recorder
    finally:
        await recorder.close()


def objects(s3: Any, url: str) -> dict[str, bytes]:
    """Return the contents of the objects of a prefix by the last parts of their keys."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    entries = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
    keys = [entry["Key"] for entry in entries]
    return {
        key.removeprefix(prefix): s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in keys
    }


async def test_each_file_is_uploaded_once_and_stays_on_the_disk(
    tmp_path: Path, s3: Any, prefix: str
) -> None:
    async with uploading(tmp_path, prefix, s3) as recorder:
        record_request(recorder, b"a")
        await recorder.upload(3600)
        assert objects(s3, prefix) == {}  # The file is younger than an hour.
        await recorder.upload()
        record_request(recorder, b"b")
    stored = objects(s3, prefix)
    files = sorted((tmp_path / "m").glob("*.tsxrec"))
    assert [entry.body for entry in read(tmp_path)] == [b"a", b"b"]
    assert sorted(stored.values()) == sorted(file.read_bytes() for file in files)
    parts = [key.split("/") for key in stored]
    assert {(part[0], len(part)) for part in parts} == {("m", 3)}
    assert len({host for _, host, _ in parts}) == 1
    # The next server uploads only what is new.
    async with uploading(tmp_path, prefix, s3) as recorder:
        record_request(recorder, b"c")
    new = objects(s3, prefix).keys() - stored.keys()
    assert len(new) == 1


async def test_failed_uploads_are_repeated_while_requests_are_recorded(
    tmp_path: Path, s3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = "s3://created-later/prefix"
    async with uploading(tmp_path, url, s3) as recorder:
        for body in (b"a", b"b"):
            record_request(recorder, body)
            await recorder.upload()
            assert "NoSuchBucket" in (recorder.upload_problem or "")
        assert (recorder.recorded, recorder.dropped) == (2, {})
        s3.create_bucket(Bucket="created-later")
        await recorder.upload()
        assert recorder.upload_problem is None
        assert len(objects(s3, url)) == 2
    assert caplog.text.count("recordings wait for an upload") == 1


async def test_a_full_file_is_uploaded_at_once(tmp_path: Path, s3: Any, prefix: str) -> None:
    async with uploading(tmp_path, prefix, s3, max_size="64KiB") as recorder:
        assert not recorder.has_waiting(3600, 1000)
        record_request(recorder, b"x" * 5000)
        await until(lambda: recorder.recorded == 1)
        assert recorder.has_waiting(3600, 1000)
        assert not recorder.has_waiting(3600, 10_000)
        assert recorder.has_waiting(0, 10_000)
        record_request(recorder, b"x" * 5000)
        await until(lambda: objects(s3, prefix))
        assert len(objects(s3, prefix)) == 1


def test_a_file_that_is_removed_before_its_upload_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segments = Segments(tmp_path, "m", 80_000, 10**9, uploads=True)
    for number in range(12):
        segments.write(b"x" * 9000, 1_700_000_000.0 + number)
        for file in segments.ended_files(0.0, 3600)[: number == 0]:
            segments.mark_uploaded(file)
    assert "was not uploaded to record_url" in caplog.text
    segments.remove()
    assert not tmp_path.exists()
