"""The clients against a real server, over HTTP, TLS and gRPC."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from tests.support.certificates import make_certificate
from tests.support.models import make_model
from tests.support.typed_models import COUNTER, TYPED
from tsx_archiver import ArchiveSpec
from tsx_client import (
    AccessDenied,
    AsyncClient,
    Client,
    ClientError,
    ConnectionFailed,
    Event,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    Retry,
    ServerError,
    StreamInterrupted,
)
from tsx_client import grpc as grpc_transport
from tsx_client.__main__ import main
from tsx_client.stubs import generate
from tsx_runtime.testing import ServerUnderTest, serve

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
SEVEN = DIGITS / "images" / "7.png"
STORY = """
import os
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    return [answer(index, row["body"], context) for index, row in enumerate(data)]


def answer(index, body, context):
    def send(piece):
        send_intermediate_predict_response([piece], {index: context.get_request_id(index)}, "", 200, context)

    word = body if isinstance(body, str) else bytes(body).decode() if isinstance(body, (bytes, bytearray)) else body["do"]
    if word == "headers":
        return dict(context.get_all_request_header(index))
    if word in ("events", "broken"):
        context.set_response_content_type(index, "text/event-stream")
        send('data: {"n": 1}\\n\\n')
        if word == "broken":
            raise ValueError("no more")
        return 'data: {"n": 2}\\n\\ndata: [DONE]\\n\\n'
    send("a")
    while word == "endless":
        send("b" * 1000)
    if word == "die":
        os._exit(7)
    return "c"
