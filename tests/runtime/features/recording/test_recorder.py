"""Which parts of requests are recorded, and which recordings are kept."""

from __future__ import annotations

import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.clients.talker import until
from tsx_archiver.monitor.recording import RecordingConfig
from tsx_runtime.features.recording.recorder import (
    MAX_WAITING_BYTES,
    CapturedRequest,
    HeaderFilter,
    Recorder,
)
from tsx_runtime.features.recording.segments import FILES_PER_RECORDING, Segments
from tsx_runtime.recordings import Recorded, encode, file_head, read

pytestmark = pytest.mark.anyio
SECRETS = """Authorization Proxy-Authorization Cookie Set-Cookie X-Api-Key apikey X-Auth-Token X-Amz-Security-Token X-Amz-Date
X-Csrf-Token X-Session-Id X-Forwarded-For Forwarded X-Real-IP CF-Connecting-IP X-Goog-Iap-Jwt-Assertion X-Password x-signature"""


def header_block(*names: str) -> str:
    return "".join(f"{name}: v\r\n" for name in names)


def test_identifying_and_connection_headers_are_not_recorded() -> None:
    names = [
        *SECRETS.split(),
        "Host",
        "Content-Length",
        "Transfer-Encoding",
        "Connection",
        "Expect",
        ":workflow-node",
    ]
    kept_headers = [
        "Content-Type",
        "X-Request-Kind",
        "ts_request_sequence_id",
        "Accept-Language",
        "x-tsx-priority",
    ]
    assert HeaderFilter(None).headers(header_block(*names, *kept_headers)) == [
        (name, "v") for name in kept_headers
    ]
    # Headers with secrets are not recorded even if they are listed.
    only = HeaderFilter(["accept-language", "Authorization"])
    assert only.headers(header_block(*names, *kept_headers)) == [
        ("Content-Type", "v"),
        ("Accept-Language", "v"),
    ]


def test_secrets_of_a_url_in_a_header_are_not_recorded() -> None:
    headers = HeaderFilter(None).headers("x-tsx-callback-url: https://a.example/?token=s3cret\r\n")
    assert headers == [("x-tsx-callback-url", "https://a.example/?token=***")]


def test_identifying_query_parameters_are_not_recorded() -> None:
    assert (
        HeaderFilter(None).query("a=1&access_token=x&b=2&api%5Fkey=y&api-key=z&&Signature=s")
        == "a=1&b=2&"
    )


@pytest.mark.parametrize(
    ("values", "sampling_rate", "size", "age"),
    [
        ({}, 100, 100_000_000, 86400),
        ({"share": "1%", "max_size": "2GB", "max_age": "7d"}, 1, 2 * 10**9, 7 * 86400),
        ({"share": 0.5, "max_size": 70000, "max_age": 90}, 0.5, 70000, 90),
        ({"share": "12.5", "max_size": "0.1 mb", "max_age": "1.5h"}, 12.5, 100_000, 5400),
    ],
)
def test_recording_terms_accept_numbers_and_units(
    values: dict[str, object], sampling_rate: float, size: int, age: float
) -> None:
    terms = RecordingConfig.model_validate(values)
    assert (terms.share, terms.max_size, terms.max_age) == (sampling_rate, size, age)
    assert RecordingConfig.model_validate(terms.model_dump()) == terms


@pytest.mark.parametrize(
    "invalid_terms",
    [
        {"share": 0},
        {"share": "101%"},
        {"max_size": "1 horse"},
        {"max_size": 3},
        {"max_age": "soon"},
        {"max_age": 0},
        {"shar": 1},
    ],
)
def test_invalid_recording_terms_are_refused(invalid_terms: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RecordingConfig.model_validate(invalid_terms)


def an_entry(time_s: float, size: int) -> Recorded:
    return Recorded(time_s, "1.0", "", (), b"x" * size)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9000)), max_size=60), st.integers(0, 3)
)
def test_recordings_stay_within_their_size_and_lose_the_oldest_first(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], restart: int
) -> None:
    directory = tmp_path_factory.mktemp("segments") / "m"
    max_bytes, now, written_times = 20_000, 1_700_000_000.0, []
    segments = Segments(directory, "m", max_bytes, 10**9)
    for number, (elapsed_s, size) in enumerate(steps):
        now += elapsed_s
        data = encode(an_entry(now, size))
        if segments.write(data, now):
            written_times.append(now)
        else:
            assert len(data) > max_bytes // 2
        if restart and number % 20 == restart:
            segments.close()
            segments = Segments(directory, "m", max_bytes, 10**9)
        assert segments.stored_size().size <= max_bytes
    segments.close()
    read_times = [entry.at for entry in read(directory)] if written_times else []
    assert read_times == written_times[len(written_times) - len(read_times) :]
    assert read_times or not written_times


