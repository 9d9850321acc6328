"""Plugins: how they are found and refused, and that one that fails fails nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import install_plugins
from tsx_runtime.core.scheduling.batching import assign
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.errors import DownloadFailed, ModelNotFound, SettingError
from tsx_runtime.http.routes.plugins import _response, check_paths
from tsx_runtime.metrics.exposition import Families
from tsx_runtime.metrics.torchserve_log import feed_once
from tsx_runtime.plugins import Endpoint, EndpointResponse, Plugins, Sample, Waiting, load_plugins
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust

CODE = """
from tsx_runtime.plugins import Endpoint, EndpointResponse

endpoint = Endpoint("/mine", lambda request, server: EndpointResponse("mine"))
bad_path = Endpoint("mine/../x", lambda request, server: EndpointResponse())
number = 3


def failing(*given):
    raise RuntimeError("broken on purpose")


def exiting(*given):
    raise SystemExit("why")


leaving = Endpoint("/leaving", exiting)


def negative(waiting):
    return -5
"""

M = "some_plugins_of_a_test"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A distribution with these entry points, as pip would leave it behind."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**groups: dict[str, str]) -> None:
        install_plugins(tmp_path, M, CODE, groups)
        (tmp_path / "a_module_that_exits.py").write_text("raise SystemExit(3)")

    return install


def test_nothing_is_loaded_that_nobody_named(install: Install) -> None:
    install(
        endpoints={"mine": f"{M}:endpoint"}, metrics_sinks={"broken": "no_such_module_anywhere:x"}
    )
    assert load_plugins([]) == Plugins()
    loaded = load_plugins(["mine", "mine"])
    assert list(loaded.endpoints) == ["mine"]
    assert loaded.endpoints["mine"].path == "/mine"
    assert not loaded.metrics_sinks


@pytest.mark.parametrize(
    ("groups", "name", "reported"),
    [
        (
            {"endpoints": {"mine": f"{M}:endpoint"}},
            "mime",
            "there is no plugin 'mime'; did you mean 'mine'?",
        ),
        (
            {"endpoints": {"mine": f"{M}:endpoint"}},
            "other",
            "there is no plugin 'other'; installed are: mine",
        ),
        ({}, "other", "there is no plugin 'other'; no installed package provides any"),
        (
            {"sources": {"x": "no_such_module_anywhere:x"}},
            "x",
            "the plugin 'x' does not load: no_such_module_anywhere:x: ModuleNotFoundError",
        ),
        (
            {"sources": {"x": f"{M}:nothing"}},
            "x",
            f"the plugin 'x' does not load: {M}:nothing: AttributeError",
        ),
        (
            {"sources": {"x": f"{M}:number"}},
            "x",
            f"the plugin 'x' ({M}:number) is a int, not a function",
        ),
        (
            {"endpoints": {"x": f"{M}:failing"}},
            "x",
            f"the plugin 'x' ({M}:failing) is not an Endpoint",
        ),
        (
            {"endpoints": {"x": f"{M}:bad_path"}},
            "x",
            f"the plugin 'x' ({M}:bad_path) is not an Endpoint",
        ),
        (
            {"sources": {"https": f"{M}:failing"}},
            "https",
            "the plugin 'https' cannot be a source: that name is taken",
        ),
        (
            {"sources": {"A_b": f"{M}:failing"}},
            "A_b",
            "the plugin 'A_b' cannot be a source: that name is no scheme of URLs",
        ),
        (
            {"batch_policies": {"wait": f"{M}:failing"}},
            "wait",
            "the plugin 'wait' cannot be a batch policy: that name is taken",
        ),
    ],
)
def test_what_cannot_be_loaded_is_reported_at_the_start(
    groups: dict[str, dict[str, str]], name: str, reported: str, install: Install
) -> None:
    install(**groups)
    with pytest.raises(SettingError) as caught:
        load_plugins([name])
    assert str(caught.value).startswith(reported)


@pytest.mark.parametrize(
    "path",
    [
        "/models",
        "/predictions/x",
        "/metrics",
        "/token",
        "/ping/more",
        "/mine/predict",
        "/a/b/predict",
    ],
)
def test_an_endpoint_takes_no_path_of_the_servers(path: str) -> None:
    with pytest.raises(SettingError, match="that path is already in use"):
        check_paths([Endpoint(path, lambda request, server: EndpointResponse())])


def test_two_endpoints_do_not_share_a_path() -> None:
    endpoint = Endpoint("/mine", lambda request, server: EndpointResponse())
    with pytest.raises(SettingError, match="that path is already in use"):
        check_paths([endpoint, endpoint])


def test_endpoints_that_begin_alike_are_behind_one_token() -> None:
    def answer(request: object, server: object) -> EndpointResponse:
        return EndpointResponse()

    check_paths(
        [Endpoint("/mine/a", answer), Endpoint("/mine/b", answer), Endpoint("/ping", answer)]
    )
    with pytest.raises(SettingError, match="endpoints below /mine have another role"):
        check_paths([Endpoint("/mine/a", answer), Endpoint("/mine/b", answer, role="management")])


def test_a_name_that_two_packages_provide_is_refused(install: Install, tmp_path: Path) -> None:
    install(endpoints={"mine": f"{M}:endpoint", "own": f"{M}:endpoint"})
    install_plugins(tmp_path, f"{M}_too", CODE, {"endpoints": {"mine": f"{M}_too:endpoint"}})
    with pytest.raises(
        SettingError, match=f"'mine' is in two packages, {M}(_too)? and {M}(_too)?; uninstall one"
    ):
        load_plugins(["mine"])
    assert list(load_plugins(["own"]).endpoints) == ["own"]


def test_a_plugin_that_exits_fails_and_ends_nothing(install: Install) -> None:
    install(authentication={"exiting": f"{M}:exiting"}, sources={"exits": "a_module_that_exits:x"})
    with pytest.raises(RuntimeError, match=r"the plugin 'exiting' called sys.exit\('why'\)"):
        load_plugins(["exiting"]).authentication["exiting"]("inference", {})
    with pytest.raises(
        SettingError, match="the plugin 'exits' does not load: a_module_that_exits:x: SystemExit"
    ):
        load_plugins(["exits"])


def test_an_endpoint_that_exits_is_answered_as_one_that_fails(
    start_server: Callable[..., Any], install: Install, error_of: Any
) -> None:
    install(endpoints={"leaving": f"{M}:leaving"})
    with start_server(plugins=["leaving"]) as server:
        assert error_of(server.inference.get("/leaving"))[1].startswith(
            "The endpoint /leaving failed: SystemExit"
        )


def test_an_endpoint_writes_no_line_of_the_head_that_is_not_its_own() -> None:
    assert _response(EndpointResponse("x", headers={"X-Mine": "1"})).headers["x-mine"] == "1"
    for headers in (
        {"X-Mine": "1\r\nSet-Cookie: a=b"},
        {"X-Mine\r\nSet-Cookie": "a=b"},
        {"X Mine": "1"},
        {"X-Mine": "\u4e2d"},
    ):
        with pytest.raises(ValueError, match=r"HTTP does not allow|latin-1"):
            _response(EndpointResponse("x", headers=headers))


class Asked:
    """A job that waits, and no more."""

    meta = body = b"12345"
    priority = 0
    gone = False

    def __init__(self, arrived: float, deadline: float | None = None) -> None:
        self.arrived = arrived
        self.deadline = deadline


class Idle:
    batches = 0
    prefetch = False
    suspected = False


def queue_of(*jobs: Any) -> RequestQueue:
    typed: list[Job] = list(jobs)
    return RequestQueue(typed)


def test_a_policy_ends_the_wait_of_a_batch_that_is_not_full_and_never_lengthens_it() -> None:
    seen: list[Waiting] = []

    def policy(waiting: Waiting) -> float:
        seen.append(waiting)
        return {1: 0.2, 2: 60.0}.get(waiting.count, 0.0)

    limits = BatchLimits(max_items=4, wait=1.0, policy=policy)
    one = assign(queue_of(Asked(10.0)), [Idle()], 10.5, limits)
    assert (one.batches, one.wake) == ([], 10.7)
    assert seen == [Waiting(count=1, size=5, oldest=0.5, max_count=4, max_delay=1.0)]
    two = assign(queue_of(Asked(10.0), Asked(10.4)), [Idle()], 10.5, limits)
    assert (two.batches, two.wake) == ([], 11.0)
    assert (
        len(assign(queue_of(*(Asked(10.0) for _ in range(3))), [Idle()], 10.5, limits).batches) == 1
    )
    seen.clear()
    assert (
        len(assign(queue_of(*(Asked(10.0) for _ in range(4))), [Idle()], 10.5, limits).batches) == 1
    )
    assert not seen, "a full batch asks nobody"
    assert assign(queue_of(), [Idle()], 10.5, limits).wake == NEVER


def test_a_policy_that_fails_sends_the_batch_and_is_reported_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(batch_policies={"failing": f"{M}:failing", "negative": f"{M}:negative"})
    policies = load_plugins(["failing", "negative"]).batch_policies
    waiting = Waiting(1, 1, 0.0, 8, 1.0)
    with caplog.at_level(logging.ERROR):
        assert [policies["failing"](waiting) for _ in range(3)] == [0.0] * 3
    assert len(caplog.records) == 1
    assert policies["negative"](waiting) == 0.0


def test_a_source_fetches_only_what_is_allowed_and_not_too_large(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    fetched: list[str] = []

    def source(url: str, target: Path, most: int) -> None:
        fetched.append(url)
        if "none" in url:
            raise FileNotFoundError("no such model in the hub")
        if "empty" not in url:
            target.write_bytes(b"x" * (most + ("large" in url)))

    settings = Settings(model_store=store, allowed_urls=["hub://team/.*"], max_archive_size=10)
    fetcher = Fetcher(settings, sources={"hub": source})
    assert fetcher.fetch("hub://team/m.mar", Trust.CLIENT) == store / "m.mar"
    assert (store / "m.mar").read_bytes() == b"x" * 10
    for name, reported in (
        ("none", "no such model in the hub"),
        ("large", "it has 11 bytes, and max_archive_size is 10"),
        ("empty", "says"),
    ):
        with pytest.raises(DownloadFailed, match=reported):
            fetcher.fetch(f"hub://team/{name}.mar", Trust.CLIENT)
    with pytest.raises(DownloadFailed, match="sha-256"):
        fetcher.fetch("hub://team/other.mar#sha256=" + "0" * 64, Trust.CLIENT)
    count = len(fetched)
    for url in ("hub://strangers/m2.mar", "hub://team/../x.mar", "other://team/m.mar"):
        with pytest.raises(ModelNotFound):
            fetcher.fetch(url, Trust.CLIENT)
    assert len(fetched) == count
    assert sorted(file.name for file in store.iterdir()) == ["m.mar"]


def test_a_sink_gets_every_sample_and_one_that_fails_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    families = Families()
    families.add("one", "gauge", "a number", [({"a": "b"}, 1.5), ({"a": "c"}, 2.0)])
    got: list[list[Sample]] = []

    async def read() -> Families:
        return families

    def fail(samples: list[Sample]) -> None:
        raise OSError("nobody listens")

    asyncio.run(feed_once("list", got.append, read))
    assert got == [
        [Sample("one", "gauge", {"a": "b"}, 1.5), Sample("one", "gauge", {"a": "c"}, 2.0)]
    ]
    with caplog.at_level(logging.ERROR):
        asyncio.run(feed_once("failing", fail, read))
    assert "the metrics sink 'failing' failed" in caplog.text
