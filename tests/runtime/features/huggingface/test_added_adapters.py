"""LoRA adapters that are added to a served model, with real workers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import RunningServer
from tests.support.hub import HubRepo, hub_double
from tests.support.language_models import generation_model, lora_adapter, tiny_llama
from tsx_archiver.metadata.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.features.isolation.config import Isolation, missing_features

pytest.importorskip("peft")

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADDED = "Success: LoRA adapter '{}' added successfully."


@pytest.fixture(scope="module")
def model_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with a model that has the adapter `packed`, and further adapters."""
    import torch
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("added")
    store = root / "store"
    store.mkdir()
    llama = tiny_llama(root / "llama")
    for seed, name in enumerate(("polite", "terse"), 1):
        lora_adapter(llama, store / name, seed)
    lora_adapter(tiny_llama(root / "wide", hidden_size=96), store / "wide", 1)
    generation_model(store / "m", llama, {"packed": store / "polite"}, "huggingface: {}")
    pickled = store / "pickled"
    shutil.copytree(store / "polite", pickled)
    (pickled / ADAPTER_WEIGHTS).rename(pickled / "adapter_model.bin")
    base = store / "base"
    shutil.copytree(store / "polite", base)
    tensors = load_file(base / ADAPTER_WEIGHTS)
    tensors["base_model.model.lm_head.weight"] = torch.zeros(512, 64)
    save_file(tensors, base / ADAPTER_WEIGHTS)
    damaged = store / "damaged"
    shutil.copytree(store / "polite", damaged)
    with (damaged / ADAPTER_WEIGHTS).open("r+b") as file:
        file.truncate(1000)
    for name, setting in (
        ("prompts", {"peft_type": "P_TUNING"}),
        ("pissa", {"init_lora_weights": "pissa"}),
    ):
        shutil.copytree(store / "polite", store / name)
        config = json.loads((store / name / ADAPTER_CONFIG).read_text())
        (store / name / ADAPTER_CONFIG).write_text(json.dumps(config | setting))
    shutil.copytree(store / "polite", root / "outside")
    return store


@pytest.fixture(scope="module")
def serve(start_server: Callable[..., Any], model_store: Path) -> Callable[..., Any]:
    @contextmanager
    def serving(
        *listeners: list[str], workers: int = 1, **settings: Any
    ) -> Iterator[RunningServer]:
        with start_server(
            *([listeners] if listeners else []), model_store=model_store, **settings
        ) as server:
            order = RegisterOrder("m", initial_workers=workers)
            server.call(lambda: server.registry.register(order))
            yield server

    return serving


@pytest.fixture(scope="module")
def server(serve: Any) -> Iterator[RunningServer]:
    """Serve with two workers, of which one has started after the adapter `early` was added."""
    with serve(workers=1) as server:
        assert load(server, "early", "polite").status_code == 200
        server.call(lambda: server.registry.scale("m", None, 2))
        yield server


def load(server: RunningServer, name: str, path: str, **fields: Any) -> httpx.Response:
    return server.management.post(LOAD, json={"lora_name": name, "lora_path": path, **fields})


def unload(server: RunningServer, name: str, **fields: Any) -> httpx.Response:
    return server.management.post(UNLOAD, json={"lora_name": name, **fields})


def copies(state_dir: Path) -> list[Path]:
    return [path for path in (state_dir / "adapters").rglob("*") if path.is_file()]


def texts(server: RunningServer, model: str, count: int = 4) -> set[str]:
    """Return the different greedy answers to several requests, so that all workers answer."""
    body = {"model": model, "prompt": "Beautiful is", "max_tokens": 8, "temperature": 0}
    answers = [server.inference.post("/v1/completions", json=body) for _ in range(count)]
    return {
        answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        for answer in answers
    }


def model_ids(server: RunningServer) -> list[str]:
    return [model["id"] for model in server.inference.get("/v1/models").json()["data"]]


