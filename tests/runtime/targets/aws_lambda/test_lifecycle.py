"""The life of a Lambda environment: slow or failing loads, hangs, concurrent invocations."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.runtime.targets.aws_lambda.test_function import ECHO, JSON, body_of, post, with_model
from tests.support.platforms.aws import Account
from tests.support.platforms.lambda_api import function, function_url, messages
from tests.support.servers import DEADLINE

pytestmark = pytest.mark.usefixtures("processes")

LOADS = 'from pathlib import Path\nPath(__file__).with_name("loads").open("a").write("x")\n'
SLOW_LOAD = (
    "import time\nfrom pathlib import Path\nwhile not Path({!r}).exists():\n    time.sleep(0.01)\n"
)
LOST_DEVICE = """
def handle(data, context):
    if data is not None:
        raise RuntimeError("CUDA error: unspecified launch failure")
"""
BROKEN = "raise RuntimeError('no weights')\n"


@pytest.mark.parametrize(
    ("client", "wait"),
    [("awslambdaric", 0), ("tsx", DEADLINE)],
    ids=["after the start", "during the start"],
)
def test_a_failed_load_is_reported_and_retried_in_a_new_environment(
    tmp_path: Path, client: str, wait: float
) -> None:
    variables = {"TSX_LAMBDA_RUNTIME": client, "TSX_LAMBDA_INIT_WAIT": str(wait)}
    with function(with_model(tmp_path, BROKEN), variables) as host:
        payload = post(host)
        assert payload["statusCode"] == 503
        assert "RuntimeError: no weights" in body_of(payload)["message"]
        assert host.wait_for_exit(DEADLINE) == 1
        failed_invocation = host.invoke({"a": 1})
        assert failed_invocation.error
        assert "no weights" in failed_invocation.json()["errorMessage"]
        assert host.start_count == 2
        # Each environment logs the traceback.
        assert host.log.count("raise RuntimeError('no weights')") == 2


@pytest.mark.parametrize("client", ["awslambdaric", "tsx"])
def test_a_failed_load_fails_a_provisioned_start(tmp_path: Path, client: str) -> None:
    variables = {
        "AWS_LAMBDA_INITIALIZATION_TYPE": "provisioned-concurrency",
        "TSX_LAMBDA_RUNTIME": client,
    }
    with function(with_model(tmp_path, BROKEN), variables) as host:
        assert "no weights" in host.invoke({"a": 1}).json()["errorMessage"]
        assert host.init_error
        assert host.init_error["errorType"] == "LoadFailed"


def test_a_function_without_a_model_fails(tmp_path: Path) -> None:
    with function(tmp_path) as host:
        assert "it must hold one .mar" in host.invoke({}).json()["errorMessage"]


def test_a_slow_load_continues_across_invocations(tmp_path: Path) -> None:
    """Freeze the loading thread with its environment between invocations, and resume it."""
    file = tmp_path / "there"
    variables = {
        "TSX_LAMBDA_INIT_WAIT": "0",
        "TSX_LAMBDA_BASE_PATH": "api",
        "TSX_SERVICE_ENVELOPE": "json",
    }
    slow_model = with_model(tmp_path, SLOW_LOAD.format(str(file)) + ECHO)
    with function(slow_model, variables, timeout=1.0) as host:
        request = '{"instances": [{"n": 1}, {"n": 2}, {"n": 3}]}', "/api/v1/models/echo:predict"
        payload = post(host, *request)
        assert (payload["statusCode"], payload["headers"]["retry-after"]) == (503, "1")
        assert "has been loading for" in body_of(payload)["message"]
        assert host.invoke({"a": 1}).json()["errorType"] == "StillLoading"
        file.touch()
        host.timeout = DEADLINE
        predictions = body_of(post(host, *request))["predictions"]
        # The handler is called once for all instances.
        assert [prediction["together"] for prediction in predictions] == [3, 3, 3]
        assert host.start_count == 1


@pytest.mark.parametrize("client", ["awslambdaric", "tsx"])
def test_a_hanging_handler_ends_its_environment(tmp_path: Path, client: str) -> None:
    directory = with_model(tmp_path, ECHO, "batchSize: 1\nresponseTimeout: 1\n")
    with function(directory, {"TSX_LAMBDA_RUNTIME": client}, freezes=False) as host:
        failed_invocation = host.invoke({"wait": str(tmp_path / "never")})
        assert "within 1 s (responseTimeout)" in failed_invocation.json()["errorMessage"]
        assert host.wait_for_exit(DEADLINE) == 1
        assert "a thread cannot be killed" in host.log


def test_a_lost_device_ends_the_environment(tmp_path: Path) -> None:
    """End the process, since none of its threads can use the device again."""
    line = "Lambda starts a new one: the worker exited"
    with function(with_model(tmp_path, LOST_DEVICE), {"TSX_LAMBDA_RUNTIME": "tsx"}) as host:
        # The worker may fail two invocations before it is restarted for the third.
        for _ in range(3):
            assert host.invoke({"a": 1}).error
        assert line in host.log or host.wait_for_exit(DEADLINE) == 1
        assert line in host.log


def test_a_hanging_handler_does_not_block_concurrent_invocations_forever(tmp_path: Path) -> None:
    directory = with_model(tmp_path, ECHO, "batchSize: 1\n")
    with function(directory, concurrency=2, timeout=1.5) as host:
        assert host.invoke({"wait": str(tmp_path / "never")}).json()["errorType"] == "TooLate"
        # This invocation waits for the first one or finds a new environment.
        host.invoke({"a": 1})
        assert "Lambda starts a new one" in host.log or host.wait_for_exit(DEADLINE) == 1


@pytest.fixture(scope="module")
def shared_environment(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any, None, None]:
    """Run an environment of Lambda Managed Instances that streams."""
    directory = with_model(tmp_path_factory.mktemp("shared"), LOADS + ECHO, "batchSize: 8\n")
    with function(directory, {"TSX_LAMBDA_ANSWERS": "streamed"}, concurrency=8) as host:
        yield host, directory


def test_concurrent_invocations_share_one_model_and_its_batches(shared_environment: Any) -> None:
    host, directory = shared_environment
    gate = directory / "gate"
    first = host.begin({"wait": str(gate)})
    neighbours = [host.begin({"n": number}) for number in range(7)]
    # Each poller fetches its invocation independently.
    while not host._waiting.empty():
        time.sleep(0.005)
    gate.touch()
    for invocation in (first, *neighbours):
        host.wait(invocation)
    assert [invocation.json()["got"] for invocation in neighbours] == [
        {"n": number} for number in range(7)
    ]
    assert max(invocation.json()["together"] for invocation in neighbours) > 1
    assert [file.read_text() for file in directory.rglob("loads")] == ["x"]


def test_an_answer_is_streamed_in_parts(shared_environment: Any) -> None:
    host, directory = shared_environment
    gate = directory / "stream"
    body = json.dumps({"parts": ["one", "two"], "wait": str(gate)})
    invocation = host.begin(function_url("/predictions/echo", body, headers=JSON))
    prelude, end, message_part = invocation.parts.get(timeout=DEADLINE).partition(b"\0" * 8)
    assert (json.loads(prelude)["statusCode"], end, message_part) == (200, b"\0" * 8, b"")
    assert invocation.parts.get(timeout=DEADLINE) == b"one"
    assert invocation.parts.get(timeout=DEADLINE) == b"two"
    assert not invocation.done.is_set()
    gate.touch()
    host.wait(invocation)
    assert invocation.answer.startswith(prelude + end + b"onetwo")
    assert invocation.error is None


def test_a_broken_answer_ends_with_an_error(shared_environment: Any) -> None:
    host, _ = shared_environment
    body = json.dumps({"parts": ["one"], "late": 1})
    invocation = host.invoke(function_url("/predictions/echo", body, headers=JSON))
    assert invocation.answer.endswith(b"one")
    assert "was interrupted" in invocation.error


def test_complete_answers_and_refusals_are_streamed(shared_environment: Any) -> None:
    host, _ = shared_environment
    invocation = host.invoke(function_url("/predictions/nobody", "{}"))
    prelude, _, body = invocation.answer.partition(b"\0" * 8)
    assert json.loads(prelude)["statusCode"] == json.loads(body)["code"] == 404
    # Answers to events other than HTTP requests have no prelude.
    assert host.invoke({"a": 1}).json()["got"] == {"a": 1}


def test_a_stop_ends_the_environment_cleanly(shared_environment: Any) -> None:
    host, _ = shared_environment
    assert host.invoke({"a": 1}).error is None
    assert host.stop(DEADLINE) == 0


def test_message_answers_are_sent_to_the_configured_bucket_or_queue(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use real boto3 clients and moto, whose start takes a second."""
    from moto.server import ThreadedMotoServer

    # moto has one account in a process.
    account.emptied()
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    variables["TSX_LAMBDA_RESULTS"] = "message"
    try:
        s3, sqs = boto3.client("s3"), boto3.client("sqs")
        region = {"LocationConstraint": "eu-central-1"}
        s3.create_bucket(Bucket="answers", CreateBucketConfiguration=region)
        queue = sqs.create_queue(QueueName="answers")["QueueUrl"]
        with function(with_model(tmp_path), variables) as running:

            def send(target: str, *bodies: str) -> list[dict[str, str]]:
                """Send messages whose answers go to `target`, and return those that failed."""
                answer = running.invoke(messages([*bodies], {"tsx-results": target})).json()
                failures: list[dict[str, str]] = answer["batchItemFailures"]
                return failures

            failures = send("s3://answers/from/here/", '{"n": 1}', '{"fail": 1}')
            assert failures == [{"itemIdentifier": "message-1"}]
            stored_answer = s3.get_object(Bucket="answers", Key="from/here/message-0.json")
            assert json.load(stored_answer["Body"])["got"] == {"n": 1}
            assert send(queue, "text") == []
            queue_messages = sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"])
            [message] = queue_messages["Messages"]
            assert json.loads(message["Body"])["got"] == "text"
            assert message["MessageAttributes"]["tsx-message-id"]["StringValue"] == "message-0"
            assert send("s3://nowhere/", "text")
            assert "cannot be sent to s3://nowhere/" in running.log
    finally:
        server.stop()
