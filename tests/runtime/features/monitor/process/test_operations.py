"""Reports and other operations of the monitor process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.runtime.features.monitor.process.local_monitor import CAT, DOG, LocalMonitor
from tests.support.servers import DEADLINE, FreePorts
from tsx_runtime import recordings
from tsx_runtime.errors import RequestNotFound, StoreUnavailable
from tsx_runtime.features.monitor.process import store
from tsx_runtime.features.monitor.process.events import EventSender


def test_answers_are_counted_by_group_and_truth(location: str) -> None:
    server = LocalMonitor(location, {"groups": ["sex"], "minGroup": 1})
    server.announce("1.0", recording=True)
    for number in range(40):
        server.sample(f"r{number}", {"sex": "fm"[number % 2]}, CAT)
    server.feed(*({"request_id": f"r{n}", "truth": "cat" if n % 4 else "dog"} for n in range(20)))
    women, men = server.version()["groups"][0]["groups"]
    assert (women["group"], women["count"], women["error"]["value"]) == ("f", 20, 0.5)
    assert (men["group"], men["count"], men["error"]["value"]) == ("m", 20, 0.0)
    quality = server.call("quality", version="1.0", since=0)
    assert quality["accuracy"] == {"count": 20, "total": 15, "squares": 15}
    server.monitor.close()


def test_numbers_have_a_mean_error_also_by_group(location: str) -> None:
    server = LocalMonitor(location, {"groups": ["region"], "minGroup": 1})
    for number in range(10):
        server.sample(f"r{number}", {"x": number}, 10.5)
        region = {"groups": {"region": "ns"[number % 2]}}
        server.feed({"request_id": f"r{number}", "truth": 10.5 + number % 2} | region)
    version = server.version()
    assert version["quality"]["mean_error"]["value"] == 0.5
    groups = {group["group"]: group["error"]["value"] for group in version["groups"][0]["groups"]}
    assert groups == {"n": 0.0, "s": 1.0}
    assert [row["error"] for row in server.call("worst", version="1.0", count=2)] == [1.0, 1.0]
    error = server.call("quality", version="1.0", since=0)["error"]
    assert error == {"count": 10, "total": 5, "squares": 5}
    server.monitor.close()


def test_a_version_that_drifts_raises_an_alarm_and_is_compared_with_the_next_one(
    tmp_path: Path,
) -> None:
    server = LocalMonitor(str(tmp_path / "monitor.sqlite"), {"windowSamples": 200})
    server.announce("2.0", registered=2.0)
    for number in range(450):
        server.sample(f"a{number}", {"age": 20 + number % 50}, CAT)
    server.monitor.work(time.time())
    for number in range(600):
        server.sample(f"b{number}", {"age": 20 + number % 50}, DOG, version="2.0")
    for number in range(300):
        server.sample(f"c{number}", {"age": 60 + number % 50}, CAT)
    items = [{"request_id": f"{name}{n}", "truth": "dog"} for n in range(400) for name in "ab"]
    server.feed(*items)
    report = server.call("report", dropped={"slow": 3})
    new, old = report["versions"]
    assert report["dropped"] == {"slow": 3}
    assert (new["version"], new["alarm"], old["alarm"]) == ("2.0", False, True)
    columns = {column["column"]: column for column in new["columns"]}
    assert columns["answer.class"]["previous_psi"] > 0.1
    comparison = report["comparisons"][0]
    assert (comparison["better"], comparison["difference"]["value"]) == ("2.0", 1.0)


def test_answers_and_counts_expire_but_open_contests_stay(location: str) -> None:
    server = LocalMonitor(location)
    past = time.time() - 86400 * 10
    server.sample("old", {"age": 1}, CAT, at=past)
    server.sample("new", {"age": 1}, CAT)
    contest = {"contest": {"reason": "It was a dog."}, "at": past}
    server.feed({"request_id": "old", "truth": "dog"} | contest)
    server.monitor.work(time.time())
    assert server.code({"request_id": "old", "truth": "dog"}) == "unknown_request"
    report = server.call("report")
    assert (report["contests"], report["versions"][0]["samples"]) == (1, 1)
    server.monitor.close()


def test_the_counts_of_corrected_truths_do_not_stay(location: str) -> None:
    server = LocalMonitor(location)
    server.sample("a", {}, CAT)
    for number in range(20):
        server.feed({"request_id": "a", "truth": f"class {number}", "replace": True})
    store = server.monitor.store
    store.expire()
    (row,) = store.read("SELECT COUNT(*) AS rows FROM tsx_monitor_counts WHERE kind = 1")
    assert row["rows"] == 1


def test_a_recorded_request_is_found_with_its_answer(tmp_path: Path) -> None:
    directory = tmp_path / "recordings"
    directory.mkdir()
    now = time.time()
    entries = [
        recordings.Recorded(
            now, "1.0", "", [], b'{"age": %d}' % n, 200, request_id=f"r{n}", answer=b"{}"
        )
        for n in range(3)
    ]
    data = recordings.file_head("m") + b"".join(map(recordings.encode, entries))
    (directory / "one.tsxrec").write_bytes(data)
    os.utime(directory / "one.tsxrec", (now + 5, now + 5))
    server = LocalMonitor(str(tmp_path / "state" / "monitor.sqlite"))
    server.announce("1.0", recording=True, recordings=str(directory))
    server.sample("r1", {"age": 1}, CAT, at=now)
    result = server.call("request", request_id="r1")
    assert result["answers"][0]["prediction"] == "cat"
    assert (result["recorded"]["body"], result["recorded"]["answer"]) == (
        "eyJhZ2UiOiAxfQ==",
        "e30=",
    )
    with pytest.raises(RequestNotFound):
        server.call("request", request_id="r7")


@pytest.mark.parametrize("problem", ["a directory", "no database", "a text"])
def test_a_store_that_cannot_be_used_refuses_feedback(tmp_path: Path, problem: str) -> None:
    store = tmp_path / "monitor.sqlite"
    location = str(store)
    if problem == "a directory":
        location = str(tmp_path)
    elif problem == "no database":
        location = f"postgresql://user:secret@/nothing?host={tmp_path}"
    else:
        store.write_text("a text" * 1000)
    server = LocalMonitor(location, {"windowSamples": 50})
    for number in range(110):
        server.sample(f"r{number}", {"age": number}, CAT)
    with pytest.raises(StoreUnavailable) as caught:
        server.feed({"request_id": "r1", "truth": "cat"})
    assert "secret" not in caught.value.message
    report = server.call("report")
    assert (report["versions"][0]["window_samples"], report["problem"]) == (
        60,
        caught.value.message,
    )


def test_a_store_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    server = LocalMonitor(str(tmp_path / "monitor.sqlite"))
    for id in "ab":
        server.sample(id, {}, CAT)
        server.monitor.flush()
        (tmp_path / "monitor.sqlite").unlink()
    server.sample("c", {}, CAT)
    assert server.feed({"request_id": "c", "truth": "cat"})["accepted"] == 1
    server.monitor.close()
    again = LocalMonitor(str(tmp_path / "monitor.sqlite"))
    assert again.feed({"request_id": "c", "truth": "cat"})["duplicates"] == 1
    assert again.code({"request_id": "b", "truth": "cat"}) == "unknown_request"


@pytest.mark.parametrize(("version", "release"), [(99, "a newer release"), (0, "an older release")])
def test_tables_of_another_release_are_refused_and_stay_as_they_are(
    location: str, monkeypatch: pytest.MonkeyPatch, version: int, release: str
) -> None:
    first = LocalMonitor(location)
    first.sample("r1", {"age": 1}, CAT)
    with first.monitor.store.transaction() as connection:
        connection.execute(text("UPDATE tsx_monitor_schema SET version = :v"), {"v": version})
    first.monitor.close()
    server = LocalMonitor(location)
    with pytest.raises(StoreUnavailable) as caught:
        server.feed({"request_id": "r1", "truth": "cat"})
    assert f"{release} (version {version}; " in caught.value.message
    assert "another monitor_store" in caught.value.message
    assert server.call("report")["problem"] == caught.value.message
    monkeypatch.setattr(store, "SCHEMA_VERSION", version)
    assert LocalMonitor(location).feed({"request_id": "r1", "truth": "cat"})["accepted"] == 1


def test_answers_wait_for_a_store_that_cannot_be_used_and_are_dropped_when_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.features.monitor.process.monitor.MAX_WAITING", 20)
    directory = tmp_path / "state"
    directory.write_text("in the way")
    server = LocalMonitor(str(directory / "monitor.sqlite"))
    for number in range(30):
        server.sample(f"r{number}", {"age": number}, CAT)
    server.monitor.work(time.time())
    assert "monitor.sqlite" in (server.monitor.store_problem or "")
    directory.unlink()
    assert server.feed({"request_id": "r29", "truth": "cat"})["accepted"] == 1
    report = server.call("report")
    assert (report["dropped"], report["versions"][0]["quality"]["answers"]) == ({"store": 20}, 1)


def test_a_baseline_that_cannot_be_read_is_a_problem_of_its_version(tmp_path: Path) -> None:
    server = LocalMonitor(str(tmp_path / "monitor.sqlite"))
    head = {"model": "m", "version": "1.0", "config": {}, "registered": 1.0}
    server.monitor.end("m", "1.0")
    server.monitor.set_version(head, b'{"format": 99, "rows": 1, "created": 1}')
    server.sample("r1", {"age": 1}, CAT)
    version = server.version()
    assert (version["baseline"], version["samples"]) == ("none", 1)
    assert "format 99" in version["problem"]


def test_samples_that_are_not_sent_as_events_are_in_the_report(
    tmp_path: Path, free_ports: FreePorts
) -> None:
    events = EventSender(f"http://127.0.0.1:{free_ports(1)[0]}/")
    server = LocalMonitor(str(tmp_path / "monitor.sqlite"), events=events)
    server.sample("r1", {"age": 1}, CAT)
    events.close(DEADLINE)
    assert server.call("report", dropped={"slow": 1})["dropped"] == {"events": 1, "slow": 1}


def test_a_recording_that_begins_does_not_end_the_window(tmp_path: Path) -> None:
    server = LocalMonitor(str(tmp_path / "monitor.sqlite"))
    for number in range(60):
        server.sample(f"r{number}", {"age": number}, CAT)
    server.announce("1.0", recording=True)
    server.sample("r60", {"age": 1}, CAT)
    version = server.version()
    assert (version["samples"], version["window_samples"]) == (61, 11)
