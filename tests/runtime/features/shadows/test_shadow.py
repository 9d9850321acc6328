"""A shadow gets copies of requests; clients never see its answers, errors, hangs or crashes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.load import load
from tests.kit.management import post_model, put_model
from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.installed import install_plugins
from tests.support.models import STATEFUL
from tsx_runtime.features.shadows.feature import ShadowsFeature
from tsx_runtime.features.shadows.mirror import MAX_ANSWER_BYTES, MAX_COPIES
from tsx_runtime.settings.traffic_policy import NOTHING

# Two versions of one model; the request body selects how their answers differ.
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
            fields = (version, word, headers.get("x-tsx-shadow", ""), context.get_request_id(idx))
            notes.write(" ".join(fields) + chr(10))
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
            ids = {idx: context.get_request_id(idx)}
            send_intermediate_predict_response([part], ids, "", 200, context)
        return "c"
    if word == "image":
        return bytes(range(250, 256)) + version.encode()
    if word == "other":
        return json.dumps({"cat": 1 - shadow, "dog": 0.5})
    return json.dumps({"cat": 0.75 + shadow * 1e-5, "dog": 0.25})
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


@pytest.fixture(scope="module")
def module_server(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    store, packages = tmp_path_factory.mktemp("twins"), tmp_path_factory.mktemp("packages")
    install_plugins(
        packages,
        "plugin_that_judges",
        PLUGIN,
        {"comparisons": {"mine": "plugin_that_judges:judge"}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        with running_server(make_settings(store, plugins=["mine"], job_queue_size=1000)) as server:
            for number in ("1.0", "2.0"):
                server.write_mar(f"twin-{number}.mar", handler=TWINS, name="twin", version=number)
                server.register(f"twin-{number}.mar", initial_workers=1)
            yield server
        sys.modules.pop("plugin_that_judges", None)


@dataclass
class Twins:
    """A server with two versions of the model `twin`; 1.0 is the primary."""

    server: RunningServer
    until: Callable[[Callable[[], object]], None]

    def set_shadow(self, compare: dict[str, Any] | None = None, **policy: Any) -> None:
        """Copy all requests to 2.0, unless `policy` says otherwise, and reset the counters."""
        policy = {"to": "2.0", "share": 100, "compare": compare or {"kind": "exact"}} | policy
        self.put("shadow?force=true", policy).raise_for_status()
        self.server.management.delete("/models/twin/shadow")

    def put(self, path: str, policy: dict[str, Any]) -> httpx.Response:
        return self.server.management.put(f"/models/twin/{path}", json=policy)

    def report(self) -> Any:
        return self.server.management.get("/models/twin/shadow").raise_for_status().json()

    def final_report(self, count: int = 1) -> Any:
        """Return the report once `count` requests were copied or shed and none is running."""
        self.until(
            lambda: (
                (report := self.report())["requests"]["under_way"] == 0
                and copied_or_shed(report) >= count
            )
        )
        return self.report()

    def ask(self, body: str, *, lane: str = "fast", **headers: str) -> httpx.Response:
        answer = self.server.ask(body.encode(), "/predictions/twin", lane=lane, **headers)
        assert answer.headers["x-tsx-model-version"] == "1.0"
        return answer


def copied_or_shed(report: Any) -> int:
    # Refused copies also count as copied; therefore they are not counted twice.
    shed_counts = {**report["requests"]["shed"], "refused": 0}
    return int(report["requests"]["copied"] + sum(shed_counts.values()))


@pytest.fixture
def twins(module_server: RunningServer, until: Any) -> Iterator[Twins]:
    yield Twins(module_server, until)
    module_server.call(lambda: module_server.registry.set_traffic("twin", NOTHING))


@pytest.mark.parametrize("lane", ["fast", "other"])
def test_clients_get_the_primarys_answers_and_both_are_compared(twins: Twins, lane: str) -> None:
    twins.set_shadow({"kind": "top-k", "k": 1})
    assert twins.ask("same", lane=lane).json() == {"cat": 0.75, "dog": 0.25}
    report = twins.final_report()
    assert (report["agreed"], report["disagreed"], report["disagreement"]["rate"]) == (1, 0, 0.0)
    # One request proves little.
    assert report["disagreement"]["high"] > 0.5
    headers = {
        "authorization": "Bearer s3cret",
        "cookie": "session=s3cret",
        "x_api_key": "s3cret",
        "x_user": "ann",
    }
    assert twins.ask("other", lane=lane, **headers).json() == {"cat": 1, "dog": 0.5}
    report = twins.final_report(2)
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


def test_a_shadow_copy_has_its_own_id_and_a_marker_header(twins: Twins, tmp_path: Path) -> None:
    twins.set_shadow()
    answer = twins.ask("other", x_notes=str(tmp_path / "notes"))
    report = twins.final_report()
    primary, copy = (line.split(" ") for line in (tmp_path / "notes").read_text().splitlines())
    assert (primary[:3], copy[:3]) == (["1.0", "other", ""], ["2.0", "other", "1"])
    assert primary[3] == answer.headers["x-request-id"] == report["examples"][0]["request_id"]
    assert copy[3] != primary[3]


@pytest.mark.parametrize(
    ("compare", "body", "agrees"),
    [
        ({"kind": "exact"}, "same", False),
        # This is large enough to be compared in a thread.
        ({"kind": "numeric"}, "list", True),
        ({"kind": "exact"}, "streams", False),
        ({"kind": "exact"}, "raise", False),
        ({"kind": "exact"}, "both", True),
        ({"kind": "plugin", "name": "mine"}, "wrong", False),
    ],
)
def test_answers_agree_according_to_the_comparison_kind(
    twins: Twins, compare: dict[str, Any], body: str, agrees: bool
) -> None:
    twins.set_shadow(compare)
    assert twins.ask(body).status_code == (500 if body == "both" else 200)
    report = twins.final_report()
    assert (report["agreed"], report["disagreed"]) == ((1, 0) if agrees else (0, 1)), report
    errors = {"raise": (0, 1), "both": (1, 1)}.get(body, (0, 0))
    assert (report["errors"]["primary"], report["errors"]["shadow"]) == errors


def test_numbers_are_compared_with_a_tolerance_and_differences_shown(twins: Twins) -> None:
    twins.put("shadow", {"to": "2.0", "share": 100}).raise_for_status()
    # Nothing was compared.
    assert "largest_difference" not in twins.report()
    twins.ask("same")
    report = twins.final_report()
    assert (report["agreed"], report["shadow"]["compare"]) == (1, {"kind": "numeric"})
    assert report["tolerance"] == {"rtol": 1e-4, "atol": 1e-6}
    assert report["largest_difference"] == pytest.approx(1e-5)
    twins.ask("other")
    report = twins.final_report(2)
    assert (report["disagreed"], report["largest_difference"]) == (1, 1.0)


@pytest.mark.usefixtures("processes")
def test_a_crashing_shadow_does_not_affect_clients(twins: Twins) -> None:
    twins.set_shadow()
    assert twins.ask("exit").status_code == 200
    report = twins.final_report()
    assert report["disagreed"] == 1
    assert report["errors"] == {"primary": 0, "shadow": 1, "comparison": 0}
    assert report["examples"][0]["why"] == "status: 200 (primary), 500 (shadow)"
    twins.until(lambda: twins.report()["state"] == "running")


def test_an_answer_that_is_too_large_is_not_compared(twins: Twins) -> None:
    twins.set_shadow()
    assert len(twins.ask("huge").content) == 2 << 20
    assert twins.final_report()["requests"] == {"copied": 0, "under_way": 0, "shed": {"size": 1}}
    assert len(twins.ask("large").content) == 10
    report = twins.final_report(2)
    assert (report["agreed"], report["disagreed"], report["errors"]["comparison"]) == (0, 0, 1)
    assert f"more than {MAX_ANSWER_BYTES} bytes" in report["last_problem"]


def test_a_hanging_shadow_does_not_delay_clients(twins: Twins, tmp_path: Path) -> None:
    twins.set_shadow()
    for _ in range(10):
        assert twins.ask(str(tmp_path / "go")).status_code == 200
    report = twins.report()
    # The worker runs one copy and holds one ahead; a third waits in the queue.
    assert report["requests"]["under_way"] <= 3
    assert report["requests"]["shed"]["shadow-busy"] >= 7
    (tmp_path / "go").touch()
    report = twins.final_report(10)
    assert report["agreed"] + report["disagreed"] == report["requests"]["copied"] >= 1
    assert report["errors"]["shadow"] == 0


def test_a_slow_shadow_answer_is_still_compared(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.features.shadows.mirror.MAX_WAIT_S", 0.3)
    twins.set_shadow()
    twins.ask(str(tmp_path / "go"))
    twins.until(lambda: twins.report()["requests"]["under_way"])
    time.sleep(0.4)
    (tmp_path / "go").touch()
    report = twins.final_report()
    assert report["requests"]["shed"] == {}
    assert report["requests"]["copied"] == report["agreed"] + report["disagreed"]


def test_hanging_copies_are_released_when_the_shadow_is_turned_off(
    twins: Twins, tmp_path: Path
) -> None:
    twins.set_shadow()
    for _ in range(3):
        twins.ask(str(tmp_path / "go"))
    twins.until(lambda: twins.report()["requests"]["under_way"])
    response = twins.server.management.patch("/models/twin/traffic", json={"shadow": None})
    assert response.json()["traffic"] == {}
    assert twins.report()["state"] == "off"
    answer = twins.server.ask(b"same", "/predictions/twin")
    assert "x-tsx-model-version" not in answer.headers
    (tmp_path / "go").touch()
    twins.until(lambda: not twins.report()["requests"]["under_way"])
    # The counters are kept.
    assert twins.report()["requests"]["copied"] >= 1


def test_the_number_of_running_copies_is_limited(twins: Twins, tmp_path: Path) -> None:
    # A large batch ensures that the shadow's queue is not the limit.
    put_model(twins.server, "twin/2.0", batch_size=100)
    twins.set_shadow()
    try:
        for _ in range(MAX_COPIES + 5):
            twins.ask(str(tmp_path / "go"))
        twins.until(lambda: twins.report()["requests"]["shed"].get("under-way") == 5)
        assert twins.report()["requests"]["under_way"] == MAX_COPIES
    finally:
        (tmp_path / "go").touch()
        twins.final_report()
        put_model(twins.server, "twin/2.0", batch_size=1)


def test_copies_are_shed_while_requests_wait_for_the_primary(twins: Twins) -> None:
    twins.set_shadow()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: twins.ask("same"), range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert twins.final_report(100)["requests"]["shed"]["primary-busy"] > 0


@pytest.mark.usefixtures("processes")
def test_a_request_that_cannot_be_copied_is_reported(twins: Twins) -> None:
    twins.set_shadow()
    twins.server.call(lambda: twins.server.registry.scale("twin", "2.0", 0))
    try:
        report = twins.report()
        assert report["state"] == "waiting"
        assert report["why"] == "No worker serves version 2.0 now."
        twins.ask("same")
        assert twins.final_report()["requests"]["shed"] == {"not-ready": 1}
    finally:
        twins.server.call(lambda: twins.server.registry.scale("twin", "2.0", 1))
    twins.set_shadow(to="3.0")
    twins.ask("same")
    report = twins.final_report()
    assert (report["state"], report["why"]) == ("waiting", "Version 3.0 is not registered.")


def test_a_version_with_all_traffic_cannot_be_a_shadow(twins: Twins, error_of: Any) -> None:
    """Refuse it, since nothing would ever be copied to it."""
    reason = "Version 1.0 of model twin already answers all requests"
    shadow = {"to": "1.0", "share": 100}
    kind, message = error_of(twins.put("shadow", shadow))
    assert kind == "BadRequestException"
    assert message.startswith(reason)
    assert message.endswith("Name another version, such as 2.0.")
    labelled = {
        "weights": {"1.0": 1, "2.0": 0},
        "labels": {"live": "1.0"},
        "shadow": {"to": "live", "share": 5},
    }
    assert error_of(twins.put("traffic", labelled))[1].startswith(reason)
    assert twins.report()["state"] == "off"
    twins.put("traffic", {"weights": {"2.0": 1}, "shadow": shadow}).raise_for_status()
    assert twins.report()["state"] == "running"
    # After this change the shadow is the version that answers.
    change = {"weights": None}
    twins.server.management.patch("/models/twin/traffic", json=change).raise_for_status()
    report = twins.report()
    assert report["state"] == "waiting"
    assert report["why"].startswith(reason)
    twins.ask("same")
    assert twins.final_report()["requests"]["shed"] == {"same-version": 1}


def test_sampled_requests_without_an_explicit_version_are_copied(twins: Twins) -> None:
    twins.set_shadow(share=30)
    for _ in range(20):
        twins.server.ask(b"same", "/predictions/twin/1.0").raise_for_status()
    assert twins.final_report(0)["requests"] == {"copied": 0, "under_way": 0, "shed": {}}
    for _ in range(100):
        twins.ask("same")
    report = twins.final_report(3)
    # Six standard deviations around the expected 30.
    assert 30 - 28 < copied_or_shed(report) < 30 + 28


def test_a_failing_or_hanging_plugin_is_reported_without_delays(twins: Twins) -> None:
    module = sys.modules["plugin_that_judges"]
    judge_plugin = {"kind": "plugin", "name": "mine"}
    twins.set_shadow(judge_plugin)
    twins.ask("fail")
    report = twins.final_report()
    assert report["errors"]["comparison"] == 1
    assert report["last_problem"] == ("the plugin 'mine' failed: RuntimeError: broken on purpose")
    twins.set_shadow(judge_plugin | {"timeout": 0.05})
    # There are four threads for comparisons.
    for count in range(1, 7):
        twins.ask("hang")
        report = twins.final_report(count)
    assert report["errors"]["comparison"] == 6
    assert report["last_problem"].startswith("4 comparisons that exceeded their time limit")
    module.go.set()

    def compares_again() -> bool:
        twins.ask("right")
        return bool(twins.final_report()["agreed"])

    twins.until(compares_again)
    request, primary, shadow = module.seen[-1]
    assert (request, primary.status, shadow.status) == (b"right", 200, 200)
    assert primary.body == b'{"cat": 0.75, "dog": 0.25}'


def test_the_counts_are_metrics_and_can_be_reset(twins: Twins) -> None:
    twins.set_shadow(examples=1)
    for count in range(1, 4):
        twins.ask("image")
        report = twins.final_report(count)
    assert (report["disagreed"], len(report["examples"])) == (3, 1)
    assert report["examples"][0]["primary"]["body"] == {"size": 9, "base64": "+vv8/f7/MS4w"}
    text = twins.server.metrics.get("/metrics").text
    assert re.search(r'tsx_shadow_.*model_version="2.0".*result="disagreed".* 3\.0\n', text)
    assert re.search(r'tsx_shadow_.*side="shadow".* 0\.0\n', text)
    twins.set_shadow(examples=0)
    twins.ask("image")
    assert twins.final_report()["examples"] == []
    reset = twins.server.management.delete("/models/twin/shadow").json()
    assert reset["requests"]["copied"] == 0
    twins.set_shadow({"kind": "numeric"})
    twins.ask("same")
    twins.final_report()
    # A changed sampling rate keeps the counters; a changed comparison resets them.
    for kind, expected_count in (("numeric", 1), ("exact", 0)):
        twins.put("shadow", {"to": "2.0", "share": 50, "compare": {"kind": kind}})
        assert twins.report()["agreed"] == expected_count


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"to": "2.0"}, "shadow.share: Field required."),
        ({"to": "2.0", "share": 1, "shar": 1}, "traffic has no 'shadow.shar'; did you"),
        (
            {"to": "2.0", "share": 1, "compare": {"kind": "plugin", "name": "mime"}},
            "no plugin 'mime' compares; did you mean 'mine'?",
        ),
    ],
)
def test_an_invalid_policy_is_refused(
    twins: Twins, error_of: Any, policy: dict[str, Any], expected: str
) -> None:
    kind, message = error_of(twins.put("shadow", policy))
    assert kind == "BadRequestException"
    assert expected in message


def test_a_missing_model_has_no_shadow_report(twins: Twins, error_of: Any) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = twins.server.management.request(
            method, "/models/nobody/shadow", json={"to": "2.0", "share": 1}
        )
        assert error_of(answer) == ("ModelNotFoundException", "Model not found: nobody")


def test_a_stateful_model_cannot_have_a_shadow(twins: Twins, error_of: Any) -> None:
    server = twins.server
    config = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\n"
    server.write_mar("adder.mar", handler=STATEFUL, config=config)
    server.register("adder.mar", initial_workers=0)
    try:
        policy = {"to": "2.0", "share": 10}
        kind, text = error_of(server.management.put("/models/adder/shadow", json=policy))
        assert kind == "ConflictStatusException"
        assert "version 1.0 is stateful (sequenceBatching)" in text
        report = server.management.get("/models/adder/shadow").json()
        assert report == {"model": "adder", "state": "off"}
    finally:
        server.call(lambda: server.registry.unregister("adder"))
    assert server.registry.feature(ShadowsFeature).shadows.get("adder") is None


@pytest.mark.usefixtures("processes")
def test_a_shadow_resumes_when_its_version_is_registered_again(twins: Twins) -> None:
    twins.set_shadow()
    twins.server.call(lambda: twins.server.registry.unregister("twin", "2.0"))
    twins.ask("same")
    assert twins.final_report()["requests"]["shed"] == {"not-ready": 1}
    twins.server.register("twin-2.0.mar", initial_workers=1)
    twins.ask("same")
    # The new version may be another one, so the counters are reset.
    assert twins.final_report()["requests"] == {"copied": 1, "under_way": 0, "shed": {}}


@pytest.mark.usefixtures("processes")
def test_replacing_a_shadow_with_a_hanging_copy_resets_its_counts(
    twins: Twins, tmp_path: Path
) -> None:
    twins.set_shadow()
    for _ in range(3):
        twins.ask(str(tmp_path / "go"))
    twins.until(lambda: twins.report()["requests"]["under_way"])
    post_model(twins.server, "twin-2.0.mar", replace="true", initial_workers="1").raise_for_status()
    # The old process still hangs, and the new one gets this copy.
    twins.ask("same")
    twins.until(lambda: twins.report()["agreed"] + twins.report()["disagreed"] == 1)
    assert twins.report()["requests"]["copied"] == 1
    (tmp_path / "go").touch()
    twins.final_report()


@pytest.mark.usefixtures("processes")
def test_under_load_a_killed_shadow_is_invisible_to_clients(twins: Twins, tmp_path: Path) -> None:
    twins.set_shadow({"kind": "top-k"})
    notes = tmp_path / "notes"

    def request(number: int) -> tuple[str, bytes, dict[str, str]]:
        body = b"exit" if number % 25 == 7 else b"request %d" % number
        return "/predictions/twin", body, {"X-Notes": str(notes)}

    with load(twins.server, request, clients=4, least=50) as answers:
        for _ in range(3):
            twins.until(lambda: twins.report()["state"] == "running")
            for worker in twins.server.registry.find("twin", "2.0").workers:
                # A request may have ended the process since.
                with suppress(ProcessLookupError):
                    if worker.pid:
                        os.kill(worker.pid, signal.SIGKILL)
        twins.until(lambda: twins.report()["requests"]["copied"] >= 5)
    assert Counter(
        (answer.status, answer.content, answer.headers["x-tsx-model-version"]) for answer in answers
    ) == {(200, b'{"cat": 0.75, "dog": 0.25}', "1.0"): len(answers)}
    rows = [line.split(" ") for line in notes.read_text().splitlines()]
    # The primary has seen each request once.
    primary = Counter(row[-1] for row in rows if row[0] == "1.0")
    assert primary == Counter(answer.headers["x-request-id"] for answer in answers)
    assert all(row[-2] == "1" for row in rows if row[0] == "2.0")
    report = twins.final_report(len(answers))
    assert copied_or_shed(report) == len(answers)
    assert report["requests"]["copied"] == (
        report["agreed"]
        + report["disagreed"]
        + report["errors"]["comparison"]
        + report["requests"]["shed"].get("refused", 0)
    )
