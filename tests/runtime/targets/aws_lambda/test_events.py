"""The variables, events and answers of a Lambda function, without a process."""

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
    INIT_WAIT_S,
    FunctionSettings,
    cache_variables,
    read_environment,
)
from tsx_runtime.targets.aws_lambda.events import (
    ModelRequest,
    is_http,
    is_sqs,
    is_warm_up,
    ordered_failures,
    parse_event,
    parse_message,
)
from tsx_runtime.targets.aws_lambda.function import Function
from tsx_runtime.targets.aws_lambda.http_events import looks_like, prelude, timeout_error
from tsx_runtime.targets.aws_lambda.results import Result, ResultSender, s3_key, sqs_message
from tsx_runtime.targets.aws_lambda.runtime_api import Invocation
from tsx_runtime.targets.aws_lambda.runtime_client import Poller


def test_variables_and_image_files_override_platform_defaults(tmp_path: Path) -> None:
    (tmp_path / "tsx.toml").write_text('max_header_size = 5000\ncache_dir = "/elsewhere"\n')
    env = {
        "TSX_CACHE_DIR": "/mnt/cache",
        "TSX_LAMBDA_BASE_PATH": "api/",
        "TSX_MODEL_DIR": "/srv",
        "TSX_CONFIG": str(tmp_path / "tsx.toml"),
    }
    environment = read_environment(env)
    settings = Function(environment, env)._settings
    assert (settings.cache_dir, settings.state_dir) == (Path("/mnt/cache"), Path("/tmp/tsx/state"))
    assert (settings.max_header_size, settings.heartbeat_timeout) == (5000, 0)
    assert environment.options.base_path == "/api"
    assert environment.order["max_batch_delay"] == 0


@pytest.mark.parametrize(
    ("env", "is_ours"),
    [
        ({}, False),
        ({"AWS_LAMBDA_MAX_CONCURRENCY": "16"}, True),
        ({"TSX_LAMBDA_ANSWERS": "streamed"}, True),
        ({"TSX_LAMBDA_RUNTIME": "tsx"}, True),
        ({"TSX_LAMBDA_RUNTIME": "awslambdaric", "AWS_LAMBDA_MAX_CONCURRENCY": "1"}, False),
    ],
)
def test_amazons_runtime_client_is_used_unless_it_lacks_a_feature(
    env: dict[str, str], is_ours: bool
) -> None:
    assert read_environment(env).options.uses_own_client is is_ours


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"TSX_LAMBDA_RUNTIME": "awslambda"}, "is 'awslambda'; did you mean 'awslambdaric'"),
        ({"TSX_LAMBDA_ANSWERS": "?"}, r"is '\?'. Use one of buffered, streamed"),
        ({"TSX_LAMBDA_RESULTS": "bucket"}, "takes s3://BUCKET/PREFIX"),
        ({"TSX_LAMBDA_INIT_WAIT": "long"}, "takes a number"),
        ({"TSX_LAMBDA_STREAM": "1"}, "TSX_LAMBDA_STREAM is not a setting"),
        (
            {"TSX_LAMBDA_RUNTIME": "awslambdaric", "TSX_LAMBDA_ANSWERS": "streamed"},
            "which awslambdaric cannot do",
        ),
        (
            {"TSX_LAMBDA_RUNTIME": "awslambdaric", "AWS_LAMBDA_MAX_CONCURRENCY": "4"},
            "gets 4 invocations at once",
        ),
    ],
)
def test_an_invalid_variable_is_refused(env: dict[str, str], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        read_environment(env)


def test_only_on_demand_starts_limit_the_wait_for_the_model() -> None:
    def init_wait(**env: str) -> float | None:
        return read_environment(env).options.init_wait

    kind = "AWS_LAMBDA_INITIALIZATION_TYPE"
    assert init_wait() == INIT_WAIT_S
    assert init_wait(**{kind: "provisioned-concurrency"}) is None
    assert init_wait(**{kind: "lambda-managed-instances"}, TSX_LAMBDA_INIT_WAIT="3") == 3


def test_libraries_write_to_the_functions_writable_directory() -> None:
    assert cache_variables({"HOME": "/root", "HF_HOME": "/mnt/models"})["HOME"] == "/tmp"
    assert "HF_HOME" not in cache_variables({"HF_HOME": "/mnt/models"})
    assert all(path.startswith("/tmp") for path in cache_variables({}).values())


def test_event_types_are_distinguished() -> None:
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
def test_any_json_gives_one_request_several_or_a_reported_error(event: Any) -> None:
    try:
        requests, is_batch = parse_event(event)
    except BadRequest:
        return
    assert is_batch or len(requests) == 1
    assert all(isinstance(ask.body, bytes) for ask in requests)


def test_an_input_with_additional_keys_is_not_unwrapped() -> None:
    assert parse_event({"body": "x", "title": "y"}).requests == [
        ModelRequest(b'{"body": "x", "title": "y"}', (("content-type", "application/json"),))
    ]
    with pytest.raises(BadRequest, match="is marked as base64"):
        parse_event({"body": "no base64!", "isBase64Encoded": True})


def test_message_attributes_become_headers() -> None:
    [record] = messages(
        ["AAE="],
        {"content-transfer-encoding": "base64", "Content-Type": "image/png", "tsx-model": "m"},
    )["Records"]
    assert parse_message(record) == ModelRequest(b"\0\1", (("content-type", "image/png"),), "m")
    [record] = messages(["hello"])["Records"]
    assert parse_message(record).headers == (("content-type", "text/plain"),)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1))
