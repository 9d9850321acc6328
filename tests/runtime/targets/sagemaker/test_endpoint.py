"""A container as SageMaker runs it, called by boto3's client through a fake host."""

from __future__ import annotations

import json
import os
import re
import signal
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EventStreamError

from tests.support.models import make_model
from tests.support.platforms.aws import Account
from tests.support.platforms.sagemaker_host import STOP, Host, container, unpack
from tests.support.platforms.sagemaker_runtime import Loader, runtime
from tests.support.servers import FreePorts

Endpoint = tuple[Host, Any]
Many = tuple[Host, Loader, Any]

# An answer contains the size of its batch; the body selects further actions.
HANDLER = """
import json, os, time
from pathlib import Path

ATTRIBUTES, SESSION = "X-Amzn-SageMaker-Custom-Attributes", "X-Amzn-SageMaker-Session-Id"

def handle(data, context):
    if data is None:
        Path(os.environ["HELD"] + ".loading").touch()
        wait(os.environ["HELD"])
        return None
    return [answer(idx, row["body"], len(data), context) for idx, row in enumerate(data)]

def wait(file):
    end = time.monotonic() + 60
    while not Path(file).exists() and time.monotonic() < end:
        time.sleep(0.005)

def answer(idx, body, together, context):
    if body == "bad" or body == "bad,1":
        context.set_response_status(422, "no", idx)
        return {"code": 422, "type": "X", "message": "this is bad"}
    if isinstance(body, dict) and "wait" in body:
        Path(body["wait"] + ".begun").touch()
        wait(body["wait"])
    if isinstance(body, dict) and "stream" in body:
        from ts.handler_utils.utils import send_intermediate_predict_response
        for number in range(3):
            send_intermediate_predict_response([f"part {number};"], {idx: context.get_request_id(idx)}, "", 200, context)
        if body["stream"] == "broken":
            raise ValueError("broken")
        return "end"
    if context.get_request_header(idx, ATTRIBUTES):
        context.set_response_header(idx, ATTRIBUTES, "seen " + context.get_request_header(idx, ATTRIBUTES))
    if context.get_request_header(idx, SESSION) == "NEW_SESSION":
        context.set_response_header(idx, "X-Amzn-SageMaker-New-Session-Id", "s1; Expires=2030-01-01T00:00:00Z")
    if body == "hello":
        return body
    if body == "cookie":
        return [context.get_request_header(idx, name) for name in ("Cookie", "Proxy_Authorization", "X-Own")]
    if body == "image":
        context.set_response_content_type(idx, "image/png")
        return b"png"
    if isinstance(body, str):
        return [body.upper(), together]
    return {"got": body if not isinstance(body, (bytes, bytearray)) else len(body), "together": together}
"""
# Bytes of a large model and MB for all models: one large and some small ones fit.
LARGE_BYTES, MEMORY_MB = 260 << 20, 450


@pytest.fixture(scope="module")
def endpoint(
    processes: None, tmp_path_factory: pytest.TempPathFactory, free_ports: FreePorts
) -> Iterator[Endpoint]:
    directory = tmp_path_factory.mktemp("e")
    unpack(make_model(directory / "echo.mar", HANDLER, config="batchSize: 4\n"), directory)
    gate = directory / "held"
    with container(directory, *free_ports(1), {"HELD": str(gate)}) as host:
        host.wait_until(lambda: gate.with_suffix(".loading").exists())
        ping = host.get("/ping")
        assert (ping.status, json.loads(ping.body)) == (503, {"status": "echo is loading"})
        gate.touch()
        host.wait_until_healthy()
        with runtime(host, output="s3://answers/out") as client:
            yield host, client


@pytest.fixture(scope="module")
def host(endpoint: Endpoint) -> Host:
    return endpoint[0]


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Any:
    return endpoint[1]


def invoke(
    client: Any, body: bytes, content_type: str = "application/json", **request_fields: str
) -> Any:
    return client.invoke_endpoint(
        EndpointName="e", Body=body, ContentType=content_type, **request_fields
    )


