"""Request heads: how the fast lane parses and caches them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clients.rawhttp import request
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.tokens import BearerToken
from tsx_runtime.api.headers import Pair
from tsx_runtime.core.hidden_credentials import HiddenHeaders
from tsx_runtime.errors import InvalidToken, ModelNotFound, ResourceNotFound
from tsx_runtime.http.fast_lane.heads import MAX_CACHED, Heads, RefusalRoute, parse_head
from tsx_runtime.settings.schema import Settings

DIGITS = "/predictions/digits"


class Version:
    name = "digits"

    def route_for_headers(self, headers: object) -> Version:
        return self


def make_heads(
    guard: Guard | None = None,
    error_of_missing: Callable[[str], ResourceNotFound | None] = lambda path: None,
) -> tuple[Heads, Any]:
    """Return a head cache and its registry of one model."""
    models: dict[str, object] = {"digits": Version()}

    def route(name: str, version: str | None, headers: object) -> object:
        if name not in models:
            raise ModelNotFound(name)
        return models[name]

    registry: Any = SimpleNamespace(
        route=route, on_change=[], models=models, hidden_headers=HiddenHeaders(Settings())
    )
    return Heads(registry, guard, 100, 64 << 10, missing_route=error_of_missing), registry


def a_head(path: str = DIGITS, *headers: Pair, length: int = 0) -> bytes:
    return request(target=path.encode(), headers=[*headers, (b"Content-Length", b"%d" % length)])


def read(heads: Heads, raw: bytes) -> Any:
    return heads.read(raw) or pytest.fail("the fast lane did not take the request")


def test_a_head_is_parsed_once():
    heads, registry = make_heads()
    raw = a_head(f"{DIGITS}?a=1", (b"X-Own", b"1"), length=7)
    head, version = read(heads, raw)
    assert heads.entries[raw] == (head, version)
    assert version is registry.models["digits"]
    assert (head.length, head.keep_alive) == (7, True)
    assert (
        head.meta
        == b"\r\n\r\nHost: 127.0.0.1\r\nX-Own: 1\r\nContent-Length: 7\r\nurl_path: \r\nexplain: False\r\n"
    )


@pytest.mark.parametrize(
    ("value", "expects_continue"),
    [(b"100-continue", True), (b"100-Continue", True), (b"a-miracle", False)],
)
def test_a_head_knows_whether_the_client_expects_100_continue(value, expects_continue):
    head, _ = read(make_heads()[0], a_head(DIGITS, (b"Expect", value), length=7))
    assert head.expects_continue == expects_continue


def test_cached_heads_are_dropped_when_models_change():
    heads, registry = make_heads()
    raw = a_head("/predictions/new")
    assert isinstance(read(heads, raw)[1], RefusalRoute)
    assert raw in heads.entries
    registry.models["new"] = Version()
    for listener in registry.on_change:
        listener()
    assert raw not in heads.entries
    assert read(heads, raw)[1] is registry.models["new"]


def test_only_a_few_short_heads_are_cached():
    heads, _ = make_heads()
    for number in range(MAX_CACHED + 10):
        read(heads, a_head(f"{DIGITS}?{number}"))
    assert len(heads.entries) <= MAX_CACHED
    long_head = a_head(DIGITS, (b"X-Long", b"x" * 5000))
    read(heads, long_head)
    assert long_head not in heads.entries


POST = b"POST /predictions/digits HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"HEAD /predictions/digits HTTP/1.1\r\nHost: a\r\n\r\n",
        b"OPTIONS /predictions/digits HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /predictions/digits HTTP/1.0\r\nContent-Length: 1\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n",
        POST + b"Expect: 100-continue\r\nContent-Length: 0\r\n\r\n",
        POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Content-Length: 101\r\n\r\n",
        POST + b"Content-Length: +1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Content-Length: " + b"0" * 5000 + b"5\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\r\nHost : a\r\n\r\n",
        b"POST /predictions/digits HTTP/1.1\nHost: a\n\nGET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n",
        b"\r\n\r\n",
        b"junk\r\n\r\n",
        b"POST /predictions/nobody HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n",
        b"GET http://host HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=a\r\n\r\n",
    ],
)
def test_an_unusual_head_is_left_to_the_asgi_lane(raw):
    assert make_heads()[0].read(raw) is None


INVALID_PRIORITY = (b"X-TSX-Priority", b"urgent")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/predictions/nobody", [], 404),
        ("/predictions/%ff%fe", [], 404),
        ("/predictions/", [], 404),
        (DIGITS, [INVALID_PRIORITY], 400),
        ("/nowhere", [], 404),
        ("/nowhere", [INVALID_PRIORITY], 404),
    ],
)
def test_a_refused_head_is_cached_with_its_refusal(path, headers, status):
    heads, _ = make_heads(
        error_of_missing=lambda path: ResourceNotFound("Nothing.") if path == "/nowhere" else None
    )
    raw = a_head(path, *headers)
    _, route = read(heads, raw)
    assert isinstance(route, RefusalRoute)
    assert route.error.status == status
    assert heads.entries[raw][1] is route


def test_a_missing_token_precedes_all_other_refusals():
    heads, _ = make_heads(Guard(BearerToken("secret")))
    for path in ("/predictions/talker", DIGITS, "/predictions/nobody"):
        for headers in ([], [(b"Authorization", b"Bearer wrong")], [INVALID_PRIORITY]):
            _, route = read(heads, a_head(path, *headers))
            assert isinstance(route, RefusalRoute)
            assert isinstance(route.error, InvalidToken)
    _, route = read(heads, a_head(DIGITS, (b"Authorization", b"Bearer secret")))
    assert isinstance(route, Version)


def test_refused_heads_do_not_evict_accepted_ones():
    heads, _ = make_heads()
    cached_head = read(heads, a_head())
    for number in range(2 * MAX_CACHED):
        heads.read(a_head(f"/predictions/nobody-{number}"))
        heads.read(a_head(f"/ping?{number}"))
    assert heads.entries[a_head()] == cached_head
    assert len(heads.entries) <= MAX_CACHED
    late_head = a_head(f"{DIGITS}?late")
    read(heads, late_head)
    assert late_head in heads.entries


@given(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [b"\r\n", b"\n", b": ", b"Content-Length: 1", b"GET / HTTP/1.1", b"\x00", b"a"]
        ),
        max_size=12,
    ),
)
def test_arbitrary_bytes_give_one_head_or_none(first, raw_parts):
    head = parse_head(
        b"POST /predictions/digits HTTP/1.1\r\n" + first + b"".join(raw_parts) + b"\r\n\r\n"
    )
    assert head is None or (head.messages == 1 and not head.has_body)
