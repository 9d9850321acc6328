"""What the variables of a function and its events mean: pure functions."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.platforms.lambda_api import balancer, function_url, messages, rest_api
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.targets.aws_lambda import batch_events
from tsx_runtime.targets.aws_lambda.batch_events import ModelAnswer, SqsBatches
from tsx_runtime.targets.aws_lambda.environment import (
    INIT_WAIT,
    FunctionSettings,
    homes,
    read_environment,
)
from tsx_runtime.targets.aws_lambda.events import (
    ModelRequest,
    is_http,
    is_sqs,
    is_warm_up,
    message,
    ordered_failures,
    parse_event,
)
from tsx_runtime.targets.aws_lambda.function import Function
from tsx_runtime.targets.aws_lambda.http_events import looks_like, prelude, too_late
from tsx_runtime.targets.aws_lambda.results import Result, ResultSender, s3_key, sqs_message
from tsx_runtime.targets.aws_lambda.runtime_api import Invocation
from tsx_runtime.targets.aws_lambda.runtime_client import Poller

pytestmark = pytest.mark.anyio


def test_a_variable_of_the_function_and_a_file_in_its_image_go_before_the_platforms_defaults(
    tmp_path: Path,
) -> None:
    (tmp_path / "tsx.toml").write_text('max_header_size = 5000\ncache_dir = "/elsewhere"\n')
    env = {
        "TSX_CACHE_DIR": "/mnt/cache",
        "TSX_LAMBDA_BASE_PATH": "api/",
        "TSX_MODEL_DIR": "/srv",
        "TSX_CONFIG": str(tmp_path / "tsx.toml"),
    }
    said = read_environment(env)
    settings = Function(said, env)._settings
    assert (settings.cache_dir, settings.state_dir) == (Path("/mnt/cache"), Path("/tmp/tsx/state"))
    assert (settings.max_header_size, settings.heartbeat_timeout) == (5000, 0)
    assert said.own.base_path == "/api"
    assert said.order["max_batch_delay"] == 0


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"TSX_LAMBDA_ANSWERS": "?"}, r"is '\?'. Use one of buffered, streamed"),
        ({"TSX_LAMBDA_RESULTS": "bucket"}, "takes s3://BUCKET/PREFIX"),
        ({"TSX_LAMBDA_INIT_WAIT": "long"}, "takes a number"),
        ({"TSX_LAMBDA_STREAM": "1"}, "unknown variable 'TSX_LAMBDA_STREAM'"),
    ],
)
def test_a_variable_that_means_nothing_says_what_it_takes(env: dict[str, str], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        read_environment(env)


def test_the_variable_that_chose_amazons_client_is_reported_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = {"TSX_LAMBDA_RUNTIME": "awslambdaric"}
    Function(read_environment(env), env)
    assert "TSX_LAMBDA_RUNTIME no longer exists" in caplog.text


def test_only_on_demand_is_the_model_not_waited_for_to_the_end() -> None:
    assert read_environment({}).own.init_wait == INIT_WAIT
    assert (
        read_environment(
            {"AWS_LAMBDA_INITIALIZATION_TYPE": "provisioned-concurrency"}
        ).own.init_wait
        is None
    )
    assert (
        read_environment(
            {
                "AWS_LAMBDA_INITIALIZATION_TYPE": "lambda-managed-instances",
                "TSX_LAMBDA_INIT_WAIT": "3",
            }
        ).own.init_wait
        == 3
    )


def test_libraries_write_where_a_function_may() -> None:
    assert homes({"HOME": "/root", "HF_HOME": "/mnt/models"})["HOME"] == "/tmp"
    assert "HF_HOME" not in homes({"HF_HOME": "/mnt/models"})
    assert all(place.startswith("/tmp") for place in homes({}).values())


def test_events_are_distinguished() -> None:
    for event in (rest_api("/"), function_url("/"), balancer("/")):
        assert (is_http(event), is_sqs(event), is_warm_up(event)) == (True, False, False)
    assert is_sqs(messages(["x"]))
    assert not is_sqs({"Records": []})
    assert not is_warm_up({"warmup": False})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


@given(json_values)
def test_any_json_is_one_request_several_or_an_error_that_is_reported(event: Any) -> None:
    try:
        requests, together = parse_event(event)
    except BadRequest:
        return
    assert together or len(requests) == 1
    assert all(isinstance(ask.body, bytes) for ask in requests)


def test_an_input_that_looks_like_a_wrapped_one_but_has_more_keys_is_an_input() -> None:
    assert parse_event({"body": "x", "title": "y"}).requests == [
        ModelRequest(b'{"body": "x", "title": "y"}', (("content-type", "application/json"),))
    ]
    with pytest.raises(BadRequest, match="is marked as base64"):
        parse_event({"body": "no base64!", "isBase64Encoded": True})


def test_attributes_of_a_message_are_headers() -> None:
    [record] = messages(
        ["AAE="],
        {"content-transfer-encoding": "base64", "Content-Type": "image/png", "tsx-model": "m"},
    )["Records"]
    assert message(record) == ModelRequest(b"\0\1", (("content-type", "image/png"),), "m")
    [record] = messages(["hello"])["Records"]
    assert message(record).headers == (("content-type", "text/plain"),)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1))
def test_what_comes_again_is_what_failed_and_what_follows_it_in_its_group(
    reported: list[tuple[str, bool]],
) -> None:
    records = messages(["x"] * len(reported), groups=[group for group, _ in reported])["Records"]
    failed = {
        record["messageId"] for record, (_, good) in zip(records, reported, strict=True) if not good
    }
    again = ordered_failures(records, failed)
    assert failed <= set(again)
    for group in "abc":
        own = [
            record["messageId"] in again
            for record, (name, _) in zip(records, reported, strict=True)
            if name == group
        ]
        assert own == sorted(own)  # all good ones before the first that comes again
    unordered = messages(["x"] * len(reported))["Records"]
    assert set(ordered_failures(unordered, failed)) == failed


def test_answers_of_messages_have_names_and_keep_their_order() -> None:
    result = Result("id-1", "group", 200, "application/json; charset=utf-8", b"{}")
    assert s3_key("s3://bucket/some/place/", result) == ("bucket", "some/place/id-1.json")
    assert s3_key("s3://bucket", result._replace(content_type="x/y")) == ("bucket", "id-1.bin")
    reported = sqs_message("https://sqs/1/q.fifo", result)
    assert (
        reported["MessageBody"],
        reported["MessageGroupId"],
        reported["MessageDeduplicationId"],
    ) == ("{}", "group", "id-1")
    assert sqs_message("https://sqs/1/q", result._replace(body=b"\xff"))["MessageBody"] == "/w=="


async def test_a_client_of_boto3_is_made_once_however_many_threads_want_it() -> None:
    """Making two at once fails now and then."""
    making, met = threading.Barrier(2), []

    def client(service: str) -> Any:
        with suppress(threading.BrokenBarrierError):
            met.append(making.wait(0.2))
        return SimpleNamespace(send_message=lambda **message: None)

    results = ResultSender(client)
    await asyncio.gather(
        *(results.send("https://sqs/1/q", Result("id", "", 200, "", b"x")) for _ in range(4))
    )
    assert met == []


@pytest.mark.parametrize(("owner", "expected"), [("123456789012", "123456789012"), ("", None)])
def test_answers_go_to_a_bucket_of_the_account_that_is_named(
    owner: str, expected: str | None
) -> None:
    sent: list[dict[str, Any]] = []
    results = ResultSender(
        lambda service: SimpleNamespace(put_object=lambda **given: sent.append(given)), owner
    )
    asyncio.run(results.send("s3://bucket/prefix", Result("id", "", 200, "text/plain", b"x")))
    assert [(given["Key"], given.get("ExpectedBucketOwner")) for given in sent] == [
        ("prefix/id.txt", expected)
    ]


def test_a_poller_that_is_to_leave_answers_what_it_has_and_asks_for_no_more() -> None:
    class Api:
        """It has an invocation whenever one is asked for."""

        answered: ClassVar[list[str]] = []
        closed = False

        async def next(self) -> Invocation:
            return Invocation({"lambda-runtime-aws-request-id": str(len(self.answered))}, b"{}")

        def parts(self, id: str) -> None:
            """Nothing is streamed."""

        async def answer(self, id: str, body: bytes) -> None:
            self.answered.append(id)

        def close(self) -> None:
            self.closed = True

    async def answer(*event: Any) -> str:
        assert len(api.answered) < 2, "it takes another, which would be lost"
        if len(api.answered) == 1:
            assert poller.leave()
        return "answer"

    api = Api()
    poller = Poller(
        cast("Any", SimpleNamespace(over="", own=FunctionSettings(), answer=answer)),
        cast("Any", api),
    )
    asyncio.run(poller.run())
    assert (api.answered, api.closed, poller.leave()) == (["0", "1"], True, False)


def test_an_answer_without_a_type_is_what_it_looks_like() -> None:
    assert [looks_like(body) for body in (b'{"a": 1}', b"seven", b"\xff\xfe")] == [
        "application/json",
        "text/plain; charset=utf-8",
        "application/octet-stream",
    ]
    reported = prelude(
        200, [(b"set-cookie", b"a=1"), (b"x", b"1"), (b"x", b"2"), (b"content-length", b"3")]
    )
    assert (
        reported == b'{"statusCode": 200, "headers": {"x": "1, 2"}, "cookies": ["a=1"]}' + b"\0" * 8
    )
    assert ModelAnswer(200, "", b"").status == 200


def test_answers_that_were_there_in_time_are_sent_although_other_messages_took_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    sent: list[Result] = []

    async def answer_all(_registry: object, requests: list[Any], seconds: float) -> list[Any]:
        given.append(seconds)
        return [ModelAnswer(200, "text/plain", b"yes"), too_late()]

    class Kept:
        async def send(self, place: str, result: Result) -> None:
            sent.append(result)

    monkeypatch.setattr(batch_events, "answer_all", answer_all)
    reported: list[str] = []
    queue = SqsBatches(
        cast("Any", None),
        "s3://bucket/answers",
        cast("Any", Kept()),
        lambda: reported.append("late"),
    )
    answer = asyncio.run(queue.answer(messages(["a", "b"]), 60))
    assert given[0] <= 55
    assert [result.message for result in sent] == ["message-0"]
    assert answer == {"batchItemFailures": [{"itemIdentifier": "message-1"}]}
    assert reported == ["late"]