def test_recording_files_are_private_and_removed_when_old(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    segments = Segments(tmp_path / "m", "m", 1_000_000, 80)
    segments.write(encode(an_entry(now, 10)), now)
    segments.write(encode(an_entry(now + 1, 10)), now + 1)
    (file,) = (tmp_path / "m").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o700
    # A new file begins after an eighth of max_age.
    segments.write(encode(an_entry(now + 11, 10)), now + 11)
    assert segments.stored_size().files == 2
    assert segments.stored_size().oldest == now
    segments.sweep(file.stat().st_mtime + 200)
    assert segments.stored_size().files == 0
    assert segments.write(encode(an_entry(now + 500, 10)), now + 500)
    segments.remove()
    assert not (tmp_path / "m").exists()


def record_request(recorder: Recorder, body: bytes = b"x", time_s: float = 1.0) -> None:
    recorder.capture(
        CapturedRequest(
            time_s,
            "1.0",
            b"id\r\na=1\r\nX-A: b\r\nCookie: c\r\n",
            body,
            200,
            0.5,
            b"x-c: d\r\nset-cookie: e\r\n",
            b"yes",
        )
    )


@asynccontextmanager
async def recording(directory: Path, **values: object) -> AsyncIterator[Recorder]:
    config = RecordingConfig.model_validate(values)
    recorder = Recorder("m", config, directory / "m", HeaderFilter(None))
    try:
        yield recorder
    finally:
        await recorder.close()


async def test_the_recorder_writes_all_requests_at_its_end_and_none_later(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        for time_s in (3.0, 1.0, 2.0):
            record_request(recorder, b"%d" % time_s, time_s)
        await recorder.close()
        record_request(recorder)
    entries = list(read(tmp_path))
    assert [entry.body for entry in entries] == [b"1", b"2", b"3"]
    expected = Recorded(
        1.0, "1.0", "a=1", (("X-A", "b"),), b"1", 200, 0.5, (("x-c", "d"),), b"yes", "m"
    )
    assert entries[0] == expected._replace(request_id="id")


async def test_requests_are_dropped_and_counted_if_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_gate = threading.Event()
    write = Segments.write
    monkeypatch.setattr(
        Segments, "write", lambda *arguments: disk_gate.wait(30) and write(*arguments)
    )

    async with recording(tmp_path, max_size="1GB") as recorder:
        body = b"x" * (MAX_WAITING_BYTES // 4)
        for _ in range(6):
            record_request(recorder, body)
        assert recorder.dropped == {"slow": 3}
        disk_gate.set()
        await until(lambda: recorder.recorded == 3)
        record_request(recorder, body)
        await until(lambda: recorder.recorded == 4)


async def test_requests_are_dropped_and_counted_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    monkeypatch.setattr("tsx_runtime.features.recording.recorder.DISK_RETRY_S", 0.0)
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    async with recording(tmp_path) as recorder:
        record_request(recorder, b"a")
        await until(lambda: recorder.recorded == 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, old_limit[1]))
        try:
            for count in (1, 2):
                record_request(recorder, b"b" * 2000)
                await until(lambda count=count: recorder.dropped == {"disk": count})  # type: ignore[misc]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        assert recorder.problem is not None
        record_request(recorder, b"c")
        await until(lambda: recorder.recorded == 2)
        assert recorder.problem is None
    assert [entry.body for entry in read(tmp_path)] == [b"a", b"c"]
    assert caplog.text.count("cannot be recorded") == 1


async def test_a_failed_write_is_logged_once_and_recording_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def encode_or_fail(entry: Recorded) -> bytes:
        if entry.body == b"odd":
            raise ValueError("odd")
        return encode(entry)

    monkeypatch.setattr("tsx_runtime.features.recording.recorder.encode", encode_or_fail)

    async with recording(tmp_path) as recorder:
        for body in (b"odd", b"odd", b"even"):
            record_request(recorder, body)
        await until(lambda: recorder.recorded == 1)
        assert recorder.dropped == {"disk": 2}
    assert [entry.body for entry in read(tmp_path)] == [b"even"]
    assert caplog.text.count("Traceback") == 1


async def test_a_request_as_large_as_the_recording_is_not_recorded(tmp_path: Path) -> None:
    async with recording(tmp_path, max_size=64 << 10) as recorder:
        record_request(recorder, b"x" * (64 << 10))
        await until(lambda: recorder.dropped == {"size": 1})
    assert not (tmp_path / "m").exists()


def test_a_file_header_leaves_room_for_entries(tmp_path: Path) -> None:
    assert len(file_head("m" * 255)) < (64 << 10) // FILES_PER_RECORDING
