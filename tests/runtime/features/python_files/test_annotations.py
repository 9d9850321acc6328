"""Each annotation of a Python file through a real server, with right and wrong requests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.support.servers import FREE_PORTS, Running, serving

FILES = [Path(__file__).with_name(name) for name in ("typed.py", "frames.py")]
DEADLINE_S = 60


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def picture(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def parquet(frame: pd.DataFrame) -> bytes:
    file = io.BytesIO()
    frame.to_parquet(file)
    return file.getvalue()


PNG = picture((4, 2))
BASE64 = base64.b64encode(PNG).decode()
JSON_TYPE = {"content-type": "application/json"}


class Case(NamedTuple):
    """A request to a model, and the answer: JSON, or the bytes of another content type."""

    model: str
    request: dict[str, Any]
    answer: Any


CASES = [
    Case("model", {"json": {"text": "a"}}, {"label": "a", "score": 1.0}),
    Case("model", {"data": {"text": "form"}}, {"label": "form", "score": 1.0}),
    Case("model", {"content": b'{"text": "untyped"}'}, {"label": "untyped", "score": 1.0}),
    Case("dataclass", {"json": {"x": 1, "y": "2"}}, {"x": 2.0, "y": 1.0}),
    Case("typed_row", {"json": {"age": 1, "name": "b"}}, {"age": 2, "name": "b"}),
    Case("str", {"json": "text"}, b"TEXT"),
    Case("str", {"content": "tëxt", "headers": {"content-type": "text/plain"}}, "TËXT".encode()),
    Case("str", {"data": {"item": "form"}}, b"FORM"),
    Case("int", {"json": 4}, 5),
    Case("int", {"data": {"item": "4"}}, 5),
    Case("float", {"json": 1}, 0.5),
    Case("bool", {"json": True}, False),
    Case("bytes", {"content": b"\0\1\2"}, b"\2\1\0"),
    Case("bytes", {"files": {"item": b"abc"}}, b"cba"),
    Case("list_of", {"json": [1, 2.5]}, [2.5, 1.0]),
    Case("dict_of", {"json": {"a": 1}}, {"a": 2}),
    Case("array", {"json": [[1, 2], [3, 4]]}, [[1, 3], [2, 4]]),
    Case("array", {"content": npy(np.arange(4).reshape(2, 2))}, [[0, 2], [1, 3]]),
    Case("array", {"files": {"item": npy(np.ones((1, 2)))}}, [[1.0], [1.0]]),
    Case("floats", {"json": [[1, 2]]}, b"float32 (1, 2)"),
    Case("arrays", {"json": [1, 2, 3]}, 6),
    Case("tensor", {"json": [1.5, 2]}, {"double": [3.0, 4.0]}),
    Case("tensor", {"content": npy(np.arange(2))}, {"double": [0, 2]}),
    Case("frame", {"json": [{"a": 1, "b": 2}]}, [{"a": 1, "b": 2, "total": 3}]),
    Case(
        "frame",
        {"content": b"a,b\n1,2\n3,4\n", "headers": {"content-type": "text/csv"}},
        [{"a": 1, "b": 2, "total": 3}, {"a": 3, "b": 4, "total": 7}],
    ),
    Case(
        "frame",
        {"content": parquet(pd.DataFrame({"a": [1.5], "b": [2]}))},
        [{"a": 1.5, "b": 2, "total": 3.5}],
    ),
    Case("several", {"files": {"image": PNG}}, [[4, 2], 3, None]),
    Case("several", {"files": {"image": PNG}, "data": {"top": "5"}}, [[4, 2], 5, None]),
    Case(
        "several",
        {"files": {"image": PNG}, "data": {"tags": ["a", "b"]}},
        [[4, 2], 3, ["a", "b"]],
    ),
    Case("several", {"json": {"image": BASE64, "tags": ["a"]}}, [[4, 2], 3, ["a"]]),
    Case("untyped", {"json": {"a": [1]}}, ["dict", {"a": [1]}]),
    Case("untyped", {"content": b"\x89binary"}, ["bytes", 7]),
    Case("choice", {"json": "a"}, b"a!"),
    Case("choice", {"content": b"null", "headers": JSON_TYPE}, b"None!"),
    Case("coroutine", {"json": {"text": "c"}}, {"label": "c", "score": 0.5}),
    Case("coroutine_batch", {"json": {"text": "c"}}, b"loaded c"),
    Case("typed", {"json": {"text": "f"}}, b"function f"),
    Case(
        "stream",
        {"json": {"text": "a b"}},
        b'data: {"label":"a","score":0.0}\n\ndata: {"label":"b","score":0.0}\n\n',
    ),
    Case("async_stream", {"json": {"text": "a b"}}, b"data:  a\ndata: \n\ndata:  b\ndata: \n\n"),
    Case("batch_stream", {"json": {"text": "abc"}}, b"data: 3\n\ndata: 4\n\n"),
]

# A request that the model refuses, and the location and the type of the error.
WRONG = [
    Case("model", {"json": {"txt": "a"}}, (["body", "text"], "missing")),
    Case("model", {"json": {"text": 1}}, (["body", "text"], "string_type")),
    Case("model", {"content": b'{"text"'}, (["body"], "json_invalid")),
    Case("model", {"json": []}, (["body"], "model_type")),
    Case("dataclass", {"json": {"x": "a"}}, (["body", "x"], "float_parsing")),
    Case("typed_row", {"json": {"age": 1}}, (["body", "name"], "missing")),
    Case("typed_row", {"json": {"age": -1, "name": "b"}}, (["body", "age"], "greater_than_equal")),
    Case("str", {"json": 1}, (["body"], "string_type")),
    Case("str", {"data": {"other": "a", "second": "b"}}, (["body", "item"], "missing")),
    Case("int", {"json": 1.5}, (["body"], "int_from_float")),
    Case("float", {"json": -1}, (["body"], "greater_than_equal")),
    Case("bool", {"json": "maybe"}, (["body"], "bool_parsing")),
    Case("list_of", {"json": [1, "a"]}, (["body", 1], "float_parsing")),
    Case("dict_of", {"json": {"a": []}}, (["body", "a"], "int_type")),
    Case("array", {"json": [[1], [2, 3]]}, (["body"], "value_error")),
    Case("array", {"json": ["a"]}, (["body"], "value_error")),
    Case("array", {"content": b"\x93NUMPY broken"}, (["body"], "value_error")),
    Case("tensor", {"json": [None]}, (["body"], "value_error")),
    Case("tensor", {"json": {"a": 1}}, (["body"], "value_error")),
    Case("picture", {"content": b"no image"}, (["body"], "value_error")),
    Case("picture", {"json": "?"}, (["body"], "value_error")),
    Case("frame", {"json": 1}, (["body"], "value_error")),
    Case("frame", {"content": b"PAR1 broken"}, (["body"], "value_error")),
    Case("several", {"json": {"top": 3}}, (["body", "image"], "missing")),
    Case("several", {"json": {"image": BASE64, "tpo": 3}}, (["body", "tpo"], "extra_forbidden")),
    Case(
        "several", {"files": {"image": PNG}, "data": {"top": "x"}}, (["body", "top"], "int_parsing")
    ),
    Case(
        "untyped",
        {"content": b"{", "headers": {"content-type": "application/json"}},
        (["body"], "json_invalid"),
    ),
    Case("choice", {"json": "c"}, (["body"], "literal_error")),
    Case("coroutine", {"json": {}}, (["body", "text"], "missing")),
    Case("stream", {"json": {}}, (["body", "text"], "missing")),
    Case("typed", {"json": {}}, (["body", "text"], "missing")),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        ["serve", *FILES, "--batch-size", "8", *FREE_PORTS], tmp_path_factory.mktemp("typed"), {}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address("predictions"), timeout=DEADLINE_S) as client:
        yield client


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_a_request_has_the_type_of_its_annotation(client: httpx.Client, case: Case) -> None:
    response = client.post(f"/predictions/{case.model}", **case.request)
    assert response.status_code == 200, response.text
    if isinstance(case.answer, bytes):
        assert response.content == case.answer
    else:
        assert response.json() == case.answer
        assert response.headers["content-type"] == "application/json"


def test_an_image_is_answered_as_png(client: httpx.Client) -> None:
    for request in ({"content": PNG}, {"json": BASE64}, {"files": {"image": PNG}}):
        response = client.post("/predictions/picture", **request)  # type: ignore[arg-type]  # a union
        assert response.headers["content-type"] == "image/png"
        assert Image.open(io.BytesIO(response.content)).size == (2, 4)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.model)
def test_a_wrong_request_gets_422_with_the_field(client: httpx.Client, case: Case) -> None:
    response = client.post(f"/predictions/{case.model}", **case.request)
    assert response.status_code == 422, response.text
    location, kind = case.answer
    faults = [(fault["loc"], fault["type"]) for fault in response.json()["detail"]]
    assert (location, kind) in faults
    assert all(fault.keys() >= {"loc", "msg", "type"} for fault in response.json()["detail"])


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.model)
def test_a_wrong_request_among_eight_is_refused_alone(client: httpx.Client, case: Case) -> None:
    right = next((other for other in CASES if other.model == case.model), None)
    right = right or Case(case.model, {"content": PNG}, None)  # The answer is a picture.

    async def send_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=DEADLINE_S) as session:
            path = f"/predictions/{case.model}"
            requests = [session.post(path, **right.request) for _ in range(7)]
            requests.insert(3, session.post(path, **case.request))
            return await asyncio.gather(*requests)

    responses = asyncio.run(send_all())
    assert [response.status_code for response in responses] == [200] * 3 + [422] + [200] * 4
    del responses[3]
    assert len({response.content for response in responses}) == 1


def test_query_parameters_are_fields_where_a_path_has_them(client: httpx.Client) -> None:
    response = client.post("/several/predict", params={"top": 1}, json={"image": BASE64})
    assert response.json() == [[4, 2], 1, None]
    assert client.post("/model/predict", params={"text": "a"}).json()["label"] == "a"


def test_one_wrong_request_of_a_batch_is_refused_alone(client: httpx.Client) -> None:
    """All are sent at once, so that they form batches; `score` is the size of the batch."""
    bodies = [{"text": "good"}] * 7 + [{"text": None}]

    async def send_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=DEADLINE_S) as session:
            requests = [session.post("/predictions/sentiment", json=body) for body in bodies]
            return await asyncio.gather(*requests)

    sizes = set()
    for _ in range(20):
        *right, wrong = asyncio.run(send_all())
        assert [response.json()["label"] for response in right] == ["good"] * 7
        assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["body", "text"])
        sizes |= {response.json()["score"] for response in right}
        if max(sizes) > 1:
            return
    raise AssertionError("the requests never formed a batch")


def test_a_status_and_a_wrong_result_of_the_function(client: httpx.Client) -> None:
    teapot = client.post("/predictions/model", json={"text": "teapot"})
    assert (teapot.status_code, teapot.json()["message"]) == (418, "short and stout")
    wrong = client.post("/predictions/model", json={"text": "wrong"})
    assert wrong.status_code == 500
    assert "Model.predict returned dict" in wrong.json()["message"]
    assert client.post("/predictions/untyped", content=b"object").status_code == 500


def test_an_error_ends_a_stream_with_an_event(client: httpx.Client) -> None:
    response = client.post("/predictions/stream", json={"text": "a fail"})
    assert response.headers["content-type"] == "text/event-stream"
    first, second = (part for part in response.text.split("\n\n") if part.strip())
    assert first == 'data: {"label":"a","score":0.0}'
    assert "a bad word" in json.loads(second.strip().removeprefix("data: "))["error"]["message"]


def test_a_wrong_request_is_an_error_of_the_client(server: Running, client: httpx.Client) -> None:
    client.post("/predictions/int", json="x")
    metrics = httpx.get(f"{server.address('metrics')}/metrics").text
    values = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if 'model_name="int"' in line
        and (line.startswith("tsx_errors_total") or 'status="422"' in line)
    }
    assert values["tsx_answers_total"] > 0
    assert values["tsx_errors_total"] == 0


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_tensors_of_the_open_inference_protocol(client: httpx.Client, *, binary: bool) -> None:
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["good"]}
    parameters = {"parameters": {"binary_data_output": True}} if binary else {}
    response = client.post(
        "/v2/models/model/infer", json={"id": "7", "inputs": [text], **parameters}
    )
    assert response.status_code == 200, response.text
    head = response.headers.get("inference-header-content-length")
    document = json.loads(response.content[: int(head)] if head else response.content)
    assert document["id"] == "7"
    outputs = {output["name"]: output for output in document["outputs"]}
    assert outputs.keys() == {"label", "score"}
    assert outputs["score"]["datatype"] == "FP64"
    if not binary:
        assert outputs["label"]["data"] == ["good"]
    matrix = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    answer = client.post("/v2/models/array/infer", json={"inputs": [matrix]}).json()
    assert (answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == ([2, 1], [1.0, 2.0])
    wrong = client.post("/v2/models/model/infer", json={"inputs": [{**text, "name": "txt"}]})
    assert (wrong.status_code, wrong.json()["detail"][0]["type"]) == (422, "missing")


def test_the_signature_has_the_types_and_an_example(server: Running) -> None:
    described = httpx.get(f"{server.address('models')}/models/sentiment").json()[0]
    signature = described["signature"]
    assert signature["input"]["properties"]["text"]["type"] == "string"
    assert signature["output"]["required"] == ["label", "score"]
    assert signature["description"] == "Tell whether a text is positive."
    assert signature["example"] == {"text": "a good day"}
    assert described["batchSize"] == 8
    stream = httpx.get(f"{server.address('models')}/models/stream").json()[0]["signature"]
    assert (stream["streams"], stream["outputType"]) == (True, "text/event-stream")


@pytest.mark.parametrize("model", ["sentiment", "several", "array", "str", "picture", "frame"])
def test_the_sample_of_each_model_is_a_right_request(client: httpx.Client, model: str) -> None:
    sample = client.get(f"/v2/models/{model}/sample")
    headers = {"content-type": sample.headers["content-type"]}
    answer = client.post(f"/predictions/{model}", content=sample.content, headers=headers)
    assert answer.status_code == 200, answer.text
