"""Registrations of hf:ORG/NAME with a fake Hugging Face Hub."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer
from tests.support.hub import Hub, HubRepo, hub_double
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.features.torchserve.snapshots import describe
from tsx_runtime.server.startup import models_from_settings
from tsx_runtime.sources import Trust

FILES = {
    "config.json": b'{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}',
    "model.safetensors": b"w" * 100_000,
    "modeling_own.py": b"raise SystemExit",
    "1_Pooling/config.json": b"{}",
}


@pytest.fixture(scope="module")
def hub_server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Hub]]:
    with pytest.MonkeyPatch.context() as monkeypatch, hub_double() as hub:
        hub.use(monkeypatch, tmp_path_factory.mktemp("hf"))
        hub.repos |= {"org/tiny": HubRepo(), "org/other": HubRepo(), "org/secret": HubRepo()}
        for repo in hub.repos.values():
            repo.commit(FILES)
        with start_server(
            allowed_urls=["https?://.*", "hf:org/(tiny|other)"],
            max_archive_size=1 << 20,
            trust_remote_code=["trusted"],
        ) as server:
            yield server, hub


def register(server: RunningServer, url: str, **options: Any) -> httpx.Response:
    return server.management.post("/models", params={"url": url, "initial_workers": 0, **options})


def test_an_allowed_model_is_registered_with_its_commit(
    hub_server: tuple[RunningServer, Hub],
) -> None:
    server, hub = hub_server
    assert register(server, "hf:org/tiny").status_code == 200
    commit = hub.repos["org/tiny"].refs["main"]
    (description,) = server.management.get("/models/tiny").json()
    assert description["modelUrl"] == f"hf:org/tiny@{commit}"
    version = server.registry.find("tiny", None)
    assert version.archive.manifest.data["huggingface"] == {
        "task": "text-classification",
        "architecture": "BertForSequenceClassification",
        "source": "hf:org/tiny",
        "revision": commit,
    }
    weights = version.archive.directory / "huggingface_model" / "model.safetensors"
    # An isolated worker may read files, but it may not follow links.
    assert not weights.is_symlink()
    assert weights.stat().st_nlink == 2
    assert (
        version.archive.directory / "huggingface_model" / "modeling_own.py"
    ).stat().st_nlink == 1
    snapshot = json.loads(describe(server.registry.models.values(), "x.cfg", 0, None, {}))
    saved_url = snapshot["models"]["tiny"]["1.0"]["marName"]
    assert saved_url == f"hf:org/tiny@{commit}"
    (start,) = models_from_settings(
        server.settings.model_copy(update={"load_models": [f"mine={saved_url}"]})
    )
    assert (start.path, start.order.url, start.order.model_name) == (None, saved_url, "mine")
    hub.repos["org/tiny"].commit({**FILES, "vocab.txt": b"later"})
    server.call(lambda: server.registry.unregister("tiny"))
    assert register(server, saved_url, model_name="again").status_code == 200
    assert server.management.get("/models/again").json()[0]["modelUrl"] == saved_url
    server.call(lambda: server.registry.unregister("again"))


def test_a_model_with_remote_code_has_batch_size_1_by_default(
    hub_server: tuple[RunningServer, Hub],
) -> None:
    server, _ = hub_server
    sizes = []
    for name, options in (("plain", {}), ("trusted", {}), ("trusted", {"batch_size": 4})):
        assert register(server, "hf:org/tiny", model_name=name, **options).status_code == 200
        sizes.append(server.management.get(f"/models/{name}").json()[0]["batchSize"])
        server.call(lambda name=name: server.registry.unregister(name))
    assert sizes == [32, 1, 4]


def test_disallowed_models_and_remote_code_are_refused(
    hub_server: tuple[RunningServer, Hub], error_of: Callable[..., tuple[str, str]]
) -> None:
    server, hub = hub_server
    kind, text = error_of(register(server, "hf:org/secret"))
    assert (kind, "Add hf:org/secret, or a pattern" in text) == (
        "ModelNotFoundException",
        True,
    )
    assert error_of(register(server, "hf:nothing"))[0] == "BadRequestException"
    kind, text = error_of(
        register(server, "hf:org/other", handler="huggingface_model/modeling_own.py")
    )
    assert (
        kind,
        text.startswith("The handler of hf:org/other must be one that comes with tsx"),
    ) == ("BadRequestException", True)
    hub.repos["org/other"].commit(
        {"config.json": b'{"model_type": "own"}', "model.safetensors": b"w"}
    )
    kind, text = error_of(register(server, "hf:org/other"))
    assert (kind, "does not tell its task" in text) == ("BadRequestException", True)
    hub.repos["org/other"].commit({**FILES, "model.safetensors": b"w" * (1 << 21)})
    kind, text = error_of(register(server, "hf:org/other"))
    assert (kind, "max_archive_size is 1048576" in text) == ("DownloadArchiveException", True)
    secret_model = RegisterOrder(url="hf:org/secret", initial_workers=0)
    # `load_models` and the command line have the operator's trust.
    server.call(lambda: server.registry.register(secret_model, trust=Trust.OPERATOR))
    server.call(lambda: server.registry.unregister("secret"))


def test_the_server_answers_while_it_downloads(
    hub_server: tuple[RunningServer, Hub],
    until: Callable[[Callable[[], object]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, hub = hub_server
    # All files but one are in the cache from here on.
    assert register(server, "hf:org/tiny").status_code == 200
    server.call(lambda: server.registry.unregister("tiny"))
    hub.repos["org/tiny"].commit({**FILES, "vocab.txt": os.urandom(1000)})
    caplog.set_level(logging.INFO, "tsx.registry")
    hub.asked.clear()
    hub.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        try:
            registration = pool.submit(register, server, "hf:org/tiny")
            assert hub.asked.wait(30)
            assert server.inference.get("/ping").status_code == 200
            assert server.management.get("/models").json() == {"models": []}
            until(lambda: server.management.get("/ui/api/state").json()["opening"])
            ((name, step, loaded_bytes, total_bytes),) = server.management.get(
                "/ui/api/state"
            ).json()["opening"]
            assert (name, step, loaded_bytes < total_bytes) == ("tiny", "downloading", True)
        finally:
            hub.go_on.set()
        assert registration.result(60).status_code == 200
    assert "downloading hf:org/tiny" in caplog.text
    assert (
        f"hf:org/tiny is commit {hub.repos['org/tiny'].refs['main']}, downloaded in" in caplog.text
    )
    assert "modeling_own.py is code" in caplog.text
    assert server.registry.opening == {}
    server.call(lambda: server.registry.unregister("tiny"))
