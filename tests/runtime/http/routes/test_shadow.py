"""A shadow gets copies, and clients see nothing of it: not its answers, not its errors, not that it
hangs, crashes or is killed.
"""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.installed import install_plugins
from tests.support.models import STATEFUL, make_model
from tsx_runtime.core.shadowing.mirror import LONGEST, MOST_COPIES
from tsx_runtime.settings.traffic_policy import NOTHING

# Two versions of one model: what they are asked to do differently is in the body.
TWINS = """
import json, os, time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    return [act(idx, bytes(row["body"]).decode(), context) for idx, row in enumerate(data)]


def act(idx, word, context):
    version = context.manifest["model"]["modelVersion"]
    shadow = version == "2.0"
    headers = context.get_all_request_header(idx)
    if "x-notes" in headers:
        with open(headers["x-notes"], "a") as notes:
            notes.write(version + " " + word + " " + headers.get("x-tsx-shadow", "") + " " + context.get_request_id(idx) + chr(10))
    if word.startswith("/") and shadow:
        deadline = time.monotonic() + 90
        while not Path(word).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
    if word == "exit" and shadow:
        os._exit(7)
    if word == "raise" and shadow:
        raise ValueError("broken on purpose")
    if word == "both":
        raise ValueError("broken in " + version)
    if word == "large":
        return "x" * (2 << 20 if shadow else 10)
    if word == "huge":
        return "x" * (2 << 20)
    if word == "list":
        return json.dumps([0.5 + shadow * 1e-5 + number for number in range(20_000)])
    if word in ("stream", "streams"):
        from ts.handler_utils.utils import send_intermediate_predict_response

        for part in ("a", "b" if word == "stream" or not shadow else "B"):
            send_intermediate_predict_response([part], {idx: context.get_request_id(idx)}, "", 200, context)
        return "c"
    if word == "image":
        return bytes(range(250, 256)) + version.encode()
    answer = {"cat": 0.75 + shadow * 1e-5, "dog": 0.25} if word != "other" else {"cat": 1 - shadow, "dog": 0.5}
    return json.dumps(answer if word != "echo" else {"echo": word, "id": context.get_request_id(idx)})
"""
PLUGIN = """
import threading

go = threading.Event()
seen = []


def judge(request, first, second):
    seen.append((request, first, second))
    if request == b"hang":
        go.wait(60)
    if request == b"fail":
        raise RuntimeError("broken on purpose")
    return True if request == b"right" else "not to my liking"
"""
Until = Callable[[Callable[[], object]], None]