"""
# The last lines are wrong.
TYPED_PROGRAM = """\
answer = client.models.sentiment.predict(text="a nice day", tags=[{"name": "a"}], top=1)
print(answer["label"].strip())
print(answer["tags"][0]["name"])
given = client.models.sentiment.predict(text="", image=b"\\x89P", exact=True, language="de")["given"]
print([given["image"], given["exact"]])
print([event.json()["n"] for event in client.models.counter.stream(count=2)])
answer["lable"]
client.models.sentiment.predict(top=1)
client.models.sentiment.predict(text="", top="one")
client.models.sentiment.predict(text="", language="fr")
client.models.sentiment.predict(text="", tags=[{"weight": 1}])
next(iter(client.models.counter.stream(count=2))).json()["m"]
client.models.counter.predict(count=1) + 1
"""
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def server(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    directory = tmp_path_factory.mktemp("client")
    (directory / "story.py").write_text(STORY)
    digits = ArchiveSpec(
        "digits",
        str(DIGITS / "handler.py"),
        serialized_file=DIGITS / "digits.pth",
        model_file=DIGITS / "model.py",
        extra_files=[DIGITS / "index_to_name.json"],
    )
    numbers = ArchiveSpec("numbers", "base_handler", serialized_file=DIGITS / "digits.pt2")
    odd = ArchiveSpec("odd-name", str(directory / "story.py"))
    typed = [
        make_model(directory / f"{name}.mar", handler)
        for name, handler in (("sentiment", TYPED), ("counter", COUNTER))
    ]
    with serve(
        *typed,
        digits,
        numbers,
        ArchiveSpec("story", str(directory / "story.py")),
        odd,
        enable_grpc=True,
    ) as server:
        yield server


def synchronous(url: str, **options: Any) -> tuple[Call, Call]:
    """Return `predict` and `stream` of a client that is closed after each call."""

    def predict(*values: Any, **inputs: Any) -> Any:
        with Client(url, timeout=60, **options) as client:
            return client.predict(*values, **inputs)

    def stream(*values: Any, **inputs: Any) -> Any:
        with Client(url, timeout=60, **options) as client:
            return list(client.stream(*values, **inputs))

    return predict, stream


def asynchronous(url: str, **options: Any) -> tuple[Call, Call]:
    async def predict(*values: Any, **inputs: Any) -> Any:
        async with AsyncClient(url, timeout=60, **options) as client:
            return await client.predict(*values, **inputs)

    async def stream(*values: Any, **inputs: Any) -> Any:
        async with AsyncClient(url, timeout=60, **options) as client:
            return [piece async for piece in client.stream(*values, **inputs)]

    def in_a_loop(function: Call) -> Call:
        return lambda *values, **inputs: asyncio.run(function(*values, **inputs))

    return in_a_loop(predict), in_a_loop(stream)


@pytest.fixture(params=["http", "async http", "grpc", "async grpc"])
def calls(request: pytest.FixtureRequest, server: ServerUnderTest) -> tuple[Call, Call]:
    options = {"grpc": server.addresses["grpc_inference"]} if "grpc" in request.param else {}
    return (asynchronous if "async" in request.param else synchronous)(server.url, **options)


def test_every_client_predicts_and_streams(calls: tuple[Call, Call]) -> None:
    predict, stream = calls
    assert next(iter(predict("digits", image=SEVEN))) == "seven"
    assert next(iter(predict("digits", SEVEN.read_bytes(), version="1.0"))) == "seven"
    assert predict("numbers", images=np.zeros((2, 1, 8, 8)))["output"].shape == (2, 10)
    assert b"".join(stream("story", b"tell")) == b"ac"
    assert predict("story", b"tell") == b"ac"
    with pytest.raises(NotFound, match="Model not found: nothing") as absent:
        predict("nothing", b"x")
    assert absent.value.type == "ModelNotFoundException"
    with pytest.raises(ServerError) as failed:
        predict("story", b"\xff")
    assert failed.value.status == 500
    with pytest.raises(StreamInterrupted):
        stream("story", b"die")


def test_events_are_parsed(server: ServerUnderTest) -> None:
    with Client(server.url) as client:
        assert [event.json() for event in client.stream("story", "events")] == [{"n": 1}, {"n": 2}]
        pieces = client.stream("story", "broken")
        assert next(pieces) == Event('{"n": 1}')
        with pytest.raises(StreamInterrupted, match="no more"):
            next(pieces)


def test_models_are_attributes_that_take_their_signatures_inputs(
    server: ServerUnderTest,
) -> None:
    with Client(server.url) as client:
        names = ["counter", "digits", "numbers", "odd-name", "sentiment", "story"]
        assert client.model_names() == names
        assert client.metadata("numbers")["inputs"] == [
            {"name": "images", "datatype": "FP32", "shape": [-1, 1, 8, 8]}
        ]
        assert client.metadata("digits", version="1.0")["parameters"] == {"input": "image"}
        assert next(iter(client.models.digits.predict(image=str(SEVEN)))) == "seven"
        assert list(client.models["odd-name"].stream({"do": "tell"})) == [b"a", b"c"]
        with pytest.raises(TypeError, match="takes image"):
            client.models.digits.predict(text="seven")


def test_an_error_of_wrong_input_names_the_fields(server: ServerUnderTest) -> None:
    with (
        Client(server.url) as client,
        pytest.raises(
            InvalidRequest, match=r"top: Input should be a valid integer; text: Field req"
        ),
    ):
        client.models.sentiment.predict(top="one")


def test_leaving_a_stream_ends_it_on_the_server(server: ServerUnderTest) -> None:
    with Client(server.url, timeout=60) as client:
        pieces = client.stream("story", "endless")
        assert next(pieces) == b"a"
        pieces.close()  # type: ignore[attr-defined]  # a generator
        # The model has one worker, so the abandoned stream must have ended.
        assert client.predict("story", "tell") == b"ac"


def test_deadline_trace_and_custom_headers_reach_the_handler(server: ServerUnderTest) -> None:
    with Client(server.url, timeout=60, trace=True) as client:

        def send(**options: Any) -> dict[str, str]:
            headers = client.predict("story", "headers", **options)
            return {name.lower(): value for name, value in headers.items()}

        headers = send(headers={"X-Own": "1"})
        span = NonRecordingSpan(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)))
        with trace.use_span(span):
            assert send()["traceparent"] == f"00-{1:032x}-{2:016x}-01"
    assert headers["x-own"] == "1"
    assert re.fullmatch(r"00-.*-01", headers["traceparent"])
    assert 59_000 <= int(headers["x-tsx-timeout-ms"]) <= 60_000


@pytest.mark.parametrize(
    "options", [{"retry": Retry(2, 0.01)}, {"grpc": "127.0.0.1:9", "retry": Retry(1)}]
)
def test_the_error_of_a_missing_server_names_its_address(options: Any) -> None:
    client = Client("http://127.0.0.1:9", **options)
    with client, pytest.raises(ConnectionFailed, match=r"at http://127\.0\.0\.1:9") as caught:
        client.predict("m", b"x")
    assert caught.value.before_request


def test_a_url_has_a_scheme() -> None:
    with pytest.raises(ClientError, match="neither http:// nor https://"):
        Client("127.0.0.1:9")


def test_the_error_of_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tsx_client.grpc")
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ImportError, match=r"pip install 'tsx-client\[grpc\]'"):
        Client(grpc="127.0.0.1:9")


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("failed to connect to all addresses; last error: refused", httpx.ConnectError),
        ("Socket closed", httpx.ReadError),
    ],
)
def test_a_lost_grpc_connection_is_not_retried_unless_refused(
    details: str, kind: type[Exception]
) -> None:
    lost = SimpleNamespace(
        code=lambda: grpc.StatusCode.UNAVAILABLE, details=lambda: details, trailing_metadata=tuple
    )
    with pytest.raises(kind):
        grpc_transport._failure(lost, httpx.Request("POST", "http://server/predictions/m"))


@pytest.mark.usefixtures("processes")
def test_tls_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_certificate(tmp_path)
    (tmp_path / "story.py").write_text(STORY)
    settings = {
        "inference_address": "https://localhost:0",
        "inference_token": "a",
        "worker_preload": False,
        "certificate_file": pair.certificate,
        "private_key_file": pair.key,
        "enable_grpc_ssl": True,
        "enable_grpc": True,
    }
    with serve(ArchiveSpec("story", str(tmp_path / "story.py")), **settings) as guarded:
        trusted = ssl.create_default_context(cafile=pair.certificate)
        address = guarded.addresses["grpc_inference"].replace("127.0.0.1", "localhost")
        for options in ({}, {"grpc": address}):
            with Client(guarded.url, token="a", verify=trusted, **options) as client:
                assert client.predict("story", b"tell") == b"ac"
        monkeypatch.setenv("TSX_INFERENCE_TOKEN", "b")
        with Client(guarded.url, verify=trusted) as client, pytest.raises(AccessDenied):
            client.predict("story", "tell")
        client = Client(guarded.url, retry=Retry(1))
        with client, pytest.raises(ConnectionFailed, match="certificate"):
            client.predict("story", "tell")


def test_connections_are_reused(server: ServerUnderTest) -> None:
    with Client(server.url) as client:
        for _ in range(3):
            client.predict("story", "tell")
        pool = client._http._http._transport._pool
        assert len(pool.connections) == 1


def test_openai_has_its_own_client(server: ServerUnderTest) -> None:
    with Client(server.url, token="a") as client:
        openai = client.openai()
    assert (str(openai.base_url), openai.api_key) == (f"{server.url}/v1/", "a")


@pytest.mark.slow
def test_stubs_name_models_and_inputs_for_type_checkers(
    server: ServerUnderTest, tmp_path: Path
) -> None:
    stubs, program = tmp_path / "stubs.py", tmp_path / "program.py"
    assert main(["generate", server.url, "-o", str(stubs)]) is None
    program.write_text(
        f"from stubs import AsyncClient, Client\n\nclient = Client({server.url!r})\n"
        "print(client.models.digits.predict(image='7.png'))\nclient.models.digits.predict(text='seven')\nclient.models.gone\n"
        "async def main() -> None:\n    await AsyncClient().models.numbers.predict(images=[[0.0]], timeout='long')\n"
        + TYPED_PROGRAM
    )
    # Other packages are not followed, since reading their types takes ten seconds.
    libraries = ",".join(
        f"{name}.*" for name in ("anyio", "httpx", "numpy", "openai", "opentelemetry")
    )
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{libraries}]\nfollow_imports = skip\n")
    source = str(ROOT / "packages" / "tsx-client" / "src")
    environment = {"MYPYPATH": source, "PYTHONPATH": source, "PATH": ""}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    mypy_output = run("-m", "mypy", "--strict", "stubs.py", "program.py").stdout
    errors = [line.split(": ", 2) for line in mypy_output.splitlines() if ": error:" in line]
    assert [
        (line, text.rpartition("[")[2]) for line, _, text in errors if "tsx_client" not in line
    ] == [
        ("program.py:5", "call-arg]"),
        ("program.py:6", "attr-defined]"),
        ("program.py:8", "arg-type]"),
        ("program.py:15", "typeddict-item]"),
        ("program.py:16", "call-arg]"),
        ("program.py:17", "arg-type]"),
        ("program.py:18", "arg-type]"),
        ("program.py:19", "typeddict-item]"),
        ("program.py:20", "typeddict-item]"),
        ("program.py:21", "operator]"),
    ], mypy_output
    assert run("stubs.py").returncode == 0
    typed_program = tmp_path / "typed.py"
    typed_program.write_text(
        f"from stubs import Client\n\nclient = Client({server.url!r})\n"
        + "".join(TYPED_PROGRAM.splitlines(keepends=True)[:6])
    )
    assert run("typed.py").stdout.splitlines() == ["positive", "a", "['iVA=', True]", "[0, 1]"]


def test_generate_prints_stubs_and_reports_a_missing_server(
    server: ServerUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", server.url]) is None
    assert "odd" not in capsys.readouterr().out.lower()
    assert "No server answers" in str(main(["generate", "http://127.0.0.1:9"]))


def test_any_httpx_transport_can_replace_the_network() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, json={"path": request.url.path, "type": request.headers["content-type"]}
        )

    with Client("http://any/prefix", transport=httpx.MockTransport(handle)) as client:
        assert (
            client.predict("a/b", {"x": 1}, version="c d")["path"] == "/prefix/predictions/a/b/c d"
        )


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[" * 100_000,
        b'"\xff"',
        b"null",
        b"[]",
        b'"x"',
        b"[[1, 2]]",
        b'{"models": 1, "inputs": 1}',
        b'{"models": "abc", "inputs": [1]}',
        b'{"models": null, "inputs": [{"name": "x"}]}',
        b'{"models": {}, "inputs": null, "parameters": 1}',
    ],
)
def test_a_response_in_another_format_is_invalid(body: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "application/json"}, content=body)

    with Client("http://any", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(InvalidAnswer, match="/v1/models cannot be read"):
            client.model_names()
        with pytest.raises(InvalidAnswer, match="/v2/models/m cannot be read"):
            client.predict("m", x=1)
        if not body.startswith(b"{"):
            with pytest.raises(InvalidAnswer):
                client.metadata("m")


@pytest.mark.parametrize("name", ["\ud800", "m"])
def test_broken_metadata_is_an_invalid_response(name: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=json.dumps({"models": [name], "versions": [1]}))

    client = Client("http://any", transport=httpx.MockTransport(answer))
    with client, pytest.raises(InvalidAnswer):
        generate(client)


def test_a_non_numeric_status_is_a_server_error() -> None:
    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc is not typed
        def service(self, details: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(self.answer)

        def answer(self, request: bytes, context: Any) -> Iterator[bytes]:
            context.send_initial_metadata((("x-http-status", "fine"),))
            yield b"\n\x01a"

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            Client("http://127.0.0.1:9", grpc=f"127.0.0.1:{port}") as client,
            pytest.raises(ServerError) as caught,
        ):
            client.predict("m", b"x")
    finally:
        server.stop(None)
    assert caught.value.status == 502


def test_feedback_is_sent_as_json_with_scalars_of_numpy() -> None:
    bodies: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/feedback/a model")
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"accepted": 1, "duplicates": 0, "errors": []})

    transport = httpx.MockTransport(answer)
    item = {"key": "order-17", "truth": np.float32(1.5)}
    with Client(transport=transport) as client:
        assert client.feedback("a model", item)["accepted"] == 1

    async def main() -> Any:
        async with AsyncClient(transport=transport) as client:
            return await client.models["a model"].feedback([{"key": "b", "truth": np.int64(3)}])

    assert asyncio.run(main())["errors"] == []
    assert bodies == [{"key": "order-17", "truth": 1.5}, [{"key": "b", "truth": 3}]]
