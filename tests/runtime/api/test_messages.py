"""Request bodies and response headers, without a server."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.api.errors import to_v2_error
from tsx_runtime.api.headers import NO_CACHE, check_status, handler_headers, new_request_id
from tsx_runtime.api.messages import MAX_DISCARDED_BYTES, ClientGone, Message, discard, read_body
from tsx_runtime.api.urls import Target, find_target, url_path, with_headers
from tsx_runtime.errors import PayloadTooLarge, PredictionFailed, _cached_error_body, error_body


class Sender:
    """The client's side of a body; it counts the messages that the server has read."""

    def __init__(self, chunks: Iterable[bytes], *, leaves: bool = False) -> None:
        self.messages: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
        ]
        if leaves:
            self.messages.append({"type": "http.disconnect"})
        elif self.messages:
            self.messages[-1]["more_body"] = False
        else:
            self.messages.append({"type": "http.request"})
        self.read_count = 0

    async def receive(self) -> Message:
        self.read_count += 1
        return self.messages[self.read_count - 1]


def read(sender: Sender, limit: int, headers: list[tuple[bytes, bytes]] | None = None) -> bytes:
    async def read_all() -> bytes:
        try:
            return await read_body({"headers": headers or []}, sender.receive, limit)
        except PayloadTooLarge as error:
            if error.more:
                await discard(sender.receive)
            raise

    return asyncio.run(read_all())


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 120))
def test_a_body_is_read_completely_or_refused_as_too_large(chunks: list[bytes], limit: int) -> None:
    body = b"".join(chunks)
    sender = Sender(chunks)
    if len(body) > limit:
        with pytest.raises(PayloadTooLarge):
            read(sender, limit)
    else:
        assert read(sender, limit) == body
    # Unread messages would be taken for the next request; therefore none may remain.
    assert sender.read_count == len(sender.messages)


def test_the_too_large_error_names_the_setting_and_its_value() -> None:
    with pytest.raises(PayloadTooLarge) as exc_info:
        read(Sender([b"12345"]), 4)
    assert "max_request_size, which is 4 bytes" in exc_info.value.message


def test_a_client_that_expects_100_continue_is_refused_before_it_sends() -> None:
    sender = Sender([b"12345"])
    with pytest.raises(PayloadTooLarge):
        read(sender, 4, [(b"content-length", b"5"), (b"expect", b"100-Continue")])
    assert sender.read_count == 0


def test_reading_an_endless_body_stops() -> None:
    piece = bytes(1 << 20)
    sender = Sender([piece] * 1000)
    with pytest.raises(PayloadTooLarge):
        read(sender, 10)
    assert sender.read_count * len(piece) <= MAX_DISCARDED_BYTES + 2 * len(piece)


@pytest.mark.parametrize(
    ("headers", "read_count"),
    [([(b"content-length", b"11")], 0), ([], 2)],
    ids=["announced", "chunked"],
)
def test_a_too_large_body_is_refused_as_early_as_possible(
    headers: list[tuple[bytes, bytes]], read_count: int
) -> None:
    sender = Sender([b"123456"] * 100)
    with pytest.raises(PayloadTooLarge) as exc_info:
        asyncio.run(read_body({"headers": headers}, sender.receive, 10))
    assert exc_info.value.more
    assert sender.read_count == read_count


@pytest.mark.parametrize("chunks", [[], [b"1"], [b"1", b"2"]])
def test_a_client_that_leaves_is_noticed(chunks: list[bytes]) -> None:
    with pytest.raises(ClientGone):
        read(Sender(chunks, leaves=True), 10)


def test_request_ids_are_unique_uuids() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert {uuid.UUID(text.decode()).version for text in ids} == {4}
    assert all(re.fullmatch(rb"[0-9a-f-]{36}", text) for text in ids)


def test_handler_headers_are_kept_and_caching_is_disabled() -> None:
    assert handler_headers(b"") == NO_CACHE
    assert handler_headers(b"Content-Type: text/csv\r\nX-Own: 1\r\n") == (
        (b"content-type", b"text/csv"),
        (b"x-own", b"1"),
        *NO_CACHE,
    )


def test_a_handlers_cache_control_is_kept() -> None:
    headers = handler_headers(b"Cache-Control: max-age=60\r\n")
    assert [value for name, value in headers if name == b"cache-control"] == [b"max-age=60"]


def test_a_handler_cannot_set_framing_headers_or_the_request_id() -> None:
    block = (
        b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\nX-Request-Id: mine\r\n"
        b"Connection: close\r\n"
    )
    assert handler_headers(block) == NO_CACHE


@pytest.mark.parametrize(
    "block",
    [
        b"bad name: 1\r\n",
        b": 1\r\n",
        b"x: a\x00b\r\n",
        b"x: a\nSet-Cookie: b\r\n",
        b"no colon\x7f\r\n",
    ],
)
def test_an_invalid_header_of_a_handler_is_an_error(block: bytes) -> None:
    with pytest.raises(PredictionFailed) as exc_info:
        handler_headers(block)
    assert "a header that HTTP does not allow" in exc_info.value.message


@pytest.mark.parametrize("status", [0, 100, 199, 600, 4_000_000_000])
def test_a_non_final_status_of_a_handler_is_an_error(status: int) -> None:
    with pytest.raises(PredictionFailed, match=str(status)):
        check_status(status)


def test_a_server_header_replaces_the_clients_header() -> None:
    target = Target("m", headers=((b"explain", b"True"),))
    assert with_headers([(b"Explain", b"no"), (b"a", b"b")], target) == [
        (b"a", b"b"),
        (b"explain", b"True"),
    ]


def test_a_v2_body_without_content_type_is_json() -> None:
    target = find_target("/v2/models/m/infer")
    assert target is not None
    protocol = (b"x-tsx-protocol", b"v2")
    extra_headers = [(b"explain", b"False"), protocol]
    assert with_headers([], target) == [*extra_headers, (b"content-type", b"application/json")]
    for header in ((b"Content-Type", b"text/csv"), (b"Inference-Header-Content-Length", b"9")):
        assert with_headers([header], target) == [header, *extra_headers]


def test_v2_errors_have_the_message_in_the_error_field() -> None:
    error = to_v2_error(error_body(404, "ModelNotFoundException", "Model not found: é"))
    assert list(json.loads(error)) == ["code", "type", "message", "error"]
    assert json.loads(error)["error"] == "Model not found: é"
    for body in (b"", b"text", b"[]", b'{"message": "of a handler"}', b"\xff", b"[" * 100_000):
        assert to_v2_error(body) == body


def test_an_error_message_that_quotes_a_large_request_is_not_cached() -> None:
    error_body(400, "BadRequestException", "kept")
    cached_errors = _cached_error_body.cache_info().currsize
    assert len(error_body(400, "BadRequestException", "x" * 1_000_000)) > 1_000_000
    assert _cached_error_body.cache_info().currsize == cached_errors > 0


@given(st.text())
def test_any_url_path_becomes_a_valid_header_value(path: str) -> None:
    assert re.fullmatch(rb"[\x20-\x7e]*", url_path(path))


def test_an_ordinary_url_path_is_unchanged() -> None:
    assert url_path("v1/chat completions") == b"v1/chat completions"
    assert url_path("a\r\nexplain: True") == b"a%0D%0Aexplain: True"