def stream(client: Any, body: bytes) -> Any:
    return client.invoke_endpoint_with_response_stream(
        EndpointName="e", Body=body, ContentType="application/json"
    )


def failure_of(call: Callable[[], Any]) -> tuple[int, str]:
    """Make a call that the model fails; return its status and message."""
    with pytest.raises(ClientError) as exc_info:
        call()
    response: Any = exc_info.value.response
    assert response["Error"]["Code"] == "ModelError"
    return response["OriginalStatusCode"], json.loads(response["OriginalMessage"])["message"]


def test_boto3_gets_the_answer_with_attributes_and_session(client: Any) -> None:
    answered = invoke(client, b'"a"', CustomAttributes="trace=1", SessionId="NEW_SESSION")
    assert json.loads(answered["Body"].read()) == ["A", 1]
    assert answered["CustomAttributes"] == "seen trace=1"
    assert answered["NewSessionId"] == "s1; Expires=2030-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'"a"', "application/json"),
        (b'"hello"', "text/plain; charset=utf-8"),
        (b'"image"', "image/png"),
    ],
)
def test_an_answer_has_the_handlers_or_a_guessed_content_type(
    client: Any, body: bytes, content_type: str
) -> None:
    assert invoke(client, body)["ContentType"] == content_type
    assert stream(client, body)["ContentType"] == content_type


def test_a_refusal_is_a_model_error_with_status_and_message(client: Any) -> None:
    assert failure_of(lambda: invoke(client, b'"bad"')) == (422, "this is bad")


def test_a_streamed_answer_arrives_in_parts(client: Any) -> None:
    answered = stream(client, b'{"stream": 1}')
    parts = [event["PayloadPart"]["Bytes"] for event in answered["Body"]]
    assert b"".join(parts) == b"part 0;part 1;part 2;end"
    assert answered["ContentType"] == "text/plain; charset=utf-8"


def test_a_broken_stream_is_reported(client: Any) -> None:
    with pytest.raises(EventStreamError, match="ModelStreamError"):
        list(stream(client, b'{"stream": "broken"}')["Body"])


def test_json_lines_are_batched_and_answered_in_order(client: Any) -> None:
    body = b"\n".join(b'{"n": %d}' % number for number in range(40)) + b"\n\n"
    answered = invoke(client, body, "application/jsonlines", CustomAttributes="job")
    lines = [json.loads(line) for line in answered["Body"].read().decode().splitlines()]
    assert [line["got"] for line in lines] == [{"n": number} for number in range(40)]
    assert max(line["together"] for line in lines) == 4
    assert answered["ContentType"] == "application/jsonlines"
    assert answered["CustomAttributes"] == "seen job"


def test_csv_is_answered_as_csv_or_the_accepted_type(client: Any) -> None:
    answered = invoke(client, b"a,1\r\nb,2\r\n", "text/csv; charset=utf-8")
    lines = [line.rpartition(b",")[0] for line in answered["Body"].read().splitlines()]
    assert lines == [b'"A,1"', b'"B,2"']
    assert answered["ContentType"] == "text/csv"
    answered = invoke(client, b"a,1\nb,2\n", "text/csv", Accept="application/jsonlines")
    assert [json.loads(line)[0] for line in answered["Body"].read().splitlines()] == ["A,1", "B,2"]


def test_hidden_headers_do_not_reach_the_model_of_a_line(host: Host) -> None:
    headers = {
        "Content-Type": "application/jsonlines",
        "Cookie": "a=1",
        "Proxy_Authorization": "b",
        "X-Own": "1",
    }
    answer = host.post("/invocations", b'"cookie"\n', headers)
    assert json.loads(answer.body) == [None, None, "1"]


def test_a_bad_line_fails_the_request_with_its_number(client: Any) -> None:
    status, message = failure_of(lambda: invoke(client, b"a,1\n\nbad,1\nb,2\n", "text/csv"))
    assert status == 422
    assert message.startswith("Line 3: this is bad No line was processed")
    status, message = failure_of(lambda: invoke(client, b"\n \n", "application/jsonlines"))
    assert "The body is empty" in message


