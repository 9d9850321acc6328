"""Plugins: how they are found and refused; their failures do not affect anything else."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from tests.kit.jobs import FakeJob
from tests.support.clients.talker import a_registry, register
from tests.support.installed import install_plugins
from tests.support.models import make_model
from tests.support.servers import serving
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.batching import assign
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits, RequestQueue
from tsx_runtime.errors import DownloadFailed, ModelNotFound, SettingError
from tsx_runtime.http.routes.plugins import _response, check_paths
from tsx_runtime.metrics.exposition import Families
from tsx_runtime.metrics.sinks import feed_once
from tsx_runtime.plugins import Endpoint, EndpointResponse, Plugins, Sample, Waiting, load_plugins
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust

CODE = """
from tsx_runtime.feature import Feature
from tsx_runtime.plugins import Endpoint, EndpointResponse

endpoint = Endpoint("/mine", lambda request, server: EndpointResponse("mine"))
bad_path = Endpoint("mine/../x", lambda request, server: EndpointResponse())
number = 3


def failing(*values):
    raise RuntimeError("broken on purpose")


def exiting(*values):
    raise SystemExit("why")


leaving = Endpoint("/leaving", exiting)


def negative(waiting):
    return -5


class Counting(Feature):
    loaded = 0

    def around(self, version, entry):
        Counting.loaded += 1


class FailingAtTheEnd(Feature):
    end_version = begin_close = failing

    async def stop(self, seconds, stop_now):
        failing()

    async def close(self):
        failing()
