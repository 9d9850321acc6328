"""The example plugins, installed like a user's package and loaded by a real server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, clean, started, tsx
from tsx_runtime.plugins import ComparedAnswer

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins"
SECRET = "a secret of the test"
HANDLER = """
def handle(data, context):
    return None if data is None else [str(len(data))] * len(data)
"""
NAMES = "execution-parameters,signed-tokens,half-full,statsd,share,nearly-the-same-text"


@pytest.fixture(scope="module")
def site(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package and return its directory."""
    directory = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        directory,
        EXAMPLE,
    ]
    subprocess.run(command, check=True, timeout=120)
    return directory


@pytest.fixture(scope="module")
def environment(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    share = tmp_path_factory.mktemp("share")
    (share / "team").mkdir()
    make_model(share / "team" / "shared.mar", HANDLER)
    return {
        "PYTHONPATH": path,
        "EXAMPLE_TOKEN_SECRET": SECRET,
        "EXAMPLE_SHARE": str(share),
        "TSX_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TSX_WORKER_PRELOAD": "false",
    }


@pytest.fixture(scope="module")
def statsd() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(60)
        yield receiver


@pytest.fixture(scope="module")
def server(
    processes: None,
    environment: dict[str, str],
    statsd: socket.socket,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("store")
    make_model(
        store / "counting.mar",
        HANDLER,
        config="batchSize: 4\nmaxBatchDelay: 3000\nbatchPolicy: half-full\n",
    )
    settings = {
        "plugins": NAMES,
        "allowed_urls": "share://team/.*",
        "model_store": store,
        "load_models": "all",
    }
    options = [
        option for name, value in settings.items() for option in ("--set", f"{name}={value}")
    ]
    command = [sys.executable, "-m", "tsx_cli", "serve", *FREE_PORTS, *FREE_GRPC_PORTS, *options]
    with started(
        command,
        store,
        clean(environment) | {"EXAMPLE_STATSD": f"127.0.0.1:{statsd.getsockname()[1]}"},
    ) as running:
        yield running


@pytest.fixture
def token(site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    monkeypatch.syspath_prepend(str(site))

    def make(name: str = "ann", seconds: int = 600) -> dict[str, str]:
        # The import is here, since only the fixture puts the package on the path.
        from tsx_example_plugins.authentication import sign

        return {"x-user-token": sign(name, int(time.time()) + seconds, SECRET)}

    return make


def test_the_plugins_endpoint_requires_the_listeners_token(
    server: Running, token: Callable[..., dict[str, str]]
) -> None:
    address = f"{server.address('predictions')}/execution-parameters"
    assert httpx.get(address, timeout=60).status_code == 401
    assert httpx.post(address, headers=token(), timeout=60).status_code == 405
    answer = httpx.get(address, headers=token(), timeout=60)
    assert answer.json() == {
        "MaxConcurrentTransforms": 1,
        "BatchStrategy": "MULTI_RECORD",
        "MaxPayloadInMB": 6,
    }
    assert (
        httpx.get(
            f"{server.address('models')}/execution-parameters", headers=token("admin"), timeout=60
        ).status_code
        == 404
    )


def test_a_client_needs_a_valid_token(
    server: Running, token: Callable[..., dict[str, str]]
) -> None:
    prediction = f"{server.address('predictions')}/predictions/counting"
    models = f"{server.address('models')}/models"
    # One connection is used to show that no request head is cached.
    with httpx.Client(timeout=60) as client:
        valid_headers = token()
        forged_headers = {"x-user-token": valid_headers["x-user-token"].replace("ann", "admin")}
        for headers, status in (
            (valid_headers, 200),
            ({}, 401),
            (forged_headers, 401),
            (token(seconds=-1), 401),
            (valid_headers, 200),
        ):
            assert client.post(prediction, headers=headers).status_code == status
        # Tokens expire at whole seconds, so this one is valid for at least one second.
        expiring_headers = token(seconds=2)
        assert client.post(prediction, headers=expiring_headers).status_code == 200
        while int(expiring_headers["x-user-token"].split(".")[1]) >= time.time():
            time.sleep(0.05)
        refused = client.post(prediction, headers=expiring_headers)
        assert (refused.status_code, "is over" in refused.json()["message"]) == (401, True)
        refused = client.get(models, headers=valid_headers)
        assert (refused.status_code, "ann may ask" in refused.json()["message"]) == (403, True)
        assert client.get(models, headers=token("admin")).status_code == 200
        assert client.get(f"{server.address('predictions')}/ping").status_code == 200


def test_grpc_uses_the_same_plugin(server: Running, token: Callable[..., dict[str, str]]) -> None:
    grpc = pytest.importorskip("grpc")
    with grpc.insecure_channel(server.address("gRPC predictions")) as channel:
        predict = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
        )
        # PredictionsRequest(model_name="counting", input={"data": b"x"})
        request = b"\x0a\x08counting\x1a\x09\x0a\x04data\x12\x01x"
        with pytest.raises(grpc.RpcError) as caught:
            predict(request, timeout=60)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert predict(request, metadata=[*token().items()], timeout=60) == b"\x0a\x011"


def test_half_a_batch_is_sent_at_once(
    server: Running, token: Callable[..., dict[str, str]]
) -> None:
    """A single request waits for a fifth of maxBatchDelay (0.6 s); two are half of a batch."""
    prediction = f"{server.address('predictions')}/predictions/counting"
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(2) as pool:
        assert {
            answer.text
            for answer in pool.map(lambda _: client.post(prediction, headers=token()), range(2))
        } == {"2"}


def test_the_sink_sends_the_metrics(server: Running, statsd: socket.socket) -> None:
    while not statsd.recv(4096).startswith(b"tsx.tsx_workers."):
        # The socket's timeout ends the loop if no other samples arrive.
        pass


def test_a_model_is_loaded_from_the_plugins_source(
    server: Running, token: Callable[..., dict[str, str]]
) -> None:
    models, admin = f"{server.address('models')}/models", token("admin")
    answer = httpx.post(
        models,
        params={"url": "share://team/shared.mar", "initial_workers": 1},
        headers=admin,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert (
        httpx.post(
            f"{server.address('predictions')}/predictions/shared", headers=token(), timeout=60
        ).text
        == "1"
    )
    for url, status in (("share://team/none.mar", 400), ("share://others/shared.mar", 404)):
        assert (
            httpx.post(models, params={"url": url}, headers=admin, timeout=60).status_code == status
        )


def test_a_shadows_responses_are_compared_by_the_plugin(
    server: Running, token: Callable[..., dict[str, str]]
) -> None:
    from tsx_example_plugins.comparisons import nearly_the_same_text

    def judged(text: str) -> bool | str:
        return nearly_the_same_text(
            b"",
            *(ComparedAnswer(200, {}, answer.encode()) for answer in ("a b c d e f g h i j", text)),
        )

    assert judged("a b c d e f g h i k") is True
    assert judged("a b c") == "only 46% of the words agree"
    models, admin = f"{server.address('models')}/models/counting", token("admin")
    compare = {"kind": "plugin", "name": "nearly-the-same-text"}
    response = httpx.put(
        f"{models}/shadow?force=true",
        json={"to": "2.0", "share": 1, "compare": compare},
        headers=admin,
        timeout=60,
    )
    assert (response.status_code, response.json()["why"]) == (200, "Version 2.0 is not registered.")
    assert (
        httpx.patch(
            f"{models}/traffic", json={"shadow": None}, headers=admin, timeout=60
        ).status_code
        == 200
    )


def test_a_missing_plugin_is_reported_at_the_start(
    environment: dict[str, str], tmp_path: Path
) -> None:
    result: Any = tsx(["serve", "--set", "plugins=statd"], tmp_path, environment)
    assert result.returncode != 0
    assert "did you mean 'statsd'?" in result.stderr