def test_a_container_is_healthy_while_its_worker_is_busy(host: Host, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    body, kind = json.dumps({"wait": str(gate)}).encode(), {"Content-Type": "application/json"}
    with host.begun("/invocations", body, kind) as answer:
        host.wait_until(lambda: gate.with_suffix(".begun").exists())
        ping = host.get("/ping")
        assert (ping.status, ping.body) == (200, b"")
        gate.touch()
        assert answer().status == 200


def test_a_transform_job_reads_its_execution_parameters(host: Host) -> None:
    assert json.loads(host.get("/execution-parameters").body) == {
        "MaxConcurrentTransforms": 2,
        "BatchStrategy": "MULTI_RECORD",
        "MaxPayloadInMB": 6,
    }


def test_the_request_port_serves_metrics_but_not_management(host: Host) -> None:
    assert b"ts_inference_requests_total" in host.get("/metrics").body
    assert host.get("/models").status == 404


def test_an_asynchronous_request_goes_from_s3_to_s3(account: Account, host: Host) -> None:
    account.emptied()
    s3 = boto3.client("s3")
    region = {"LocationConstraint": "eu-central-1"}
    for bucket in ("inputs", "answers"):
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=region)
    s3.put_object(Bucket="inputs", Key="a", Body=b"x" * (7 << 20))
    with runtime(host, output="s3://answers/out") as client:
        response = client.invoke_endpoint_async(
            EndpointName="e",
            InputLocation="s3://inputs/a",
            ContentType="application/octet-stream",
            InferenceId="one",
        )
        assert response["OutputLocation"] == "s3://answers/out/one.out"
    answer = s3.get_object(Bucket="answers", Key="out/one.out")
    assert json.loads(answer["Body"].read()) == {"got": 7 << 20, "together": 1}
    assert answer["ContentType"] == "application/json"


