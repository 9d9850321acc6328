"""The monitor process, with a real store and the frames of a server."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.features.monitor.process.local_monitor import CAT, LocalMonitor
from tests.runtime.features.monitor.process.monitor_client import MonitorClient
from tsx_runtime.features.monitor.messages import FRAME, encode_frame
from tsx_runtime.features.monitor.process import main

Start = Callable[..., MonitorClient]


def send_samples(client: MonitorClient, count: int, **head: Any) -> None:
    for number in range(count):
        request = {"age": 20 + number % 50, "sex": "fm"[number % 2]}
        client.sample(f"r{number}", request, CAT, **head)


def truths(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return feedback by which each fourth answer is wrong."""
    return [
        {"request_id": f"r{number}", "truth": "cat" if number % 4 else "dog"} | fields
        for number in range(count)
    ]


def test_samples_become_windows_groups_and_quality(start: Start, tmp_path: Path) -> None:
    client = start(tmp_path / "monitor.sqlite")
    assert client.ready == {"kind": "ready", "problem": None}
    client.monitor({"groups": ["sex"], "windowSamples": 100}, recording=True)
    send_samples(client, 460)
    assert client.give_feedback(*truths(200)) == {"accepted": 200, "duplicates": 0, "errors": []}
    version = client.report()["versions"][0]
    assert (version["samples"], version["windows"], version["alarm"]) == (460, 2, False)
    assert version["quality"]["accuracy"]["value"] == 0.75
    assert version["quality"]["calibration"][0]["confidence"] == pytest.approx(0.9)
    women, men = version["groups"][0]["groups"]
    assert (women["group"], women["count"], women["error"]["value"]) == ("f", 230, 0.5)
    assert (men["group"], men["count"], men["error"]["value"]) == ("m", 230, 0.0)
    state = client.read_state()
    while state["accuracy"] is None:
        state = client.read_state()
    assert (state["feedback"], state["accuracy"]) == (200, 0.75)
    quality = client.call("quality", version="1.0", since=0)[1]
    assert quality["accuracy"] == {"count": 200, "total": 150, "squares": 150}
    assert (quality["drift"], quality["windows"]) == (0.0, 2)


def test_the_process_has_the_lowest_priority_also_among_sessions(start: Start) -> None:
    pid = start(None).process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert os.getsid(pid) == pid
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.exists() and autogroup.read_text():
        assert autogroup.read_text().split()[-1] == "19"


def test_a_killed_process_loses_nothing_that_was_committed(start: Start, tmp_path: Path) -> None:
    location = tmp_path / "monitor.sqlite"
    config = {"windowSamples": 100}
    first = start(location)
    first.monitor(config)
    send_samples(first, 150)
    first.give_feedback(*truths(100))
    first.kill()
    second = start(location)
    second.monitor(config)
    send_samples(second, 150)  # The ids are the same.
    version = second.report()["versions"][0]
    assert (version["quality"]["answers"], version["quality"]["accuracy"]["value"]) == (100, 0.75)
    assert second.give_feedback(*truths(100))["duplicates"] == 100
    assert second.give_feedback(*truths(150))["accepted"] == 50


def test_a_process_ends_with_its_input_and_continues_its_windows_later(
    start: Start, tmp_path: Path
) -> None:
    store = tmp_path / "private" / "monitor.sqlite"
    config = {"windowSamples": 100}
    first = start(store)
    first.monitor(config)
    send_samples(first, 430)
    first.call("report")
    for number in (signal.SIGINT, signal.SIGTERM):
        first.process.send_signal(number)
    assert first.close() == 0
    assert first.stderr == ""
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    second = start(store)
    second.monitor(config)
    send_samples(second, 60)
    version = second.report()["versions"][0]
    assert (version["windows"], version["baseline"]) == (1, "first window")
    assert version["window_samples"] == 60  # Rows are not stored, and the fields are known.


@pytest.mark.nightly
@pytest.mark.slow
def test_two_servers_share_a_database(start: Start, database: str) -> None:
    servers = [start(database, instance=name) for name in ("one", "two")]
    for server in servers:
        server.monitor({"groups": ["sex"]})
    for number in range(300):
        request = {"age": number, "sex": "fm"[number % 2]}
        servers[number % 2].sample(f"r{number}", request, CAT)
    assert all(server.call("report")[0] == 200 for server in servers)
    items = truths(300)
    accepted = [server.give_feedback(*items)["accepted"] for server in servers]
    assert accepted == [300, 0]
    for server in servers:
        version = server.report()["versions"][0]
        assert version["samples"] == 300
        assert version["quality"]["accuracy"]["value"] == 0.75
        assert [group["count"] for group in version["groups"][0]["groups"]] == [150, 150]


def test_bad_frames_and_bodies_do_not_end_the_process(start: Start, tmp_path: Path) -> None:
    client = start(tmp_path / "monitor.sqlite")
    client.monitor()
    values = random.Random(5)
    junk: list[Any] = [None, [], {}, 7, "x", "\ud800\0", -1, {"model": "m"}, [[]] * 3]
    kinds = ["samples", "version", "end", "call", "other", 5]
    names = ["model", "version", "sizes", "id", "operation", "arguments", "config", "at"]
    for _ in range(100):
        head = {"kind": values.choice(kinds)} | {
            name: values.choice(junk) for name in names if values.random() < 0.7
        }
        text = values.choice([json.dumps(head).encode(), values.randbytes(20), b"[]", b"null"])
        body = values.randbytes(values.randrange(50))
        client.send_bytes(FRAME.pack(len(text), len(body)) + text + body)
    for number in range(100):
        answer = values.choice(junk)
        client.sample(
            f"bad{number}\0\ud800", values.choice(junk), answer, status=values.choice([200, 500])
        )
    client.sample("good", {"age": 1}, CAT)
    assert client.call("nothing")[0] == 500
    status, error = client.call("report", other=1)
    assert (status, error["type"]) == (500, "InternalServerException")
    assert client.report()["samples"] == 101
    assert client.give_feedback({"request_id": "good", "truth": "cat"})["accepted"] == 1
    assert client.close() == 0
    assert client.stderr.count("Traceback") < 20


def test_without_a_store_drift_is_watched_and_feedback_is_refused(start: Start) -> None:
    client = start(None)
    assert "monitor_store" in client.ready["problem"]
    client.monitor({"windowSamples": 50})
    send_samples(client, 400)
    report = client.report()
    assert (report["versions"][0]["windows"], report["dropped"]) == (2, {})
    assert report["problem"]
    status, error = client.call("feedback", truths(1))
    assert (status, error["type"]) == (503, "ServiceUnavailableException")


def test_a_result_that_no_frame_can_have_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "MAX_HEAD_BYTES", 300)
    (source, requests), (results, target) = os.pipe(), os.pipe()
    call = {"kind": "call", "id": 7, "operation": "report", "arguments": {"model": "m"}}
    os.write(requests, encode_frame(call))
    os.close(requests)
    monitor = LocalMonitor(str(tmp_path / "monitor.sqlite")).monitor
    with os.fdopen(target, "wb") as output:
        main.MonitorProcess(monitor, output).run(source)
    with os.fdopen(results, "rb") as frames:
        text = frames.read()
    assert b'"status": 500' in text
    os.close(source)