@pytest.fixture(scope="module")
def served(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store, packages = tmp_path_factory.mktemp("twins"), tmp_path_factory.mktemp("packages")
    for number in ("1.0", "2.0"):
        make_model(store / f"twin-{number}.mar", TWINS, name="twin", version=number)
    install_plugins(
        packages,
        "plugin_that_judges",
        PLUGIN,
        {"comparisons": {"mine": "plugin_that_judges:judge"}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        with running_server(make_settings(store, plugins=["mine"], job_queue_size=1000)) as running:
            for number in ("1.0", "2.0"):
                running.register(f"twin-{number}.mar", initial_workers=1)
            yield running
        sys.modules.pop("plugin_that_judges", None)


@pytest.fixture
def twins(served: RunningServer) -> Iterator[RunningServer]:
    yield served
    served.call(lambda: served.registry.set_traffic("twin", NOTHING))


def begin(server: RunningServer, compare: dict[str, Any] | None = None, **more: Any) -> None:
    """A shadow of all requests, that has counted nothing."""
    said = {"to": "2.0", "share": 100, "compare": compare or {"kind": "exact"}} | more
    answer = server.management.put("/models/twin/shadow?force=true", json=said)
    assert answer.status_code == 200, answer.text
    server.management.delete("/models/twin/shadow")


def reported(server: RunningServer) -> Any:
    answer = server.management.get("/models/twin/shadow")
    assert answer.status_code == 200, answer.text
    return answer.json()


def settled(server: RunningServer, until: Until, count: int = 1) -> Any:
    """What is told once so many requests were copied or shed, and nothing is under way."""

    def is_settled() -> bool:
        report = reported(server)
        requests = report["requests"]
        dealt = requests["copied"] + sum(
            number for reason, number in requests["shed"].items() if reason != "refused"
        )
        return bool(dealt >= count and not requests["under_way"])

    until(is_settled)
    return reported(server)


def ask(server: RunningServer, word: str, *, lane: str = "fast", **headers: str) -> httpx.Response:
    answer = server.ask(word.encode(), "/predictions/twin", lane=lane, **headers)
    assert answer.headers["x-tsx-model-version"] == "1.0"
    return answer


@pytest.mark.parametrize("lane", ["fast", "other"])
def test_clients_get_the_answers_of_the_primary_and_both_are_compared(
    twins: RunningServer, lane: str, until: Until
) -> None:
    begin(twins, {"kind": "top-k", "k": 1})
    assert ask(twins, "same", lane=lane).json() == {"cat": 0.75, "dog": 0.25}
    report = settled(twins, until)
    assert (report["agreed"], report["disagreed"], report["disagreement"]["rate"]) == (1, 0, 0.0)
    assert report["disagreement"]["high"] > 0.5  # nobody is sure after one
    headers = {
        "authorization": "Bearer s3cret",
        "cookie": "session=s3cret",
        "x_api_key": "s3cret",
        "x_user": "ann",
    }
    assert ask(twins, "other", lane=lane, **headers).json() == {"cat": 1, "dog": 0.5}
    report = settled(twins, until, 2)
    assert (report["agreed"], report["disagreed"], report["disagreement"]["rate"]) == (1, 1, 0.5)
    assert report["requests"] == {"copied": 2, "under_way": 0, "shed": {}}
    assert report["latency"]["requests"] == 2
    assert report["latency"]["primary"]["p99"] > 0 < report["latency"]["shadow"]["p50"]
    (example,) = report["examples"]
    assert example["why"] == "top labels: cat (primary), dog (shadow)"
    assert example["body"] == {"size": 5, "text": "other"}
    assert (example["primary"]["version"], example["shadow"]["version"]) == ("1.0", "2.0")
    assert example["primary"]["body"]["text"] == '{"cat": 1, "dog": 0.5}'
    assert example["headers"]["x-user"] == "ann"
    assert "s3cret" not in str(report)


def test_a_copy_has_an_id_of_its_own_and_says_what_it_is(
    twins: RunningServer, tmp_path: Path, until: Until
) -> None:
    begin(twins)
    answer = ask(twins, "other", x_notes=str(tmp_path / "notes"))
    report = settled(twins, until)
    lines = [line.split(" ") for line in (tmp_path / "notes").read_text().splitlines()]
    assert [line[:3] for line in lines] == [["1.0", "other", ""], ["2.0", "other", "1"]]
    assert lines[0][3] == answer.headers["x-request-id"] == report["examples"][0]["request_id"]
    assert lines[1][3] != lines[0][3]


@pytest.mark.parametrize(
    ("compare", "word", "agrees"),
    [
        ({"kind": "exact"}, "same", False),
        ({"kind": "numeric"}, "same", True),
        ({"kind": "numeric"}, "list", True),  # large enough for a thread
        ({"kind": "exact"}, "stream", True),
        ({"kind": "exact"}, "streams", False),
        ({"kind": "exact"}, "raise", False),
        ({"kind": "exact"}, "both", True),
        ({"kind": "plugin", "name": "mine"}, "wrong", False),
    ],
)
def test_answers_agree_as_the_comparison_says(
    twins: RunningServer, compare: dict[str, Any], word: str, agrees: bool, until: Until
) -> None:
    begin(twins, compare)
    status = ask(twins, word).status_code
    assert status == (500 if word == "both" else 200)
    report = settled(twins, until)
    assert (report["agreed"], report["disagreed"]) == ((1, 0) if agrees else (0, 1)), report
    expected = {"raise": (0, 1), "both": (1, 1)}.get(word, (0, 0))
    assert (report["errors"]["primary"], report["errors"]["shadow"]) == expected


def test_numbers_are_compared_within_a_tolerance_and_their_largest_difference_is_shown(
    twins: RunningServer, until: Until
) -> None:
    twins.management.put("/models/twin/shadow", json={"to": "2.0", "share": 100}).raise_for_status()
    assert "largest_difference" not in reported(twins)  # nothing was compared
    ask(twins, "same")
    report = settled(twins, until)
    assert (report["agreed"], report["shadow"]["compare"], report["tolerance"]) == (
        1,
        {"kind": "numeric"},
        {"rtol": 1e-4, "atol": 1e-6},
    )
    assert report["largest_difference"] == pytest.approx(1e-5)
    ask(twins, "other")
    report = settled(twins, until, 2)
    assert (report["disagreed"], report["largest_difference"]) == (1, 1.0)


@pytest.mark.usefixtures("processes")
def test_a_shadow_that_crashes_fails_alone(twins: RunningServer, until: Until) -> None:
    begin(twins)
    assert ask(twins, "exit").status_code == 200
    report = settled(twins, until)
    assert (report["disagreed"], report["errors"]) == (
        1,
        {"primary": 0, "shadow": 1, "comparison": 0},
    )
    assert report["examples"][0]["why"] == "status: 200 (primary), 500 (shadow)"
    until(lambda: reported(twins)["state"] == "running")


def test_what_is_too_large_is_not_compared(twins: RunningServer, until: Until) -> None:
    begin(twins)
    assert len(ask(twins, "huge").content) == 2 << 20
    assert settled(twins, until)["requests"] == {"copied": 0, "under_way": 0, "shed": {"size": 1}}
    assert len(ask(twins, "large").content) == 10
    report = settled(twins, until, 2)
    assert (report["agreed"], report["disagreed"], report["errors"]["comparison"]) == (0, 0, 1)
    assert report["last_problem"] == f"an answer of the shadow has more than {LONGEST} bytes"


def test_a_shadow_that_hangs_keeps_nobody_waiting(
    twins: RunningServer, tmp_path: Path, until: Until
) -> None:
    begin(twins)
    go = tmp_path / "go"
    for _ in range(10):
        assert (
            ask(twins, str(go)).status_code == 200
        )  # while the shadow works on the first of them, all are answered
    report = reported(twins)
    assert (
        report["requests"]["under_way"] <= 3
    )  # one that it works on, one that it has, and one that waits
    assert report["requests"]["shed"]["shadow-busy"] >= 7
    go.touch()
    report = settled(twins, until, 10)
    assert report["agreed"] + report["disagreed"] == report["requests"]["copied"] >= 1
    assert report["errors"]["shadow"] == 0


def test_a_shadow_may_take_longer_to_answer_than_a_copy_may_wait_for_it(
    twins: RunningServer, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.core.shadowing.mirror.PATIENCE", 0.3)
    begin(twins)
    ask(twins, str(tmp_path / "go"))
    until(lambda: reported(twins)["requests"]["under_way"])
    time.sleep(0.6)
    (tmp_path / "go").touch()
    report = settled(twins, until)
    assert (report["requests"]["shed"], report["requests"]["copied"]) == (
        {},
        report["agreed"] + report["disagreed"],
    )


def test_copies_that_hang_are_let_go_when_the_shadow_is_turned_off(
    twins: RunningServer, tmp_path: Path, until: Until
) -> None:
    begin(twins)
    for _ in range(3):
        ask(twins, str(tmp_path / "go"))
    until(lambda: reported(twins)["requests"]["under_way"])
    off = twins.management.patch("/models/twin/traffic", json={"shadow": None})
    assert off.json()["traffic"] == {}
    assert reported(twins)["state"] == "off"  # and what was seen stays
    assert (
        "x-tsx-model-version"
        not in twins.inference.post("/predictions/twin", content=b"same").headers
    )
    (tmp_path / "go").touch()
    until(lambda: not reported(twins)["requests"]["under_way"])
    assert reported(twins)["requests"]["copied"] >= 1


def test_only_so_many_copies_are_under_way(
    twins: RunningServer, tmp_path: Path, until: Until
) -> None:
    twins.call(
        lambda: twins.registry.change("twin", "2.0", {"batch_size": 100})
    )  # so that its queue is not what stops them
    begin(twins)
    try:
        for _ in range(MOST_COPIES + 5):
            ask(twins, str(tmp_path / "go"))
        until(lambda: reported(twins)["requests"]["shed"].get("under-way") == 5)
        assert reported(twins)["requests"]["under_way"] == MOST_COPIES
    finally:
        (tmp_path / "go").touch()
        settled(twins, until)
        twins.call(lambda: twins.registry.change("twin", "2.0", {"batch_size": 1}))


def test_a_shadow_gives_way_while_requests_wait_for_the_primary(
    twins: RunningServer, until: Until
) -> None:
    begin(twins)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(twins, "same"), range(200)))
    assert {answer.status_code for answer in answers} == {200}
    shed = settled(twins, until, 200)["requests"]["shed"]
    assert shed["primary-busy"] > 0


@pytest.mark.usefixtures("processes")
def test_what_cannot_be_copied_is_reported(twins: RunningServer, until: Until) -> None:
    begin(twins)
    twins.call(lambda: twins.registry.scale("twin", "2.0", 0))
    try:
        assert (reported(twins)["state"], reported(twins)["why"]) == (
            "waiting",
            "No worker serves version 2.0 now.",
        )
        ask(twins, "same")
        assert settled(twins, until)["requests"]["shed"] == {"not-ready": 1}
    finally:
        twins.call(lambda: twins.registry.scale("twin", "2.0", 1))
    begin(twins, to="3.0")
    ask(twins, "same")
    report = settled(twins, until)
    assert (report["state"], report["why"]) == ("waiting", "Version 3.0 is not registered.")


def test_a_version_that_answers_everything_is_no_shadow(
    twins: RunningServer, until: Until, error_of: Any
) -> None:
    """Nothing would ever be copied to it."""
    why = "Version 1.0 of model twin already answers all requests, so no requests can be copied to it."
    said = {"to": "1.0", "share": 100}
    refused = error_of(twins.management.put("/models/twin/shadow", json=said))
    assert refused == ("BadRequestException", f"{why} Name another version, such as 2.0.")
    labelled = {
        "weights": {"1.0": 1, "2.0": 0},
        "labels": {"live": "1.0"},
        "shadow": {"to": "live", "share": 5},
    }
    assert error_of(twins.management.put("/models/twin/traffic", json=labelled))[1].startswith(why)
    assert reported(twins)["state"] == "off"
    twins.management.put(
        "/models/twin/traffic", json={"weights": {"2.0": 1}, "shadow": said}
    ).raise_for_status()
    assert reported(twins)["state"] == "running"
    twins.management.patch(
        "/models/twin/traffic", json={"weights": None}
    ).raise_for_status()  # it has become the one that answers
    assert (reported(twins)["state"], reported(twins)["why"]) == ("waiting", why)
    ask(twins, "same")
    assert settled(twins, until)["requests"]["shed"] == {"same-version": 1}


def test_who_names_a_version_is_not_copied_and_a_share_is_a_share(
    twins: RunningServer, until: Until
) -> None:
    begin(twins, share=30)
    for _ in range(20):
        assert twins.inference.post("/predictions/twin/1.0", content=b"same").status_code == 200
    assert settled(twins, until, 0)["requests"] == {"copied": 0, "under_way": 0, "shed": {}}
    for _ in range(200):
        ask(twins, "same")
    report = settled(twins, until, 20)
    assert (
        60 - 40 < report["requests"]["copied"] + sum(report["requests"]["shed"].values()) < 60 + 40
    )  # six deviations


def test_a_plugin_that_fails_or_hangs_is_reported_and_holds_nothing_up(
    twins: RunningServer, until: Until
) -> None:
    module = sys.modules["plugin_that_judges"]
    begin(twins, {"kind": "plugin", "name": "mine"})
    ask(twins, "fail")
    report = settled(twins, until)
    assert (report["errors"]["comparison"], report["last_problem"]) == (
        1,
        "the plugin 'mine' failed: RuntimeError: broken on purpose",
    )
    begin(twins, {"kind": "plugin", "name": "mine", "timeout": 0.05})
    for count in range(1, 7):  # more than there are threads
        ask(twins, "hang")
        report = settled(twins, until, count)
    assert report["errors"]["comparison"] == 6
    assert (
        report["last_problem"]
        == "4 comparisons that exceeded their time limit are still running, so no more are started"
    )
    module.go.set()

    def compares_again() -> bool:
        ask(twins, "right")
        settled(twins, until)
        return bool(reported(twins)["agreed"])

    until(compares_again)
    request, first, second = module.seen[-1]
    assert (request, first.status, second.status, first.body) == (
        b"right",
        200,
        200,
        b'{"cat": 0.75, "dog": 0.25}',
    )


def test_the_numbers_are_metrics_and_are_counted_again_on_request(
    twins: RunningServer, until: Until
) -> None:
    begin(twins, examples=1)
    for word in ("image", "same", "image"):
        ask(twins, word)
        settled(twins, until)
    report = settled(twins, until, 3)
    assert (report["disagreed"], len(report["examples"])) == (3, 1)
    assert report["examples"][0]["primary"]["body"] == {"size": 9, "base64": "+vv8/f7/MS4w"}
    text = twins.metrics.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("tsx_shadow_")]
    assert any(
        'result="disagreed"' in line and 'model_version="2.0"' in line and line.endswith(" 3.0")
        for line in lines
    )
    assert any('side="shadow"' in line and line.endswith(" 0.0") for line in lines)
    begin(twins, examples=0)
    ask(twins, "image")
    assert settled(twins, until)["examples"] == []
    assert twins.management.delete("/models/twin/shadow").json()["requests"]["copied"] == 0
    begin(twins, {"kind": "numeric"})
    ask(twins, "same")
    settled(twins, until)
    twins.management.put(
        "/models/twin/shadow", json={"to": "2.0", "share": 50, "compare": {"kind": "numeric"}}
    )
    assert (
        reported(twins)["agreed"] == 1
    )  # another share goes on counting, another comparison begins anew
    twins.management.put(
        "/models/twin/shadow", json={"to": "2.0", "share": 50, "compare": {"kind": "exact"}}
    )
    assert reported(twins)["agreed"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "words"),
    [
        ("GET", "/models/nobody/shadow", None, "ModelNotFoundException", "Model not found: nobody"),
        (
            "DELETE",
            "/models/nobody/shadow",
            None,
            "ModelNotFoundException",
            "Model not found: nobody",
        ),
        (
            "PUT",
            "/models/nobody/shadow",
            {"to": "2.0", "share": 1},
            "ModelNotFoundException",
            "Model not found: nobody",
        ),
        (
            "PUT",
            "/models/twin/shadow",
            {"to": "2.0"},
            "BadRequestException",
            "shadow.share: Field required.",
        ),
        (
            "PUT",
            "/models/twin/shadow",
            {"to": "2.0", "share": 1, "shar": 1},
            "BadRequestException",
            "traffic has no 'shadow.shar'; did you",
        ),
        (
            "PUT",
            "/models/twin/shadow",
            {"to": "2.0", "share": 1, "compare": {"kind": "plugin", "name": "mime"}},
            "BadRequestException",
            "shadow.compare.name: no plugin 'mime' compares; did you mean 'mine'?",
        ),
    ],
)
def test_what_cannot_be_a_shadow_is_refused_in_words(
    twins: RunningServer, error_of: Any, method: str, path: str, body: Any, kind: str, words: str
) -> None:
    found = error_of(twins.management.request(method, path, json=body))
    assert found[0] == kind
    assert found[1].startswith(words)


