"""LitServe's classes, whose answers must equal those of LitServe's own server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.served_model import a_served_model, answers_of
from tests.support.servers import FREE_PORTS, Running, serving
from tsx_archiver.metadata.safeyaml import load_yaml_file
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_archiver.packing import plan_archive
from tsx_cli.archive.directory import as_directory
from tsx_cli.archive.python_files.litserve import NOT_LITSERVE
from tsx_cli.archive.python_files.models import find_models
from tsx_cli.archive.python_files.spec import python_file_spec
from tsx_cli.common.failure import CliError
from tsx_runtime.features.python_files.worker.litserve import LitServeHandler
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.execution.batch import ServedModel
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics

pytest.importorskip("litserve")

# A file as in LitServe's documentation. LitServe runs it as a program, and tsx imports it.
SERVER = """\
import asyncio
import sys

import litserve as ls
from fastapi import HTTPException, UploadFile
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, Field


class Simple(ls.LitAPI):
    '''Squares numbers.'''

    def __init__(self, power=1, **arguments):
        super().__init__(**arguments)
        self.power = power

    def setup(self, device):
        assert self.device is None
        assert self.request_timeout == 60
        self.model = lambda x: x**self.power

    def decode_request(self, request):
        if "input" not in request:
            raise HTTPException(418, {"missing": "input"})
        return request["input"]

    def predict(self, x):
        return self.model(x)

    def encode_response(self, output):
        if output == 0:
            return "nothing"
        if output == 1:
            return PlainTextResponse("one", 201, {"x-one": "1"})
        return {"output": output, "device": self.device}


class Batched(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request, context):
        context["name"] = request["name"]
        return float(request["input"])

    def batch(self, inputs, context):
        return [x + len(entry["name"]) for x, entry in zip(inputs, context)]

    def predict(self, x):
        return [value**2 for value in x]

    def encode_response(self, output, context):
        if output < 0.5:
            raise HTTPException(409, "small")
        return {"output": output, **context}


class Streaming(ls.LitAPI):
    def predict(self, request, **kwargs):
        for number in range(3):
            yield f"{number}: {request['input']}"

    def encode_response(self, outputs):
        for number, output in enumerate(outputs):
            yield {"output": output} if number else output


class BatchedStreaming(ls.LitAPI):
    def decode_request(self, request):
        return request["input"]

    def predict(self, x):
        for number in range(3):
            yield [f"{number}: {text}" for text in x]

    def encode_response(self, outputs, context):
        for output in outputs:
            yield [{"output": text} for text in output]


class Async(ls.LitAPI):
    async def decode_request(self, request):
        return request["input"]

    async def predict(self, x):
        await asyncio.sleep(0)
        return x * 2

    def encode_response(self, output):
        return [output]


class AsyncStreaming(ls.LitAPI):
    async def predict(self, request):
        for letter in request["input"]:
            yield letter

    async def encode_response(self, outputs):
        async for output in outputs:
            yield output.upper()


class Text(BaseModel):
    text: str = Field(max_length=10)


class Size(BaseModel):
    size: int = Field(alias="theSize")


class Typed(ls.LitAPI):
    def decode_request(self, request: Text):
        return request.text

    def predict(self, text):
        return len(text)

    def encode_response(self, output) -> Size:
        return Size(theSize=output)


class File(ls.LitAPI):
    def decode_request(self, request: UploadFile, **kwargs):
        return f"{request.filename} {request.file.read().decode()}"

    def predict(self, x):
        return x

    def encode_response(self, output) -> Response:
        return Response(output.encode(), media_type="image/png")


class Form(ls.LitAPI):
    def decode_request(self, request: ls.Request):
        texts = ",".join(request.getlist("text"))
        return f"{texts} {request['file'].filename} {request['file'].file.read().decode()}"

    def predict(self, x):
        return x


if __name__ == "__main__":
    ls.server._MCP_AVAILABLE = False  # LitServe does not start with version 2 of the SDK of MCP.
    server = ls.LitServer(
        [
            Simple(3, api_path="/simple"),
            Batched(max_batch_size=4, batch_timeout=0.05, api_path="/batched"),
            Streaming(stream=True, api_path="/v1/streaming"),
            BatchedStreaming(4, 0.05, "/batched_streaming", True),
            Async(enable_async=True, api_path="/async"),
            AsyncStreaming(enable_async=True, stream=True, api_path="/async_streaming"),
            Typed(api_path="/typed"),
            File(api_path="/file"),
            Form(api_path="/form"),
        ],
        accelerator="cpu",
        timeout=60,
        track_requests=False,
    )
    server.run(port=int(sys.argv[1]), generate_client_file=False)