def test_an_added_adapter_answers_in_all_workers_until_it_is_removed(server: RunningServer) -> None:
    answer = load(server, "new", "polite")
    assert (answer.status_code, answer.text) == (200, ADDED.format("new"))
    assert model_ids(server) == ["m", "m/packed", "m/early", "m/new"]
    assert server.inference.get("/v1/models/m/new").status_code == 200
    (description,) = server.management.get("/models/m").json()
    assert description["addedAdapters"] == {"early": "polite", "new": "polite"}
    (text,) = texts(server, "m/packed")
    assert texts(server, "m/new") == {text} != texts(server, "m")
    again = load(server, "new", "terse")
    assert again.status_code == 400
    assert "'new' has already been loaded." in again.json()["error"]["message"]
    assert texts(server, "m/new") == {text}
    assert load(server, "new", "terse", load_inplace=True, model="m:1.0").status_code == 200
    (replaced,) = texts(server, "m/new")
    assert replaced != text
    answer = unload(server, "new")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    assert model_ids(server) == ["m", "m/packed", "m/early"]
    (refusal,) = texts(server, "m/new")
    assert "no adapter 'new'" in refusal
    missing = unload(server, "new")
    assert missing.status_code == 404
    assert "'new' cannot be found" in missing.json()["error"]["message"]
    assert len(copies(server.registry.state.directory)) == 3


@pytest.mark.parametrize(
    ("name", "path", "status", "reason"),
    [
        ("bad", "nothing", 404, "No adapter found for nothing"),
        ("bad", "n" * 300, 404, "No adapter found for nnn"),
        ("bad", "pickled", 404, "it has no adapter_model.safetensors"),
        ("bad", "m/../../outside", 404, "Relative path is not allowed"),
        ("bad", "{root}/outside", 404, "is not in the store"),
        ("bad", "file://{root}/outside", 404, "does not match any allowed URL"),
        ("bad", "s3://bucket/outside", 404, "does not match any allowed URL"),
        ("bad", "hf:org/outside", 404, "does not match any allowed URL"),
        ("bad", "damaged", 400, "does not fit the model"),
        ("bad", "prompts", 400, "its type is P_TUNING"),
        ("bad", "wide", 400, "does not fit the model"),
        ("bad", "pissa", 400, "was trained with init_lora_weights=pissa"),
        ("packed", "polite", 400, "is a part of the model's archive"),
        ("../bad", "polite", 400, "cannot be called"),
        ("", "polite", 400, "lora_name"),
    ],
)
def test_a_bad_adapter_leaves_the_model_as_it_was(
    server: RunningServer, model_store: Path, name: str, path: str, status: int, reason: str
) -> None:
    before = texts(server, "m")
    answer = load(server, name, path.format(root=model_store.parent))
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]
    assert model_ids(server) == ["m", "m/packed", "m/early"]
    assert len(copies(server.registry.state.directory)) == 3
    assert texts(server, "m") == before


def test_tensors_of_the_base_model_in_an_adapter_change_only_its_answers(
    server: RunningServer,
) -> None:
    before = texts(server, "m")
    assert load(server, "own", "base").status_code == 200
    assert texts(server, "m/own") != texts(server, "m/packed")
    assert texts(server, "m") == before
    assert unload(server, "own").status_code == 200