def test_a_stateful_model_has_no_shadow(twins: RunningServer, error_of: Any) -> None:
    assert twins.settings.model_store is not None
    make_model(
        twins.settings.model_store / "adder.mar",
        STATEFUL,
        config="sequenceBatching: true\nsequenceMaxIdleMSec: 60000\n",
    )
    twins.register("adder.mar", initial_workers=0)
    try:
        kind, text = error_of(
            twins.management.put("/models/adder/shadow", json={"to": "2.0", "share": 10})
        )
        assert kind == "ConflictStatusException"
        assert text.startswith(
            "Model adder cannot have a shadow: version 1.0 is stateful (sequenceBatching)"
        )
        assert twins.management.get("/models/adder/shadow").json() == {
            "model": "adder",
            "state": "off",
        }
    finally:
        twins.call(lambda: twins.registry.unregister("adder"))
    assert twins.registry.shadows.get("adder") is None


@pytest.mark.usefixtures("processes")
def test_a_shadow_that_is_unregistered_comes_back(twins: RunningServer, until: Until) -> None:
    begin(twins)
    twins.call(lambda: twins.registry.unregister("twin", "2.0"))
    ask(twins, "same")
    assert settled(twins, until)["requests"]["shed"] == {"not-ready": 1}
    twins.register("twin-2.0.mar", initial_workers=1)
    ask(twins, "same")
    assert settled(twins, until)["requests"] == {
        "copied": 1,
        "under_way": 0,
        "shed": {},
    }  # it may be another one: the counters are reset