"""

M = "some_plugins_of_a_test"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with entry points, as pip does."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**groups: dict[str, str]) -> None:
        install_plugins(tmp_path, M, CODE, groups)
        (tmp_path / "a_module_that_exits.py").write_text("raise SystemExit(3)")

    return install


@pytest.mark.slow
def test_only_configured_plugins_are_loaded(install: Install) -> None:
    install(
        endpoints={"mine": f"{M}:endpoint"}, metrics_sinks={"broken": "no_such_module_anywhere:x"}
    )
    assert load_plugins([]) == Plugins()
    loaded_plugins = load_plugins(["mine", "mine"])
    assert list(loaded_plugins.endpoints) == ["mine"]
    assert loaded_plugins.endpoints["mine"].path == "/mine"
    assert not loaded_plugins.metrics_sinks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "code", "name", "reason"),
    [
        ("endpoints", "endpoint", "mime", "no plugin 'mime'; did you mean 'mine'?"),
        ("endpoints", "endpoint", "other", "no plugin 'other'; installed are: mine"),
        ("sources", "nothing", "mine", f"does not load: {M}:nothing: AttributeError"),
        ("sources", "number", "mine", f"({M}:number) is a int, not a function"),
        ("endpoints", "failing", "mine", f"({M}:failing) is not an Endpoint"),
        ("endpoints", "bad_path", "mine", f"({M}:bad_path) is not an Endpoint"),
        ("sources", "failing", "https", "cannot be a source: that name is taken"),
        ("sources", "failing", "A_b", "cannot be a source: that name is no scheme"),
        ("batch_policies", "failing", "wait", "cannot be a batch policy: that name is taken"),
        ("features", "failing", "mine", f"({M}:failing) is not a subclass of"),
    ],
)
def test_an_unusable_plugin_prevents_the_start(
    group: str, code: str, name: str, reason: str, install: Install
) -> None:
    entry = name if name in ("https", "A_b", "wait") else "mine"
    install(**{group: {entry: f"{M}:{code}"}})
    with pytest.raises(SettingError, match=re.escape(reason)):
        load_plugins([name])


@pytest.mark.slow
def test_a_missing_plugin_prevents_the_start(install: Install) -> None:
    with pytest.raises(SettingError, match="no installed package provides any"):
        load_plugins(["other"])
    install(sources={"x": "no_such_module_anywhere:x"})
    with pytest.raises(SettingError, match="no_such_module_anywhere:x: ModuleNotFoundError"):
        load_plugins(["x"])


@pytest.mark.anyio
async def test_a_plugin_may_be_a_feature(install: Install, processes: None, tmp_path: Path) -> None:
    install(features={"counting": f"{M}:Counting"})
    async with a_registry(plugins=["counting"]) as registry:
        await register(registry, tmp_path, initial_workers=0)
        assert type(registry.features[-1]).loaded == 1


@pytest.mark.anyio
async def test_a_feature_that_fails_at_the_end_leaves_no_workers(
    install: Install, processes: None, tmp_path: Path
) -> None:
    install(features={"failing": f"{M}:FailingAtTheEnd"})
    registry = Registry(Settings(plugins=["failing"]))
    version = await register(registry, tmp_path)
    with (
        patch.object(registry.state, "close", wraps=registry.state.close) as close_state,
        pytest.raises(RuntimeError, match="broken on purpose"),
    ):
        await registry.close()
    assert not version.workers
    assert not registry.all_versions()
    close_state.assert_called_once_with()


def test_a_feature_that_fails_to_stop_loses_no_requests(
    install: Install,
    tmp_path: Path,
    user_environment: Mapping[str, str],
    until: Callable[[Callable[[], object]], None],
) -> None:
    install(features={"failing": f"{M}:FailingAtTheEnd"})
    make_model(
        tmp_path / "m.mar",
        "import time\nfrom pathlib import Path\ndef handle(data, context):\n    if data:\n"
        f"        Path({str(tmp_path / 'began')!r}).touch()\n        time.sleep(1)\n    return data and ['done']\n",
    )
    environment = {**user_environment, "PYTHONPATH": str(tmp_path), "TSX_PLUGINS": "failing"}
    with serving(["serve", "m.mar"], tmp_path, environment) as server, ThreadPoolExecutor() as pool:
        url = f"{user_environment['TSX_INFERENCE_ADDRESS']}/predictions/m"
        answer = pool.submit(httpx.post, url, content=b"x", timeout=30)
        until((tmp_path / "began").exists)
        server.stop()
        assert (answer.result().status_code, answer.result().text) == (200, "done")


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
def test_an_endpoint_cannot_use_a_path_of_the_server(path: str) -> None:
    refuse_paths("already in use", Endpoint(path, answer))


def test_endpoint_paths_are_unique_and_equal_prefixes_have_one_role() -> None:
    first, second = Endpoint("/mine/a", answer), Endpoint("/mine/b", answer)
    check_paths([first, second, Endpoint("/ping", answer)])
    refuse_paths("already in use", first, first)
    other_role = Endpoint("/mine/b", answer, role="management")
    refuse_paths("endpoints below /mine have another role", first, other_role)


def answer(request: object, server: object) -> EndpointResponse:
    return EndpointResponse()


def refuse_paths(reason: str, *endpoints: Endpoint) -> None:
    with pytest.raises(SettingError, match=reason):
        check_paths(endpoints)


def test_a_plugin_name_of_two_packages_is_refused(install: Install, tmp_path: Path) -> None:
    install(endpoints={"mine": f"{M}:endpoint", "own": f"{M}:endpoint"})
    install_plugins(tmp_path, f"{M}_too", CODE, {"endpoints": {"mine": f"{M}_too:endpoint"}})
    with pytest.raises(SettingError, match=f"'mine' is in two packages, {M}(_too)? and {M}(_too)?"):
        load_plugins(["mine"])
    assert list(load_plugins(["own"]).endpoints) == ["own"]


def test_a_plugin_that_exits_fails_without_ending_the_server(install: Install) -> None:
    install(authentication={"exiting": f"{M}:exiting"}, sources={"exits": "a_module_that_exits:x"})
    with pytest.raises(RuntimeError, match=r"'exiting' called sys.exit\('why'\)"):
        load_plugins(["exiting"]).authentication["exiting"]("inference", {})
    with pytest.raises(SettingError, match="a_module_that_exits:x: SystemExit"):
        load_plugins(["exits"])


def test_an_endpoint_that_exits_is_answered_like_a_failing_one(
    start_server: Callable[..., Any], install: Install, error_of: Any
) -> None:
    install(endpoints={"leaving": f"{M}:leaving"})
    with start_server(plugins=["leaving"]) as server:
        _, message = error_of(server.inference.get("/leaving"))
        assert message.startswith("The endpoint /leaving failed: SystemExit")


def test_an_endpoint_can_set_only_valid_headers() -> None:
    assert _response(EndpointResponse("x", headers={"X-Mine": "1"})).headers["x-mine"] == "1"
    for headers in (
        {"X-Mine": "1\r\nSet-Cookie: a=b"},
        {"X-Mine\r\nSet-Cookie": "a=b"},
        {"X Mine": "1"},
        {"X-Mine": "\u4e2d"},
    ):
        with pytest.raises(ValueError, match=r"HTTP does not allow|latin-1"):
            _response(EndpointResponse("x", headers=headers))


class Idle:
    """A worker that waits for a batch."""

    batches = 0
    prefetch = False
    has_suspects = False


def test_a_batch_policy_may_shorten_but_not_lengthen_the_wait() -> None:
    calls: list[Waiting] = []

    def policy(waiting: Waiting) -> float:
        calls.append(waiting)
        return {1: 0.2, 2: 60.0}.get(waiting.count, 0.0)

    def assign_jobs(*arrivals: float) -> Any:
        jobs: list[Job] = [FakeJob(body=b"12345", arrived=arrived) for arrived in arrivals]
        limits = BatchLimits(max_items=4, wait=1.0, policy=policy)
        idle_worker: Any = Idle()
        return assign(RequestQueue(jobs), [idle_worker], 10.5, limits)

    single_job = assign_jobs(10.0)
    assert (single_job.batches, single_job.wake_at) == ([], 10.7)
    assert calls == [Waiting(count=1, size=5, oldest=0.5, max_count=4, max_delay=1.0)]
    job_pair = assign_jobs(10.0, 10.4)
    assert (job_pair.batches, job_pair.wake_at) == ([], 11.0)
    assert len(assign_jobs(*[10.0] * 3).batches) == 1
    calls.clear()
    assert len(assign_jobs(*[10.0] * 4).batches) == 1
    # A full batch does not call the policy.
    assert not calls
    assert assign_jobs().wake_at == NEVER


def test_a_failing_policy_sends_the_batch_and_is_reported_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(batch_policies={"failing": f"{M}:failing", "negative": f"{M}:negative"})
    policies = load_plugins(["failing", "negative"]).batch_policies
    waiting = Waiting(1, 1, 0.0, 8, 1.0)
    with caplog.at_level(logging.ERROR):
        assert [policies["failing"](waiting) for _ in range(3)] == [0.0] * 3
    assert len(caplog.records) == 1
    assert policies["negative"](waiting) == 0.0


def test_a_source_plugin_obeys_allowed_urls_and_the_size_limit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    urls: list[str] = []

    def source(url: str, target: Path, max_bytes: int) -> None:
        urls.append(url)
        if "none" in url:
            raise FileNotFoundError("no such model in the hub")
        if "empty" not in url:
            target.write_bytes(b"x" * (max_bytes + ("large" in url)))

    settings = Settings(model_store=store, allowed_urls=["hub://team/.*"], max_archive_size=10)
    fetcher = Fetcher(settings, sources={"hub": source})
    assert fetcher.fetch("hub://team/m.mar", Trust.CLIENT) == store / "m.mar"
    assert (store / "m.mar").read_bytes() == b"x" * 10
    for name, reason in (
        ("none", "no such model in the hub"),
        ("large", "it has 11 bytes, and max_archive_size is 10"),
        ("empty", "says"),
    ):
        with pytest.raises(DownloadFailed, match=reason):
            fetcher.fetch(f"hub://team/{name}.mar", Trust.CLIENT)
    with pytest.raises(DownloadFailed, match="sha-256"):
        fetcher.fetch("hub://team/other.mar#sha256=" + "0" * 64, Trust.CLIENT)
    count = len(urls)
    for url in ("hub://strangers/m2.mar", "hub://team/../x.mar", "other://team/m.mar"):
        with pytest.raises(ModelNotFound):
            fetcher.fetch(url, Trust.CLIENT)
    assert len(urls) == count
    assert sorted(file.name for file in store.iterdir()) == ["m.mar"]


def test_a_sink_gets_every_sample_and_failures_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    families = Families()
    families.add("one", "gauge", "a number", [({"a": "b"}, 1.5), ({"a": "c"}, 2.0)])
    samples: list[list[Sample]] = []

    async def read() -> Families:
        return families

    def fail(samples: list[Sample]) -> None:
        raise OSError("nobody listens")

    asyncio.run(feed_once("list", samples.append, read))
    assert samples == [
        [Sample("one", "gauge", {"a": "b"}, 1.5), Sample("one", "gauge", {"a": "c"}, 2.0)]
    ]
    with caplog.at_level(logging.ERROR):
        asyncio.run(feed_once("failing", fail, read))
    assert "the metrics sink 'failing' failed" in caplog.text
