"""One archive gives the same answers on both lanes of `tsx serve`, over gRPC and on all targets.

Each row of the table is a request and its answer. Target-specific features are tested elsewhere.
"""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from tests.runtime.conftest import TALKER
from tests.runtime.targets.image.test_serve import container as own_container
from tests.support.models import make_model
from tests.support.platforms.lambda_api import answer_of, function, function_url
from tests.support.platforms.sagemaker_host import container as endpoint
from tests.support.platforms.sagemaker_host import unpack
from tests.support.servers import DEADLINE, FREE_GRPC_PORTS, FREE_PORTS, serving
from tsx_runtime.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

PATH = "/predictions/talker"
LIMIT = 100_000  # bytes of a body
JSON, FORM = {"content-type": "application/json"}, "application/x-www-form-urlencoded"
EDGE = (
    b'--edge\r\nContent-Disposition: form-data; name="data"; filename="a.png"\r\n'
    b"Content-Type: image/png\r\n\r\n\x89PNG\r\n--edge\r\n"
    b'Content-Disposition: form-data; name="more"\r\n\r\nx\r\n--edge--\r\n'
)
PREDICT = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
FAILED, INVALID = grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT


class Case(NamedTuple):
    """A request and its answer.

    `row` and `seen_headers` are the row and some headers that the handler receives. `error` is the
    type and the beginning of the message. `code` is the gRPC code; rows without it skip gRPC.
    """

    headers: Mapping[str, str] = {}
    body: bytes = b""
    path: str = PATH
    method: str = "POST"
    status: int = 200
    answer: bytes | None = None
    answer_headers: Mapping[str, str | None] = {}
    row: dict[str, Any] | None = None
    seen_headers: Mapping[str, str | None] = {}
    error: tuple[str, str] | None = None
    code: grpc.StatusCode | None = None


def do(action: str, **more: str) -> dict[str, str]:
    return {"x-do": action, **{name.replace("_", "-"): value for name, value in more.items()}}


def missing_case(path: str, method: str = "GET", status: int = 404) -> Case:
    return Case(path=path, method=method, status=status, error=("ResourceNotFoundException", ""))