@pytest.mark.usefixtures("processes")
def test_a_shadow_that_is_replaced_while_a_copy_hangs_counts_from_nothing(
    twins: RunningServer, tmp_path: Path, until: Until
) -> None:
    begin(twins)
    for _ in range(3):
        ask(twins, str(tmp_path / "go"))
    until(lambda: reported(twins)["requests"]["under_way"])
    replaced = twins.management.post(
        "/models", params={"url": "twin-2.0.mar", "replace": "true", "initial_workers": "1"}
    )
    assert replaced.status_code == 200, replaced.text
    ask(twins, "same")  # the old process still hangs, and the new one has this
    until(lambda: reported(twins)["agreed"] + reported(twins)["disagreed"] == 1)
    assert reported(twins)["requests"]["copied"] == 1
    (tmp_path / "go").touch()
    settled(twins, until)


@pytest.mark.usefixtures("processes")
def test_under_load_clients_see_the_primary_alone_while_the_shadow_is_killed(
    twins: RunningServer, tmp_path: Path, until: Until
) -> None:
    begin(twins, {"kind": "top-k"})
    notes, asked = tmp_path / "notes", []
    parts, numbers, enough = (
        urlsplit(str(twins.inference.base_url)),
        itertools.count(),
        threading.Event(),
    )

    def run(client: int) -> None:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
        for turn in itertools.count():
            if turn >= 50 and enough.is_set():
                break
            number = next(numbers)
            body = ("exit" if number % 25 == 7 else f"request {number}").encode()
            chunked = turn % 3 == 0
            headers = {"X-Notes": str(notes), "X-Number": str(number)}
            connection.request(
                "POST",
                "/predictions/twin",
                iter([body]) if chunked else body,
                headers,
                encode_chunked=chunked,
            )
            answer = connection.getresponse()
            asked.append(
                (
                    body.decode(),
                    answer.status,
                    answer.read(),
                    answer.headers["x-tsx-model-version"],
                    answer.headers["x-request-id"],
                )
            )
        connection.close()

    def kill() -> None:
        until(lambda: reported(twins)["state"] == "running")
        for worker in twins.registry.find("twin", "2.0").workers:
            if worker.pid:
                with suppress(ProcessLookupError):  # a request has ended it since
                    os.kill(worker.pid, signal.SIGKILL)

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(run, client) for client in range(4)]
        try:
            for _ in range(3):
                kill()
            until(lambda: reported(twins)["requests"]["copied"] >= 5)
        finally:
            enough.set()
        for client in clients:
            client.result()
    assert Counter((status, body, version) for _, status, body, version, _ in asked) == {
        (200, b'{"cat": 0.75, "dog": 0.25}', "1.0"): len(asked)
    }
    noted = [line.split(" ") for line in notes.read_text().splitlines()]
    primary = Counter(line[-1] for line in noted if line[0] == "1.0")
    assert primary == Counter(id for *_, id in asked)  # each once
    assert all(line[-2] == "1" for line in noted if line[0] == "2.0")
    report = settled(twins, until, len(asked))
    dealt = report["requests"]["copied"] + sum(
        number for reason, number in report["requests"]["shed"].items() if reason != "refused"
    )
    assert dealt == len(asked)
    counted = (
        report["agreed"]
        + report["disagreed"]
        + report["errors"]["comparison"]
        + report["requests"]["shed"].get("refused", 0)
    )
    assert counted == report["requests"]["copied"]