"""


class Case(NamedTuple):
    """Requests at the same time to one model, as arguments of httpx, and their responses."""

    model: str
    requests: list[dict[str, Any]]
    responses: list[tuple[int, bytes]]
    path: str = ""  # LitServe's path if it is not the model's name


def inputs(*values: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"json": {"input": value, **fields}} for value in values]


CASES = [
    Case("simple", inputs(3), [(200, b'{"output":27,"device":"cpu"}')]),
    Case("simple", [{"json": {}}], [(418, b'{"detail":{"missing":"input"}}')]),
    Case("simple", inputs(0), [(200, b'"nothing"')]),
    Case("simple", inputs(1), [(201, b"one")]),
    Case(
        "batched",
        inputs(1, 2, 3, name="a"),
        [(200, b'{"output":%d.0,"name":"a"}' % square) for square in (4, 9, 16)],
    ),
    Case(
        "batched",
        inputs(0, 2, name=""),
        [(409, b'{"detail":"small"}'), (200, b'{"output":4.0,"name":""}')],
    ),
    Case(
        "streaming",
        inputs("é"),
        [(200, '0: é{"output": "1: \\u00e9"}\n{"output": "2: \\u00e9"}\n'.encode())],
        "v1/streaming",
    ),
    Case(
        "batched_streaming",
        inputs("a", "b"),
        [
            (200, b"".join(b'{"output": "%d: %b"}\n' % (number, text) for number in range(3)))
            for text in (b"a", b"b")
        ],
    ),
    Case("async", inputs(3), [(200, b"[6]")]),
    Case("async_streaming", inputs("hello"), [(200, b"HELLO")]),
    Case("typed", [{"json": {"text": "hello"}}], [(200, b'{"theSize":5}')]),
    Case("file", [{"files": {"request": ("a.txt", b"hey")}}], [(200, b"a.txt hey")]),
    Case(
        "form",
        [{"files": [("file", ("a.txt", b"hey")), ("text", (None, "x")), ("text", (None, "y"))]}],
        [(200, b'"x,y a.txt hey"')],
    ),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("litserve") / "server.py"
    path.write_text(SERVER)
    return path


def load(path: Path) -> ServedModel:
    """Load a model as a worker does, from what the command line makes of the file."""
    with (
        python_file_spec(path, requirements=False) as (spec, _),
        as_directory(plan_archive(spec)) as directory,
    ):
        plan, config = plan_archive(spec), directory / DEFAULT_CONFIG
        context = Context(
            *("m", str(directory), plan.manifest, 1, None, "1"),
            metrics=Metrics("m"),
            model_yaml_config=load_yaml_file(config) if config.exists() else {},
        )
        handler = LitServeHandler()
        handler.initialize(context)
    return a_served_model(handler.handle, handler, context=context, decode=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_a_class_is_called_as_by_litserve(file: Path, case: Case) -> None:
    (target,) = [model.target for model in find_models(file) if model.name == case.model]
    requests = [httpx.Request("POST", "http://tsx", **request) for request in case.requests]
    pieces: dict[int, bytes] = {}

    def send(position: int, headers: Any, body: Any) -> None:
        pieces[position] = pieces.get(position, b"") + bytes(body)

    model = load(Path(f"{file}:{target}"))
    content_type = [(b"content-type", requests[0].headers["content-type"].encode())]
    answers = answers_of(model, *(r.read() for r in requests), headers=content_type, send=send)
    responses = [
        (status, pieces.get(position, b"") + body)
        for position, (status, _, body) in enumerate(answers)
    ]
    assert responses == case.responses


def test_wrong_input_is_answered_with_422_and_the_others_are_answered(file: Path) -> None:
    model = load(Path(f"{file}:Typed"))
    headers = [(b"content-type", b"application/json")]
    bodies = b'{"text": "a"}', b'{"txt": "a"}', b"{"
    (_, _, answer), missing, invalid = answers_of(model, *bodies, headers=headers)
    assert answer == b'{"theSize":1}'
    (error,) = json.loads(missing[2])["detail"]
    assert (missing[0], error["type"], error["loc"]) == (422, "missing", ["body", "text"])
    assert (invalid[0], json.loads(invalid[2])["detail"][0]["type"]) == (422, "json_invalid")


def test_the_signature_has_the_types_and_the_docstring(file: Path) -> None:
    typed, simple = (load(Path(f"{file}:{name}")).entry.instance for name in ("Typed", "Simple"))
    assert typed.signature["input"]["properties"]["text"]["maxLength"] == 10
    assert typed.signature["output"]["required"] == ["theSize"]
    assert simple.signature["description"] == "Squares numbers."
    stream = load(Path(f"{file}:Streaming")).entry.instance.signature
    assert (stream["streams"], stream["output_type"]) == (True, "text/plain; charset=utf-8")


def test_a_file_is_a_response_and_an_upload_without_a_form_is_one(tmp_path: Path) -> None:
    served = tmp_path / "served.bin"
    served.write_bytes(b"content")
    model = load(
        write(
            tmp_path,
            f"""
            from fastapi import UploadFile
            from fastapi.responses import FileResponse

            class Api(ls.LitAPI):
                def decode_request(self, request: UploadFile):
                    assert request.file.read() == b"picture" and request.filename is None
                def predict(self, x):
                    return x
                def encode_response(self, output) -> FileResponse:
                    return FileResponse({str(served)!r}, media_type="image/png")
            """,
        )
    )
    ((status, headers, body),) = answers_of(model, b"picture")
    assert (status, body) == (200, b"content")
    assert b"content-type: image/png\r\n" in headers


def test_a_stream_with_values_that_cannot_be_sent_fails(tmp_path: Path) -> None:
    model = load(
        write(
            tmp_path,
            """
            class Api(ls.LitAPI):
                def predict(self, x):
                    yield 1
                def encode_response(self, outputs):
                    yield from outputs
            def main():
                ls.LitServer(Api(stream=True))
            """,
        )
    )
    ((status, _, body),) = answers_of(model, b"{}")
    assert status == 500
    assert b"yielded int" in body


MAIN = "if __name__ == '__main__':\n"
API = "class Api(ls.LitAPI):\n    def predict(self, x):\n        return x\n"


def write(folder: Path, code: str, name: str = "api.py") -> Path:
    path = folder / name
    path.write_text(f"import litserve as ls\n{textwrap.dedent(code)}")
    return path


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        ("ls.LitServer(Api())", {}),
        ("ls.LitServer(Api(), accelerator='auto', devices=2, workers_per_device=1)", {}),
        ("ls.LitServer(Api(), 'cuda', 2, 3)", (
            {"deviceType": "cuda", "deviceIds": [0, 1], "minWorkers": 6, "maxWorkers": 6}
        )),
        ("ls.LitServer(Api(), 'gpu', [3])", {"deviceType": "gpu", "deviceIds": [3]}),
        ("ls.LitServer([Api()], workers_per_device={'/predict': 2})", {}),
        ("ls.LitServer(Api(), timeout=30)", {}),
        ("ls.LitServer(Api(), timeout=900.5)", {"responseTimeout": 901}),
        ("ls.LitServer(Api(), timeout=False)", {"responseTimeout": 86_400}),
        ("ls.LitServer(Api(), timeout=-1)", {"responseTimeout": 86_400}),
        ("ls.LitServer(Api(), max_batch_size=8)", {"batchSize": 8}),
        ("a = Api(max_batch_size=8)", {"batchSize": 8, "init_args": {"max_batch_size": 8}}),
        ("a = Api(1, 0.5)", {"init_args": {"max_batch_size": 1, "batch_timeout": 0.5}}),
    ],
)  # fmt: skip
def test_arguments_are_settings(tmp_path: Path, code: str, settings: dict[str, Any]) -> None:
    (model,) = find_models(write(tmp_path, API + f"{MAIN}    {code}"))
    assert model.litserve.settings == settings


def test_arguments_of_the_base_class_are_settings_too(tmp_path: Path) -> None:
    code = API + "    def __init__(self, size):\n        super().__init__(max_batch_size=4)\n"
    path = write(tmp_path, code + "    batch_size = 2\nApi('small')\n")
    with python_file_spec(path, requirements=False) as (spec, notes):
        assert spec.config_file is not None
        config = load_yaml_file(Path(spec.config_file))
    assert config == {"batchSize": 2, "init_args": {"size": "small"}}
    assert "batches of requests" in notes[0]


def test_arguments_that_are_no_literals_are_init_args(tmp_path: Path) -> None:
    path = write(tmp_path, API + "    def __init__(self, a, b): ...\nApi(1, len(path))")
    with (
        pytest.raises(CliError, match="Api: b must be written out"),
        python_file_spec(path, requirements=False),
    ):
        pass
    (tmp_path / DEFAULT_CONFIG).write_text("init_args: {b: 2}")
    with python_file_spec(path, requirements=False) as (spec, _):
        assert load_yaml_file(Path(spec.config_file or ""))["init_args"] == {"a": 1, "b": 2}


def test_arguments_without_effect_are_printed(tmp_path: Path) -> None:
    path = write(tmp_path, API + "ls.LitServer(Api(), callbacks=[log], workers_per_device=N)")
    with python_file_spec(path, requirements=False) as (_, notes):
        assert "note: LitServer's callbacks, workers_per_device have no effect" in notes


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("a = Api(1)\nb = Api(2)", r"Api is constructed as Api\(1\) and as Api\(2\)"),
        ("ls.LitServer(Api(), timeout='30')", "an argument of a wrong type"),
    ],
)
def test_files_that_cannot_be_served_are_refused(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(CliError, match=message):
        find_models(write(tmp_path, API + code))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "    def __init__(self):\n        super().__init__(spec=ls.OpenAISpec())",
            "has a spec or a loop",
        ),
        (
            "    def __init__(self):\n"
            "        super().__init__(loop=type('Loop', (ls.loops.LitLoop,), {})())",
            "has a spec or a loop",
        ),
        (MAIN + "    Api(stream=True)", "Api cannot be prepared: .*yield"),
        (MAIN + "    Api(enable_async=True)", "Api cannot be prepared: .*predict must be"),
        ("import litserve_extras", "litserve_extras"),
    ],
)
def test_classes_that_cannot_be_served_do_not_load(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(LoadError, match=f"(?s){message}"):
        load(write(tmp_path, API + code))


def test_without_litserve_the_error_names_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litserve", None)
    with pytest.raises(LoadError, match=r"litserve.*Install that module"):
        load(Path(f"{file}:Simple"))


def test_other_bases_of_the_file_and_names_of_imports_are_found(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "from litserve import LitAPI\n"
        "class Base(LitAPI):\n    def predict(self, x): ...\n"
        "class FirstApi(Base): ...\n"
        "class Second(Base): ...\n"
        "class Plain:\n    def predict(self, x): ...\n"
        "Second(api_path='/v1/classes/')\n",
    )
    models = {model.name: model.litserve is not NOT_LITSERVE for model in find_models(path)}
    assert models == {"first_api": True, "classes": True, "plain": False}


async def responses(url: str, case: Case, path: str) -> list[tuple[int, bytes]]:
    async with httpx.AsyncClient(timeout=60) as client:
        posts = (client.post(f"{url}/{path}", **request) for request in case.requests)
        return [(answer.status_code, answer.content) for answer in await asyncio.gather(*posts)]


@pytest.fixture(scope="module")
def tsx_server(file: Path) -> Iterator[Running]:
    with serving(["serve", file, *FREE_PORTS], file.parent, {}) as running:
        yield running


@pytest.fixture(scope="module")
def litserve_server(
    file: Path, free_ports: Callable[[int], list[int]], until: Callable[[Any], None]
) -> Iterator[str]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/health").is_success
        except httpx.ConnectError:
            return False

    with (file.parent / "litserve.log").open("w") as log:
        command = [sys.executable, str(file), str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        until(is_ready)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_both_servers_give_the_same_responses(
    tsx_server: Running, litserve_server: str, case: Case
) -> None:
    tsx_url = tsx_server.address("predictions")
    answers = asyncio.run(responses(tsx_url, case, f"predictions/{case.model}"))
    assert answers == case.responses
    if case.responses[0][0] != 409:  # LitServe gives the status to all requests of the batch.
        assert answers == asyncio.run(responses(litserve_server, case, case.path or case.model))
