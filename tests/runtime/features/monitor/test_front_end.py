"""The front end of monitoring, with a program in place of the monitor process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.runtime.conftest import TALKER, RunningServer, make_settings, running_server
from tests.support.models import make_model
from tests.support.servers import running_children
from tsx_archiver.monitor.config import MonitorConfig
from tsx_runtime.errors import BadRequest, Unavailable
from tsx_runtime.features.monitor import channel, manager, settings
from tsx_runtime.features.monitor.feature import MonitorFeature
from tsx_runtime.features.monitor.messages import header_pattern
from tsx_runtime.features.monitor.settings import MonitorModelSettings

STAND_IN = Path(__file__).with_name("stand_in.py")
MONITOR = "/models/talker/monitor"
pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "COMMAND", (sys.executable, str(STAND_IN)))
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    config = "monitor: {share: 100%, key: 'header:x-own', windowSamples: 60}\n"
    make_model(path / "talker.mar", TALKER)
    make_model(path / "talker2.mar", TALKER, name="talker", version="2.0", config=config)
    make_model(
        path / "typed.mar",
        "class Handler:\n    monitor_fields = {'age': 'number', 'header:x-own': 'category'}\n"
        "    signature = {'input': {'type': 'object'}}\n"
        "    def initialize(self, context): pass\n"
        "    def handle(self, data, context): return ['a'] * len(data)\n",
        name="talker",
        version="3.0",
    )
    return path


@pytest.fixture(scope="module")
def shared_server(stand_in: None, store: Path) -> Iterator[RunningServer]:
    with running_server(make_settings(store)) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """Return a server whose model is not monitored, and whose process remembers nothing."""
    yield shared_server
    shared_server.management.delete(MONITOR)
    if monitor_processes():
        shared_server.call(lambda: manager_of(shared_server).channel.call("clear", {}))


def manager_of(server: RunningServer) -> manager.MonitorManager:
    return server.registry.feature(MonitorFeature).manager


def put(server: RunningServer, **config: Any) -> Any:
    """Turn monitoring on; the stand-in returns what it has received."""
    answer = server.management.put(MONITOR, json={"share": 100, **config})
    assert answer.status_code == 200, answer.text
    return answer.json()["heads"][-1]


def report(server: RunningServer) -> Any:
    answer = server.management.get(MONITOR)
    assert answer.status_code == 200, answer.text
    return answer.json()


def samples(server: RunningServer) -> list[Any]:
    return [head for head in report(server)["heads"] if head["kind"] == "sample"]


def test_a_model_without_monitoring_starts_no_process(server: RunningServer) -> None:
    assert server.ask().status_code == 200
    assert report(server) == {
        "model": "talker",
        "monitoring": False,
        "samples": 0,
        "dropped": {},
        "versions": [],
        "comparisons": [],
        "contests": 0,
    }
    refusal = server.inference.post("/feedback/talker", json={"key": "a", "truth": "b"})
    assert refusal.status_code == 409
    assert "tsx models monitor talker" in refusal.json()["message"]
    assert "tsx_monitor" not in server.metrics.get("/metrics").text
    assert monitor_processes() == []


def test_samples_carry_bodies_and_only_the_needed_headers(server: RunningServer) -> None:
    config = put(server, groups="header:X-Own", minGroup=5)["config"]
    assert (config["share"], config["groups"], config["min_group"]) == (100, ["header:X-Own"], 5)
    for lane in ("fast", "other"):
        answer = server.ask(
            b"[1]", lane=lane, content_type="application/json", x_own="1", x_other="2"
        )
    server.ask(b"e", path="/explanations/talker")
    server.ask(b"q", x_do="raise")
    server.ask(b"s", x_do="stream")
    first, second, failed, streamed = samples(server)
    assert first["headers"] == {"content-type": "application/json", "x-own": "1"}
    assert (first["model"], first["version"], first["status"]) == ("talker", "1.0", 200)
    assert second["request_id"] == answer.headers["x-request-id"]
    assert (second["body"], second["answer"]) == ("[1]", answer.text)
    assert second["answer_type"] == answer.headers.get("content-type", "")
    assert abs(second["at"] - time.time()) < 60
    assert failed["status"] == 500
    assert (streamed["body"], streamed["answer"]) == ("s", "abc")


def test_headers_with_credentials_are_not_examined(server: RunningServer) -> None:
    for config in ({"key": "header:X-Api-Key"}, {"groups": ["header:authorization"]}):
        refusal = server.management.put(MONITOR, json=config)
        assert (refusal.status_code, refusal.json()["type"]) == (400, "BadRequestException")
    # An archive may name such a header as well.
    pattern = header_pattern(["header:x-api-key", "header:x-own"])
    assert pattern.findall(b"id\r\nx-api-key: secret\r\nX-Own: 1") == [(b"X-Own", b"1")]


def test_versions_are_announced_with_what_they_report(server: RunningServer) -> None:
    put(server)
    server.register("typed.mar", initial_workers=1)
    server.management.put("/models/talker/record", json={})
    put(server, share=100, key="id")
    versions = [head for head in report(server)["heads"] if head["kind"] == "version"]
    last = {head["version"]: head for head in versions}
    assert last["3.0"]["fields"] == {"age": "number", "header:x-own": "category"}
    assert last["3.0"]["signature"] == {"type": "object"}
    assert last["1.0"]["fields"] == {}
    assert last["1.0"]["config"]["key"] == "id"
    assert last["1.0"]["recording"] is True
    assert last["1.0"]["recordings"].endswith("/recordings/talker")
    server.management.delete("/models/talker/record")
    server.management.delete("/models/talker/3.0")
    heads = report(server)["heads"]
    assert {head["version"] for head in heads if head["kind"] == "end"} == {"3.0"}
    assert [head["recording"] for head in heads if head["kind"] == "version"][-1] is False


def test_the_archive_turns_it_on_and_the_api_wins_after_a_restart(
    store: Path, tmp_path: Path
) -> None:
    settings = make_settings(store, state_dir=tmp_path)
    with running_server(settings) as server:
        server.register("talker2.mar", initial_workers=1)
        server.ask(b"x", x_own="17")
        (sample,) = samples(server)
        assert sample["headers"]["x-own"] == "17"
        assert server.management.delete(MONITOR).json()["monitoring"] is False
        server.ask(b"x")
    with running_server(settings) as server:
        server.register("talker2.mar", initial_workers=0)
        assert report(server)["monitoring"] is False
        put(server, key="id")
    with running_server(settings) as server:
        server.register("talker2.mar", initial_workers=0)
        (head,) = report(server)["heads"]
        assert (head["kind"], head["config"]["key"]) == ("version", "id")


def test_a_setting_of_the_model_overrides_its_archive(store: Path) -> None:
    with running_server(make_settings(store, models={"talker": {"monitor": False}})) as server:
        server.register("talker2.mar", initial_workers=0)
        assert report(server)["monitoring"] is False


def test_calls_pass_bodies_on_unread(server: RunningServer, error_of: Any) -> None:
    put(server)
    for lane in ("fast", "other"):
        content: Any = b'{"tru' if lane == "fast" else iter([b'{"t', b"ru"])
        answer = server.inference.post("/feedback/talker", content=content)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["arguments"] == {"model": "talker"}
        assert answer.json()["body"] == '{"tru'
    answer = server.management.post(f"{MONITOR}/contests/c1", content=b"no json")
    assert answer.json()["arguments"] == {"model": "talker", "id": "c1"}
    assert answer.json()["body"] == "no json"
    for path, arguments in (
        ("contests?state=open", {"state": "open"}),
        ("worst?count=3", {"version": "1.0", "count": 3}),
        ("requests/a/b", {"request_id": "a/b"}),
    ):
        answer = server.management.get(f"{MONITOR}/{path}")
        assert answer.json()["arguments"] == {"model": "talker", **arguments}
    too_large = server.inference.post("/feedback/talker", content=b"x" * 100_001)
    assert error_of(too_large)[0] == "PayloadTooLargeException"
    assert error_of(server.inference.post("/feedback/nobody", content=b"{}")) == (
        "ModelNotFoundException",
        "Model not found: nobody",
    )
    for config, expected in (
        ({"shar": 1}, "share"),
        ({"share": 0}, "greater than 0"),
        ({"fields": {"age": "integer"}}, "fields.age"),
    ):
        kind, text = error_of(server.management.put(MONITOR, json=config))
        assert kind == "BadRequestException"
        assert expected in text


def test_monitoring_needs_its_packages(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, error_of: Any
) -> None:
    monkeypatch.setattr(settings, "PACKAGES", ("no_such_package",))
    advice = "pip install 'tsx-serve[monitor]'"
    kind, text = error_of(server.management.put(MONITOR, json={"share": 5}))
    assert kind == "BadRequestException"
    assert advice in text
    with pytest.raises(BadRequest, match="monitor of model talker needs the extra monitor"):
        server.register("talker2.mar", initial_workers=0)
    version = server.registry.find("talker")
    models = {"talker": MonitorModelSettings(monitor=MonitorConfig())}
    monkeypatch.setattr(server.registry, "settings", Mock(models=models))
    with pytest.raises(BadRequest, match="monitor of model talker"):
        server.registry.feature(MonitorFeature).around(version, version.entry)


def test_feedback_needs_a_place_to_store_answers(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, error_of: Any
) -> None:
    put(server)
    monkeypatch.setattr(manager_of(server), "_store", None)
    kind, text = error_of(server.inference.post("/feedback/talker", content=b"{}"))
    assert kind == "ConflictStatusException"
    assert "monitor_store" in text


def test_a_killed_process_starts_again_and_requests_are_answered(
    server: RunningServer, until: Callable[[Callable[[], bool]], None]
) -> None:
    put(server)
    report(server)
    (process,) = monitor_processes()
    process.kill()
    process.wait(60)
    assert server.ask().status_code == 200
    # A call that comes before the death is noticed is refused with 503.
    until(lambda: server.management.get(MONITOR).status_code == 200)
    (version,) = [head for head in report(server)["heads"] if head["kind"] == "version"]
    assert version["version"] == "1.0"
    (successor,) = monitor_processes()
    assert successor.pid != process.pid


def test_a_process_that_ends_during_a_call_makes_the_call_fail(server: RunningServer) -> None:
    put(server)
    monitor = manager_of(server).channel
    outcome = server.call(lambda: failure_of(monitor.call("raise", {})))
    assert outcome.retry_after is not None
    assert report(server)["arguments"] == {"model": "talker", "dropped": {}}


def test_a_stopped_process_drops_samples_and_delays_no_request(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[[Callable[[], bool]], None],
) -> None:
    put(server)
    monkeypatch.setattr(channel, "MAX_WAITING_BYTES", 500_000)
    monkeypatch.setattr(channel, "CALL_TIMEOUT_S", 0.2)
    (process,) = monitor_processes()
    process.suspend()
    for _ in range(20):
        assert server.ask(b"x" * 50_000, x_do="bytes").status_code == 200
    late = server.management.get(MONITOR)
    assert (late.status_code, late.headers["retry-after"]) == (503, "10")
    dropped = manager_of(server).find("talker").dropped
    assert 0 < dropped["slow"] < 20
    text = server.metrics.get("/metrics").text
    assert 'reason="slow",' in text or 'reason="slow"}' in text
    # Announcements are never dropped.
    server.management.put(MONITOR, json={"share": 100, "key": "id"})
    process.resume()
    monkeypatch.setattr(channel, "CALL_TIMEOUT_S", 60)
    until(lambda: server.management.get(MONITOR).status_code == 200)
    heads = report(server)["heads"]
    assert [head["config"].get("key") for head in heads if head["kind"] == "version"][-1] == "id"
    # A process that reads nothing for too long is killed, and another one is started.
    process.suspend()
    monkeypatch.setattr(channel, "MAX_SILENCE_S", -1)
    until(lambda: not server.ask(b"x" * 50_000) or not process.is_running())
    monkeypatch.setattr(channel, "MAX_SILENCE_S", 60)
    until(lambda: server.management.get(MONITOR).status_code == 200)


def test_large_bodies_and_answers_are_counted_and_not_sent(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_SAMPLE_BYTES", 100)
    put(server)
    server.ask(b"x" * 101)
    server.ask(b"x", x_do="headers")
    server.ask(b"x" * 50)
    assert [(sample["body"], len(sample["answer"])) for sample in samples(server)] == [("x", 3)]
    assert report(server)["arguments"]["dropped"] == {"size": 2}


def test_the_process_of_a_killed_server_ends(server: RunningServer) -> None:
    put(server)
    report(server)
    (process,) = monitor_processes()
    # The end of the server closes the pipe.
    server.call(lambda: manager_of(server).channel._stdin.close())
    process.wait(60)
    assert not process.is_running()


@pytest.mark.anyio
async def test_calls_end_with_the_channel() -> None:
    started = channel.MonitorChannel([], {}, None, list, print)
    never = channel.MonitorChannel([], {}, None, list, print)
    started._task = asyncio.ensure_future(asyncio.sleep(600))  # a pause between two starts
    waiting = asyncio.ensure_future(started.call("report", {}))
    await asyncio.sleep(0)
    started.close()
    never.close()
    for call in (waiting, started.call("report", {}), never.call("report", {})):
        with pytest.raises(Unavailable):
            await call
    await started.wait_closed()


async def failure_of(call: Any) -> Any:
    with pytest.raises(Unavailable) as raised:
        await call
    return raised.value


def test_other_children_that_have_ended_are_no_monitor_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It stays a zombie.
    assert monitor_processes() == []
    child.wait()


def monitor_processes() -> list[psutil.Process]:
    return running_children(os.getpid(), str(STAND_IN))