def test_an_adapter_that_one_worker_refuses_is_dropped_by_the_others(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (worker.channel for worker in server.registry.find("m").workers)

    async def refuse(name: str, directory: Path | None) -> str:
        return "no room"

    monkeypatch.setattr(second, "set_adapter", refuse)
    answer = load(server, "half", "polite")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no room")
    monkeypatch.undo()
    (refusal,) = texts(server, "m/half")
    assert "no adapter 'half'" in refusal
    assert first.batches == 0


def test_a_worker_that_starts_later_has_the_adapters(server: RunningServer) -> None:
    assert texts(server, "m/early", 9) == texts(server, "m/packed")


def test_the_next_server_has_the_adapters_until_the_model_is_unregistered(
    serve: Any, tmp_path: Path
) -> None:
    with serve(workers=0, state_dir=tmp_path) as server:
        assert load(server, "first", "terse").status_code == 200
    with serve(workers=0, state_dir=tmp_path) as server:
        assert model_ids(server) == ["m", "m/packed", "m/first"]
        # A version that could not be loaded ends like this.
        server.call(lambda: server.registry.discard(server.registry.find("m")))
        server.call(lambda: server.registry.register(RegisterOrder("m", initial_workers=0)))
        assert load(server, "second", "polite").status_code == 200
        assert unload(server, "first").status_code == 200
    with serve(workers=0, state_dir=tmp_path) as server:
        assert model_ids(server) == ["m", "m/packed", "m/second"]
        assert load(server, "second", "terse", load_inplace=True).status_code == 200
        server.call(lambda: server.registry.unregister("m"))
        assert not copies(tmp_path)
        server.call(lambda: server.registry.register(RegisterOrder("m", initial_workers=0)))
        assert model_ids(server) == ["m", "m/packed"]


def test_a_version_leaves_its_adapters_to_the_one_that_replaces_it(
    serve: Any,
) -> None:
    with serve(workers=0) as server:
        assert load(server, "new", "polite").status_code == 200
        order = RegisterOrder("m", initial_workers=0, replaces=True)
        server.call(lambda: server.registry.register(order))
        assert model_ids(server) == ["m", "m/packed", "m/new"]
        assert len(copies(server.registry.state.directory)) == 3


def test_an_adapter_that_is_added_while_a_replacement_loads_is_in_both(serve: Any) -> None:
    with serve() as server, ThreadPoolExecutor(1) as executor:
        order = RegisterOrder("m", initial_workers=1, replaces=True)
        old = server.registry.find("m")
        replacement = executor.submit(server.call, lambda: server.registry.register(order))
        while len(list(server.registry.all_versions())) == 1:
            time.sleep(0.001)
        assert load(server, "during", "polite").status_code == 200
        assert not replacement.done()
        replacement.result()
        assert server.registry.find("m") is not old
        assert texts(server, "m/during") == texts(server, "m/packed")


def test_an_adapter_of_a_model_that_is_unregistered_meanwhile_is_not_kept(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        (worker,) = server.registry.find("m").workers

        async def unregister(name: str, directory: Path | None) -> None:
            await server.registry.unregister("m")

        monkeypatch.setattr(worker.channel, "set_adapter", unregister)
        assert load(server, "late", "polite").status_code == 404
        assert not copies(server.registry.state.directory)


@pytest.mark.nightly
@pytest.mark.skipif(bool(list(missing_features(Isolation()))), reason="needs Landlock")
def test_an_isolated_model_takes_adapters(serve: Any) -> None:
    with serve(isolation="on") as server:
        assert load(server, "new", "polite").status_code == 200
        assert texts(server, "m/new", 1) == texts(server, "m/packed", 1)


@pytest.mark.nightly
def test_an_adapter_comes_from_the_hub_and_from_urls_that_are_allowed(
    serve: Any, model_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_double() as hub:
        hub.use(monkeypatch, tmp_path)
        hub.repos["org/polite"] = HubRepo()
        hub.repos["org/polite"].commit(model_store / "polite")
        outside = f"file://{model_store.parent}/outside"
        with serve(allowed_urls=["hf:org/.*", f"{outside}/.*"]) as server:
            for name, path in (("hub", "hf:org/polite"), ("url", outside)):
                answer = load(server, name, path)
                assert (answer.status_code, answer.text) == (200, ADDED.format(name))
            assert texts(server, "m/hub", 1) == texts(server, "m/url", 1)


@pytest.mark.parametrize("listeners", [(["inference", "management", "metrics"],), ()])
def test_only_the_management_token_changes_adapters(serve: Any, listeners: Any) -> None:
    tokens = {"inference_token": "of-inference", "management_token": "of-management"}
    with serve(*listeners, workers=0, **tokens) as server:
        for token, status in (("of-inference", 401), ("of-management", 404)):
            headers = {"authorization": f"Bearer {token}"}
            for path in (LOAD, f"{LOAD}/", UNLOAD):
                body = {"lora_name": "x", "lora_path": "nothing"}
                answer = server.management.post(path, json=body, headers=headers)
                assert answer.status_code == status, answer.text