@pytest.fixture(scope="module")
def many_models(
    processes: None, tmp_path_factory: pytest.TempPathFactory, free_ports: FreePorts
) -> Iterator[Many]:
    directory = tmp_path_factory.mktemp("m")
    for name in ("a", "b", "c", "broken", "large1", "large2"):
        handler = f"def handle(data, context):\n    return data and ['{name}'] * len(data)\n"
        if name.startswith("large"):
            handler += f"\nheld = b'x' * {LARGE_BYTES}\n"
        model = make_model(directory / f"{name}.mar", "1 / 0" if name == "broken" else handler)
        with tarfile.open(directory / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(model, model.name)
    variables = {"SAGEMAKER_MULTI_MODEL": "true", "TSX_SAGEMAKER_MODELS_MEMORY": str(MEMORY_MB)}
    with container(directory, *free_ports(1), variables) as host:
        host.wait_until_healthy()
        loader = Loader(host, directory, directory / "models")
        with runtime(host, loader) as client:
            yield host, loader, client


def ask(client: Any, model: str) -> bytes:
    answered = invoke(client, b"{}", TargetModel=f"{model}.tar.gz")
    body: bytes = answered["Body"].read()
    return body


def test_many_models_are_loaded_on_request(many_models: Many) -> None:
    host, loader, client = many_models
    assert [ask(client, name) for name in "aba"] == [b"a", b"b", b"a"]
    models = json.loads(host.get("/models").body)["models"]
    assert {model["modelName"] for model in models} == {*loader.loaded}
    name, url = models[0]["modelName"], models[0]["modelUrl"]
    assert json.loads(host.get(f"/models/{name}").body)["modelName"] == name
    assert host.load(name, url).status == 409
    workers = host.processes()
    loader.unload(name)
    # The memory of a model is free when the call returns.
    assert len(host.processes()) == len(workers) - 1
    assert host.delete(f"/models/{name}").status == host.get(f"/models/{name}").status == 404
    assert host.post(f"/models/{name}/invoke", b"{}", {}).status == 404


def test_a_failed_load_is_refused_without_affecting_other_models(many_models: Many) -> None:
    _, _, client = many_models
    status, message = failure_of(lambda: ask(client, "broken"))
    assert status == 500
    assert "division by zero" in message
    assert ask(client, "c") == b"c"


def test_any_text_is_a_valid_model_name(many_models: Many) -> None:
    host, loader, client = many_models
    ask(client, "a")
    url = json.loads(host.get(f"/models/{loader.loaded[-1]}").body)["modelUrl"]
    assert host.load("_ a/b?%", url).status == 200
    name = "_%20a%2Fb%3F%25"
    assert host.post(f"/models/{name}/invoke", b"{}", {}).body == b"a"
    lines = host.post(
        f"/models/{name}/invoke", b"1\n2\n", {"Content-Type": "application/jsonlines"}
    )
    assert lines.body == b'"a"\n"a"\n'
    assert host.delete(f"/models/{name}").status == 200
    assert host.load("x", "/nowhere").status == host.post("/models", b"[]", {}).status == 400


def test_a_model_without_room_is_507_until_others_are_unloaded(
    many_models: Many, tmp_path: Path
) -> None:
    host, loader, client = many_models
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", (MEMORY_MB << 20) + 1)
    refusal = host.load("huge", str(tmp_path))
    assert refusal.status == 507
    assert f"it needs {MEMORY_MB} MB at least, and" in json.loads(refusal.body)["message"]
    for name in list(loader.loaded):
        loader.unload(name)
    assert ask(client, "large1") == b"large1"
    first = loader.loaded[-1]
    assert ask(client, "large2") == b"large2"
    assert first in loader.unloaded
    assert len(host.processes()) >= len(loader.loaded)


@pytest.mark.usefixtures("processes")
def test_a_toolkit_directory_is_served_in_batches(short_path: Path, free_ports: FreePorts) -> None:
    code = short_path / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def model_fn(model_dir): return Path(model_dir).name\n"
        "def input_fn(data, content_type): return data.encode() if isinstance(data, str) else data\n"
        "def batch_predict_fn(inputs, model):\n"
        "    while b'first' in inputs and not (Path(place, 'begun').touch() or Path(place, 'go').exists()): time.sleep(0.005)\n"
        "    return [f'{row.decode()} of {len(inputs)}' for row in inputs]\n"
        "def output_fn(prediction, accept): return prediction, 'text/plain'\n"
        f"place = {str(short_path)!r}\n"
    )
    begun_file, gate = short_path / "begun", short_path / "go"
    variables = {"TSX_TARGET": "sagemaker", "TSX_SAGEMAKER_LINES": "true"}
    with container(short_path, *free_ports(1), variables) as host:
        host.wait_until_healthy()
        kind = {"Content-Type": "text/plain"}

        def two_wait() -> object:
            return re.search(rb"\ntsx_queue_depth{[^}]*} 2\.0\n", host.get("/metrics").body)

        with ExitStack() as stack:
            answers = [stack.enter_context(host.begun("/invocations", b"first", kind))]
            host.wait_until(begun_file.exists)
            for body in (b"a", b"b"):
                answers.append(stack.enter_context(host.begun("/invocations", body, kind)))
            host.wait_until(lambda: two_wait() is not None)
            gate.touch()
            bodies = [answer().body for answer in answers]
        assert bodies == [b"first of 1", b"a of 2", b"b of 2"]
        lines = host.invoke(b"x\ny\n", "text/csv").body.splitlines()
        assert [line.partition(b" ")[0] for line in lines] == [b"x", b"y"]
        gate.unlink()
        begun_file.unlink()
        with host.begun("/invocations", b"first", kind) as last:
            host.wait_until(begun_file.exists)
            host.process.send_signal(signal.SIGTERM)
            host.wait_until(lambda: "stopping: no new requests" in host.log)
            gate.touch()
            # Accepted requests are answered.
            assert last().body == b"first of 1"
        assert host.process.wait(STOP) == 0