def test_failed_messages_and_later_ones_of_their_group_are_retried(
    outcomes: list[tuple[str, bool]],
) -> None:
    groups = [group for group, _ in outcomes]
    records = messages(["x"] * len(outcomes), groups=groups)["Records"]
    ids = [record["messageId"] for record in records]
    failed_ids = {id for id, (_, is_ok) in zip(ids, outcomes, strict=True) if not is_ok}
    retried_ids = ordered_failures(records, failed_ids)
    assert failed_ids <= set(retried_ids)
    for group in "abc":
        is_retried = [
            id in retried_ids for id, name in zip(ids, groups, strict=True) if name == group
        ]
        # All messages of a group before its first retried one have succeeded.
        assert is_retried == sorted(is_retried)
    plain_records = messages(["x"] * len(outcomes))["Records"]
    assert set(ordered_failures(plain_records, failed_ids)) == failed_ids


def test_message_answers_have_names_and_keep_their_order() -> None:
    result = Result("id-1", "group", 200, "application/json; charset=utf-8", b"{}")
    assert s3_key("s3://bucket/some/place/", result) == ("bucket", "some/place/id-1.json")
    assert s3_key("s3://bucket", result._replace(content_type="x/y")) == ("bucket", "id-1.bin")
    names = ("MessageBody", "MessageGroupId", "MessageDeduplicationId")
    message = sqs_message("https://sqs/1/q.fifo", result)
    assert [message[name] for name in names] == ["{}", "group", "id-1"]
    assert sqs_message("https://sqs/1/q", result._replace(body=b"\xff"))["MessageBody"] == "/w=="


def test_threads_share_one_client_of_boto3() -> None:
    """Share it, since boto3 may fail if two clients are created at once."""
    barrier, clients_made = threading.Barrier(2), []

    def client(service: str) -> Any:
        with suppress(threading.BrokenBarrierError):
            clients_made.append(barrier.wait(0.2))
        return SimpleNamespace(send_message=lambda **message: None)

    async def send() -> None:
        results = ResultSender(client)
        await asyncio.gather(
            *(results.send("https://sqs/1/q", Result("id", "", 200, "", b"x")) for _ in range(4))
        )

    asyncio.run(send())
    assert clients_made == []


@pytest.mark.parametrize(("owner", "expected"), [("123456789012", "123456789012"), ("", None)])
def test_answers_are_sent_only_to_a_bucket_of_the_expected_account(
    owner: str, expected: str | None
) -> None:
    put_requests: list[dict[str, Any]] = []
    client = SimpleNamespace(put_object=lambda **put_request: put_requests.append(put_request))
    results = ResultSender(lambda service: client, owner)
    asyncio.run(results.send("s3://bucket/prefix", Result("id", "", 200, "text/plain", b"x")))
    (put_request,) = put_requests
    assert (put_request["Key"], put_request.get("ExpectedBucketOwner")) == (
        "prefix/id.txt",
        expected,
    )


def test_a_stopping_poller_answers_its_invocation_and_takes_no_other() -> None:
    class Api:
        """A Runtime API that always has another invocation."""

        answered: ClassVar[list[str]] = []
        closed = False

        async def next(self) -> Invocation:
            return Invocation({"lambda-runtime-aws-request-id": str(len(self.answered))}, b"{}")

        def start_stream(self, id: str) -> None:
            """Stream nothing."""

        async def answer(self, id: str, body: bytes) -> None:
            self.answered.append(id)

        def close(self) -> None:
            self.closed = True

    async def answer(*event: Any) -> str:
        assert len(api.answered) < 2, "it takes another, which would be lost"
        if len(api.answered) == 1:
            assert poller.stop()
        return "answer"

    api = Api()
    poller = Poller(
        cast("Any", SimpleNamespace(end_reason="", options=FunctionSettings(), answer=answer)),
        cast("Any", api),
    )
    asyncio.run(poller.run())
    assert (api.answered, api.closed, poller.stop()) == (["0", "1"], True, False)


def test_the_content_type_of_an_answer_is_guessed_from_its_body() -> None:
    assert [looks_like(body) for body in (b'{"a": 1}', b"seven", b"\xff\xfe")] == [
        "application/json",
        "text/plain; charset=utf-8",
        "application/octet-stream",
    ]


def test_the_prelude_joins_equal_headers_and_keeps_cookies_apart() -> None:
    headers = [(b"set-cookie", b"a=1"), (b"x", b"1"), (b"x", b"2"), (b"content-length", b"3")]
    head = b'{"statusCode": 200, "headers": {"x": "1, 2"}, "cookies": ["a=1"]}'
    assert prelude(200, headers) == head + b"\0" * 8


def test_timely_answers_are_sent_even_if_other_messages_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    results: list[Result] = []
    calls: list[str] = []

    async def answer_all(_registry: object, requests: list[Any], seconds: float) -> list[Any]:
        limits.append(seconds)
        return [ModelAnswer(200, "text/plain", b"yes"), timeout_error()]

    class Sender:
        async def send(self, target: str, result: Result) -> None:
            results.append(result)

    monkeypatch.setattr(batch_events, "answer_all", answer_all)
    queue = SqsBatches(
        cast("Any", None),
        "s3://bucket/answers",
        cast("Any", Sender()),
        lambda: calls.append("late"),
    )
    answer = asyncio.run(queue.answer(messages(["a", "b"]), 60))
    assert limits[0] <= 55
    assert [result.message for result in results] == ["message-0"]
    assert answer == {"batchItemFailures": [{"itemIdentifier": "message-1"}]}
    assert calls == ["late"]
