"""Requests of a real server are recorded on both lanes and across a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import DEADLINE, TALKER, RunningServer, make_settings, running_server
from tests.support.models import make_model
from tests.support.platforms.s3_server import BUCKET, s3_server
from tsx_runtime.core.concurrency.periodic import repeat
from tsx_runtime.features.recording.feature import RecordingFeature
from tsx_runtime.recordings import Recorded, read


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_model(tmp_path / "talker.mar", TALKER)
    return tmp_path


def put_record(server: RunningServer, **terms: Any) -> Any:
    answer = server.management.put("/models/talker/record", json=terms)
    assert answer.status_code == 200, answer.text
    return answer.json()


def recording(server: RunningServer) -> Any:
    return server.management.get("/models/talker/record").json()


def recorded(server: RunningServer) -> list[Recorded]:
    # The report is answered once all earlier requests are on the disk.
    report = recording(server)
    return list(read(Path(report["directory"]))) if report["files"] else []


@pytest.mark.usefixtures("processes")
def test_requests_are_recorded_unchanged_but_without_credentials(
    store: Path, error_of: Any
) -> None:
    settings = make_settings(store, state_dir=store / "state")
    with running_server(settings) as server:
        server.register("talker.mar", initial_workers=1)
        assert recording(server)["recording"] is False
        report = put_record(server, share="100%", max_size="1MB", max_age="1d")
        directory = store / "state" / "recordings" / "talker"
        assert report["directory"] == str(directory)
        ids = [
            server.ask(
                b"body " + lane.encode(),
                "/models/talker/invoke?a=1&token=x",
                lane=lane,
                authorization="Bearer s3cret",
                x_own="1",
            ).headers["x-request-id"]
            for lane in ("fast", "other")
        ]
        # A request that names a version is not recorded.
        server.ask(b"none", "/predictions/talker/1.0")
        assert server.ask(b"", x_do="raise").status_code == 500
        assert server.ask(b"s", x_do="stream").text == "abc"
        entries = recorded(server)
        assert [(entry.body, entry.status, entry.answer) for entry in entries] == [
            (b"body fast", 200, None),
            (b"body other", 200, None),
            (b"", 500, None),
            (b"s", 200, None),
        ]
        assert [entry.request_id for entry in entries[:2]] == ids
        for entry in entries[:2]:
            assert (entry.query, entry.version) == ("a=1", "1.0")
            names = {name.lower() for name, _ in entry.headers}
            assert "x-own" in names
            assert not names & {"authorization", "host", "content-length", "transfer-encoding"}
        for file in directory.iterdir():
            assert b"s3cret" not in file.read_bytes()
        # Changed terms keep the recorded requests.
        put_record(server, answers=True)
        assert server.ask(b"t", x_do="stream").text == "abc"
        assert server.ask(b"t", x_do="headers").headers["x-own"] == "1"
        stream_entry, plain_entry = recorded(server)[4:]
        assert (stream_entry.answer, plain_entry.answer) == (b"abc", b"a,b")
        assert ("X-Own", "1") in plain_entry.answer_headers
        assert recording(server)["recorded"] == 2
    with running_server(settings) as server:
        server.register("talker.mar", initial_workers=1)
        assert recording(server)["terms"]["answers"] is True
        server.ask(b"after")
        assert recorded(server)[-1].body == b"after"
        report = server.management.delete("/models/talker/record").json()
        assert (report["recording"], report["files"]) == (False, 3)
        assert "x-tsx-model-version" not in server.ask(b"unrecorded").headers
        assert len(recorded(server)) == 7
        assert server.management.delete("/models/talker/record?remove=true").json()["files"] == 0
        assert error_of(server.management.get("/models/other/record")) == (
            "ModelNotFoundException",
            "Model not found: other",
        )
        for terms, expected in (
            ({"shar": 1}, "shar"),
            ({"max_size": "1 horse"}, "100MB"),
            ({"share": 0}, "share"),
        ):
            kind, text = error_of(server.management.put("/models/talker/record", json=terms))
            assert kind == "BadRequestException"
            assert expected in text


@pytest.mark.usefixtures("processes")
def test_sampling_and_a_header_list_limit_the_recording(store: Path) -> None:
    with running_server(make_settings(store, record_headers=["X-Own"])) as server:
        server.register("talker.mar", initial_workers=1)
        put_record(server, share=30)
        for _ in range(100):
            server.ask(b"x", x_own="1", x_other="2")
        entries = recorded(server)
        # Six standard deviations around the expected 30.
        assert 30 - 28 < len(entries) < 30 + 28
        names = {name.lower() for entry in entries for name, _ in entry.headers}
        assert names - {"explain", "url_path"} == {"x-own"}
        server.call(lambda: server.registry.unregister("talker"))
        server.register("talker.mar", initial_workers=1)
        assert recording(server)["recording"] is False


@pytest.mark.usefixtures("processes")
def test_a_configured_recording_starts_with_the_model_until_a_client_changes_it(
    tmp_path: Path,
) -> None:
    config = "record: {share: 50%, answers: true}\n"
    make_model(tmp_path / "talker.mar", TALKER, config=config)
    make_model(tmp_path / "other.mar", TALKER, config=config)
    make_model(tmp_path / "third.mar", TALKER, config="record: true\n")
    models = {"other": {"record": '{"max_size": "2GB"}'}, "third": {"record": False}}
    settings = make_settings(tmp_path, state_dir=tmp_path / "state", models=models)
    with running_server(settings) as server:
        server.register("talker.mar", initial_workers=0)
        server.register("other.mar", initial_workers=0)
        assert recording(server)["terms"] == {
            "share": 50.0,
            "max_size": 100_000_000,
            "max_age": 86400.0,
            "answers": True,
        }
        server.register("third.mar", initial_workers=0)
        assert server.management.get("/models/third/record").json()["recording"] is False
        other = server.management.get("/models/other/record").json()["terms"]
        assert (other["max_size"], other["answers"]) == (2 * 10**9, False)
        put_record(server, share=1)
        assert server.management.delete("/models/other/record").status_code == 200
    with running_server(settings) as server:
        server.register("talker.mar", initial_workers=0)
        server.register("other.mar", initial_workers=0)
        assert recording(server)["terms"]["share"] == 1
        assert server.management.get("/models/other/record").json()["recording"] is False


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_failed_upload_is_the_problem_of_a_recording(store: Path) -> None:
    with s3_server() as s3:
        settings = make_settings(
            store, record_url="s3://nowhere/", s3_endpoint_url=s3.meta.endpoint_url
        )
        with running_server(settings) as server:
            server.register("talker.mar", initial_workers=1)
            put_record(server)
            server.ask(b"x")
            manager = server.registry.feature(RecordingFeature).recorders
            server.call(lambda: manager.before_freeze(60, ends=True))
            report = recording(server)
            assert (report["recorded"], "NoSuchBucket" in report["problem"]) == (1, True)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("interval", "body"), [(1, b"waits"), (3600, b"x" * 20_000)], ids=["waiting", "full"]
)
def test_waiting_requests_and_full_files_are_uploaded_in_the_background(
    store: Path, interval: int, body: bytes
) -> None:
    with s3_server() as s3:
        settings = make_settings(
            store,
            record_url=f"s3://{BUCKET}",
            record_upload_interval=interval,
            s3_endpoint_url=s3.meta.endpoint_url,
        )
        with running_server(settings) as server:
            server.register("talker.mar", initial_workers=1)
            put_record(server, max_size="80KiB")
            manager = server.registry.feature(RecordingFeature).recorders
            uploads = repeat(interval / 4, manager.upload)
            task = server.call(lambda: asyncio.ensure_future(uploads))
            server.ask(body)
            server.ask(body)
            end = time.monotonic() + DEADLINE
            while not (listing := s3.list_objects_v2(Bucket=BUCKET)).get("KeyCount"):
                assert time.monotonic() < end
                time.sleep(0.02)  # The server of S3 runs in this process.
            assert listing["Contents"][0]["Key"].startswith("talker/")
            server.call(task.cancel)
