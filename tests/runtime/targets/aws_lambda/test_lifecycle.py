"""The life of a Lambda environment: how a model comes to be there, what is said until then, and
what invocations at once share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.runtime.targets.aws_lambda.test_function import ECHO, JSON, lay
from tests.support.platforms.aws import Account
from tests.support.platforms.lambda_api import answer_of, function, function_url, messages
from tests.support.servers import DEADLINE

pytestmark = pytest.mark.usefixtures("processes")


LOADS = 'from pathlib import Path\nPath(__file__).with_name("loads").open("a").write("x")\n'
SLOW = (
    "import time\nfrom pathlib import Path\nwhile not Path({!r}).exists():\n    time.sleep(0.01)\n"
)
LOST = """
def handle(data, context):
    if data is not None:
        raise RuntimeError("CUDA error: unspecified launch failure")
"""
BROKEN = "raise RuntimeError('no weights')\n"


@pytest.mark.parametrize("wait", [0, DEADLINE], ids=["after the start", "during the start"])
def test_a_model_that_does_not_load_is_reported_and_a_fresh_environment_tries_again(
    tmp_path: Path, wait: float
) -> None:
    with function(lay(tmp_path, BROKEN), {"TSX_LAMBDA_INIT_WAIT": str(wait)}) as running:
        answered = running.invoke(function_url("/predictions/echo", "{}")).json()
        assert answered["statusCode"] == 503
        assert "RuntimeError: no weights" in json.loads(answer_of(answered))["message"]
        assert running.ended(DEADLINE) == 1
        failed = running.invoke({"a": 1})
        assert failed.error
        assert "no weights" in failed.json()["errorMessage"]
        assert running.started == 2
        # The traceback.
        assert running.log.count("raise RuntimeError('no weights')") == running.started


def test_where_nobody_waits_yet_a_model_that_does_not_load_fails_the_start(tmp_path: Path) -> None:
    how = {"AWS_LAMBDA_INITIALIZATION_TYPE": "provisioned-concurrency"}
    with function(lay(tmp_path, BROKEN), how) as running:
        assert "no weights" in running.invoke({"a": 1}).json()["errorMessage"]
        assert running.init_error
        assert running.init_error["errorType"] == "LoadFailed"


def test_a_function_without_a_model_says_so(tmp_path: Path) -> None:
    with function(tmp_path) as running:
        assert "it must hold one .mar" in running.invoke({}).json()["errorMessage"]


def test_a_model_that_loads_for_long_is_waited_for_across_invocations(tmp_path: Path) -> None:
    """Its thread is stopped with the environment between them, and goes on with it."""
    there = tmp_path / "there"
    given = {
        "TSX_LAMBDA_INIT_WAIT": "0",
        "TSX_LAMBDA_BASE_PATH": "api",
        "TSX_SERVICE_ENVELOPE": "json",
    }
    with function(lay(tmp_path, SLOW.format(str(there)) + ECHO), given, timeout=1.5) as running:
        many = function_url(
            "/api/v1/models/echo:predict",
            '{"instances": [{"n": 1}, {"n": 2}, {"n": 3}]}',
            headers=JSON,
        )
        answered = running.invoke(many).json()
        assert (answered["statusCode"], answered["headers"]["retry-after"]) == (503, "1")
        assert "has been loading for" in json.loads(answer_of(answered))["message"]
        assert running.invoke({"a": 1}).json()["errorType"] == "StillLoading"
        there.touch()
        running.timeout = DEADLINE
        predictions = json.loads(answer_of(running.invoke(many).json()))["predictions"]
        assert [each["together"] for each in predictions] == [3, 3, 3]  # one call of the handler
        assert running.started == 1


def test_a_handler_that_never_returns_is_given_up_with_its_environment(tmp_path: Path) -> None:
    place = lay(tmp_path, ECHO, "batchSize: 1\nresponseTimeout: 1\n")
    with function(place, freezes=False) as running:
        failed = running.invoke({"wait": str(tmp_path / "never")})
        assert "did not answer within 1 s (responseTimeout)" in failed.json()["errorMessage"]
        assert running.ended(DEADLINE) == 1
        assert "a thread cannot be killed" in running.log


def test_a_device_that_is_lost_ends_the_environment(tmp_path: Path) -> None:
    """No other thread of the process gets over it, though one is started for the requests that are
    there.
    """
    reported = "Lambda starts a new one: the worker exited"
    with function(lay(tmp_path, LOST)) as running:
        for _ in range(
            3
        ):  # the worker may take the second with it, and is started anew for the third
            assert running.invoke({"a": 1}).error
        assert reported in running.log or running.ended(DEADLINE) == 1
        assert reported in running.log


def test_a_handler_that_never_returns_does_not_hold_up_the_invocations_beside_it_for_good(
    tmp_path: Path,
) -> None:
    with function(lay(tmp_path, ECHO, "batchSize: 1\n"), concurrency=2, timeout=2.0) as running:
        assert running.invoke({"wait": str(tmp_path / "never")}).json()["errorType"] == "TooLate"
        running.invoke({"a": 1})  # waits behind it, or finds a fresh environment already
        assert "Lambda starts a new one" in running.log or running.ended(DEADLINE) == 1


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any, None, None]:
    """An environment of Managed Instances that streams."""
    place = lay(tmp_path_factory.mktemp("shared"), LOADS + ECHO, "batchSize: 8\n")
    with function(place, {"TSX_LAMBDA_ANSWERS": "streamed"}, concurrency=8) as running:
        yield running, place


def test_invocations_at_once_share_one_model_and_its_batches(shared: Any) -> None:
    running, place = shared
    gate = place / "gate"
    first = running.begin({"wait": str(gate)})
    others = [running.begin({"n": number}) for number in range(7)]
    while not running._waiting.empty():  # each poller asks for its invocation by itself
        time.sleep(0.005)
    gate.touch()
    for invocation in (first, *others):
        running.wait(invocation)
    assert [invocation.json()["got"] for invocation in others] == [
        {"n": number} for number in range(7)
    ]
    assert max(invocation.json()["together"] for invocation in others) > 1
    assert [file.read_text() for file in place.rglob("loads")] == ["x"]


def test_an_answer_goes_out_part_by_part(shared: Any) -> None:
    running, place = shared
    gate = place / "stream"
    reported = {"parts": ["one", "two"], "wait": str(gate)}
    invocation = running.begin(
        function_url("/predictions/echo", json.dumps(reported), headers=JSON)
    )
    prelude, end, rest = invocation.parts.get(timeout=DEADLINE).partition(b"\0" * 8)
    assert (json.loads(prelude)["statusCode"], end, rest) == (200, b"\0" * 8, b"")
    assert invocation.parts.get(timeout=DEADLINE) == b"one"
    assert invocation.parts.get(timeout=DEADLINE) == b"two"
    assert not invocation.done.is_set()
    gate.touch()
    running.wait(invocation)
    assert invocation.answer.startswith(prelude + end + b"onetwo")
    assert invocation.error is None


def test_an_answer_that_breaks_off_is_reported_behind_it(shared: Any) -> None:
    running, _ = shared
    invocation = running.invoke(
        function_url("/predictions/echo", json.dumps({"parts": ["one"], "late": 1}), headers=JSON)
    )
    assert invocation.answer.endswith(b"one")
    assert "was interrupted" in invocation.error


def test_a_whole_answer_and_a_refusal_are_streamed_as_well(shared: Any) -> None:
    running, _ = shared
    invocation = running.invoke(function_url("/predictions/nobody", "{}"))
    prelude, _, body = invocation.answer.partition(b"\0" * 8)
    assert json.loads(prelude)["statusCode"] == json.loads(body)["code"] == 404
    assert running.invoke({"a": 1}).json()["got"] == {
        "a": 1
    }  # what is no HTTP request has no prelude


def test_a_stop_ends_the_environment_in_order(shared: Any) -> None:
    running, _ = shared
    assert running.invoke({"a": 1}).error is None
    assert running.stop(DEADLINE) == 0


def test_answers_of_messages_go_where_they_are_wanted(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real clients of boto3 against moto, whose start takes a second."""
    from moto.server import ThreadedMotoServer

    account.emptied()  # moto has one account in a process
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "eu-central-1",
        "ENDPOINT_URL": f"http://{host}:{port}",
    }
    variables = {f"AWS_{name}": value for name, value in given.items()}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        s3, sqs = boto3.client("s3"), boto3.client("sqs")
        s3.create_bucket(
            Bucket="answers", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
        )
        queue = sqs.create_queue(QueueName="answers")["QueueUrl"]
        with function(lay(tmp_path), {**variables, "TSX_LAMBDA_RESULTS": "message"}) as running:
            reported = running.invoke(
                messages(['{"n": 1}', '{"fail": 1}'], {"tsx-results": "s3://answers/from/here/"})
            )
            assert reported.json() == {"batchItemFailures": [{"itemIdentifier": "message-1"}]}
            assert json.load(
                s3.get_object(Bucket="answers", Key="from/here/message-0.json")["Body"]
            )["got"] == {"n": 1}
            assert running.invoke(messages(["text"], {"tsx-results": queue})).json() == {
                "batchItemFailures": []
            }
            [message] = sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"])[
                "Messages"
            ]
            assert json.loads(message["Body"])["got"] == "text"
            assert message["MessageAttributes"]["tsx-message-id"]["StringValue"] == "message-0"
            assert running.invoke(messages(["text"], {"tsx-results": "s3://nowhere/"})).json()[
                "batchItemFailures"
            ]
            assert "its answer cannot be sent to s3://nowhere/" in running.log
    finally:
        server.stop()