NOBODY = ("ModelNotFoundException", "Model not found: nobody")
OK = grpc.StatusCode.OK
NOT_CACHED = {
    "pragma": "no-cache",
    "cache-control": "no-cache; no-store, must-revalidate, private",
    "expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
QUERY = "?data=test&more=%C3%A4%20b&model_name=talker"
CASES = {
    "bytes": Case(
        {"content-type": "application/octet-stream"},
        b"\x00\xff",
        row={"body": {"bytes": "\x00\xff"}},
        code=OK,
    ),
    "JSON": Case(JSON, b'{"a": [1]}', row={"body": {"a": [1]}}, answer_headers=NOT_CACHED),
    "text": Case(
        {"content-type": "text/plain; charset=utf-8"}, "müsli".encode(), row={"body": "müsli"}
    ),
    "compressed": Case(
        {**JSON, "content-encoding": "gzip"},
        gzip.compress(b'{"a": [1]}'),
        row={"body": {"a": [1]}},
        seen_headers={"content-encoding": None},
    ),
    "bad JSON": Case(JSON, b"{", row={"body": {"bytes": "{"}}),
    "a form in parts": Case(
        {"content-type": "multipart/form-data; boundary=edge"},
        EDGE,
        row={"data": {"bytes": "\x89PNG"}, "more": {"bytes": "x"}},
        seen_headers={"data": {"content-type": "image/png"}},  # type: ignore[dict-item]  # a file's
    ),
    "a form": Case({"content-type": FORM}, b"data=1", row={"data": {"bytes": "1"}}),
    "query parameters": Case(path=f"{PATH}?data=test", row={"body": {"bytes": ""}}),
    **{
        f"query parameters at {path}": Case(
            path=path + QUERY,
            method="GET",
            row={
                "body": {"bytes": ""},
                "data": {"bytes": "test"},
                "model_name": {"bytes": "talker"},
                "more": {"bytes": "ä b".encode().decode("latin-1")},
            },
        )
        for path in ("/talker/predict", "/models/talker/invoke", "/invocations")
    },
    **{
        method: Case(do("bytes"), b"x", method=method, answer=b"x")
        for method in ("GET", "PUT", "PATCH", "DELETE", "REPORT")
    },
    "HEAD": Case(do("bytes"), method="HEAD", answer=b""),
    "HEAD of a stream": Case(do("stream"), method="HEAD", answer=b""),
    "no version": Case(path=f"{PATH}/", row={}),
    "a version and no path": Case(path=f"{PATH}/1.0/", seen_headers={"url_path": ""}, row={}),
    "a version": Case(
        path=f"{PATH}/1.0", seen_headers={"url_path": "", "explain": "False"}, row={}
    ),
    "a path behind the version": Case(
        {"url_path": "the client's"},
        path=f"{PATH}/1.0/a/b",
        seen_headers={"url_path": "a/b"},
        row={},
    ),
    "a line end in the path": Case(
        path=f"{PATH}/1.0/a%0D%0Aexplain:%20True",
        seen_headers={"url_path": "a%0D%0Aexplain: True", "explain": "False"},
        row={},
    ),
    "explanations": Case(
        {"explain": "no"}, path="/explanations/talker", seen_headers={"explain": "True"}, row={}
    ),
    "explanations of a version": Case(
        path="/explanations/talker/1.0", seen_headers={"explain": "True"}, row={}
    ),
    "headers of the client": Case(
        {"x-mine": "1", "cookie": "session=1"},
        seen_headers={"x-mine": "1", "cookie": None},
        row={},
        code=OK,
    ),
    "headers that differ only in underscores": Case(
        {"x_user": "a", "x-user": "b"},
        status=400,
        error=(
            "BadRequestException",
            "The request has headers whose names differ",
        ),
        code=INVALID,
    ),
    "an answer in bytes": Case(
        do("bytes"),
        b"abc",
        answer=b"abc",
        answer_headers={"content-length": "3", **NOT_CACHED},
        code=OK,
    ),
    "an id of the client": Case({"x-request-id": "the-clients"}, row={}),
    "headers of the handler": Case(
        do("headers"),
        answer=b"a,b",
        answer_headers={"content-type": "text/csv", "x-own": "1", "cache-control": "max-age=60"},
        code=OK,
    ),
    **{
        f"status {status} of the handler": Case(
            do("status", x_status=str(status)),
            status=status,
            answer=b"" if status == 204 else b"body of it",
        )
        for status in (201, 204, 404, 507)
    },
    "a stream": Case(do("stream"), answer=b"abc", code=OK),
    "a handler that raises": Case(
        do("raise"),
        status=500,
        error=("InternalServerException", "Prediction failed: RuntimeError: no such image"),
        code=FAILED,
    ),
    "an unknown model": Case(path="/predictions/nobody", status=404, error=NOBODY, code=FAILED),
    "an unknown version": Case(
        path=f"{PATH}/9.9",
        status=404,
        error=(
            "ModelVersionNotFoundException",
            "Model version: 9.9 does not exist for model: talker",
        ),
        code=FAILED,
    ),
    "a bad priority": Case(
        {"x-tsx-priority": "high"},
        status=400,
        error=("BadRequestException", "The header x-tsx-priority is 'high'"),
        code=INVALID,
    ),
    "a body over the limit": Case(
        body=bytes(LIMIT + 1), status=413, error=("PayloadTooLargeException", "")
    ),
    "a body at the limit": Case(do("bytes"), bytes(LIMIT), answer=bytes(LIMIT)),
    **{
        path: missing_case(path)
        for path in (
            "/predictions",
            "/predictions/",
            "/explanations/",
            "//predictions/talker",
            "/x",
        )
    },
    "ping": Case(path="/ping", method="GET"),
    "invocations": Case(JSON, b"{}", path="/invocations", row={"body": {}}),
    "KServe, version 1": Case(
        JSON,
        b'{"instances": [1]}',
        path="/v1/models/talker:predict",
        row={"body": {"instances": [1]}},
    ),
    "KServe, version 2, of an unknown model": Case(
        JSON, b"{}", path="/v2/models/nobody/infer", status=404, error=NOBODY
    ),
}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


Ask = Callable[[Case], Answer]


def by_http(address: str, *, chunked: bool = False) -> Ask:
    """Return a function that sends a case over HTTP; chunked bodies use the ASGI lane."""

    def ask(case: Case) -> Answer:
        answer = httpx.request(
            case.method,
            address + case.path,
            content=iter([case.body]) if chunked else case.body,
            headers=case.headers,
            timeout=DEADLINE,
        )
        return Answer(answer.status_code, answer.headers, answer.content)

    return ask


def by_lambda(host: Any) -> Ask:
    def ask(case: Case) -> Answer:
        path, _, query = case.path.partition("?")
        event = function_url(path, case.body, case.method, case.headers, query=query)
        payload = host.invoke(event).json()
        return Answer(payload["statusCode"], payload["headers"], answer_of(payload))

    return ask


@pytest.fixture(scope="module")
def targets(
    processes: None,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[dict[str, Any]]:
    """Run a process of each target; gRPC is a channel, the others are functions of a case."""
    directory = tmp_path_factory.mktemp("c")
    common = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_MAX_REQUEST_SIZE": str(LIMIT),
        "TSX_WORKER_PRELOAD": "false",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("model", "sagemaker", "own", "awslambdaric", "tsx"):
        (directory / name).mkdir()
    archive = make_model(directory / "model" / "talker.mar", TALKER)
    unpack(archive, directory / "sagemaker")
    model = {"TSX_MODEL_DIR": str(archive.parent)}
    with ExitStack() as stack:
        enter, ports = stack.enter_context, free_ports(3)
        serve = enter(serving(["serve", archive, *FREE_PORTS, *FREE_GRPC_PORTS], directory, common))
        enter(own_container(directory / "own", ports[:2], **model, **common))
        host = enter(endpoint(directory / "sagemaker", ports[2], common))
        host.wait_until_healthy()
        address = serve.address("predictions")
        yield {
            "fast lane": by_http(address),
            "ASGI lane": by_http(address, chunked=True),
            "container": by_http(f"http://127.0.0.1:{ports[0]}"),
            "SageMaker": by_http(f"http://127.0.0.1:{ports[2]}"),
            **{
                f"Lambda by {client}": by_lambda(enter(function(directory / client, variables)))
                for client in ("awslambdaric", "tsx")
                for variables in [{**common, **model, "TSX_LAMBDA_RUNTIME": client}]
            },
            "gRPC": enter(grpc.insecure_channel(serve.address("gRPC predictions"))),
        }


HTTP = [
    "fast lane",
    "ASGI lane",
    "container",
    "SageMaker",
    "Lambda by awslambdaric",
    "Lambda by tsx",
]


@pytest.mark.parametrize("target", HTTP)
@pytest.mark.parametrize("name", CASES)
def test_an_http_request_gets_the_answer_of_the_table(
    targets: dict[str, Any], target: str, name: str
) -> None:
    check(CASES[name], targets[target](CASES[name]))


def check(case: Case, answer: Answer) -> None:
    """Compare an HTTP answer with the table."""
    status, headers, body = answer
    assert status == case.status, body
    assert {name: headers.get(name) for name in case.answer_headers} == case.answer_headers
    assert uuid.UUID(headers["x-request-id"]).version == 4
    if case.error is not None:
        error = json.loads(body)
        assert (error["code"], error["type"]) == (status, case.error[0])
        assert error["message"].startswith(case.error[1])
    check_body(case, body, headers["x-request-id"])


def check_body(case: Case, body: bytes, request_id: str) -> None:
    if case.answer is not None:
        assert body == case.answer
    if case.row is not None:
        received = json.loads(body)
        assert received["row"] == (case.row or received["row"])
        assert {
            name: received["headers"].get(name) for name in case.seen_headers
        } == case.seen_headers
        assert (received["id"], received["version"]) == (request_id, "1.0")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.code is not None])
def test_a_grpc_call_gets_the_answer_of_the_table(targets: dict[str, Any], name: str) -> None:
    case = CASES[name]
    _, _, model, version, *_ = [*case.path.split("/"), ""]
    predict = targets["gRPC"].unary_unary(
        PREDICT,
        PredictionsRequest.SerializeToString,
        PredictionResponse.FromString,
    )
    request = PredictionsRequest(model_name=model, model_version=version, input={"body": case.body})
    metadata = [item for item in case.headers.items() if item[0] != "content-type"]
    response: Any = None
    try:
        response, call = predict.with_call(request, timeout=DEADLINE, metadata=metadata)
    except grpc.RpcError as error:
        call = error
    assert call.code() is case.code, call.details()
    if case.error is not None:
        assert case.error[1] in call.details()
        return
    initial_metadata = dict(call.initial_metadata())
    expected = {name: value for name, value in case.answer_headers.items() if name.startswith("x-")}
    assert {name: initial_metadata.get(name) for name in expected} == expected
    check_body(case, response.prediction, dict(call.trailing_metadata())["x-request-id"])
