"""CORS headers, which let pages of another origin read responses, on both lanes."""

from __future__ import annotations

import pytest

from tsx_runtime.api.access.origins import missing_cors_headers

ALLOWED = {
    "cors_allowed_origin": "https://my.site",
    "cors_allowed_methods": "GET, POST, OPTIONS",
    "cors_allowed_headers": "X-Custom-Header",
}
HEADERS = {
    "access-control-allow-origin": "https://my.site",
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "X-Custom-Header",
}


@pytest.fixture(scope="module")
def open_server(start_server):
    with start_server(inference_token="in", **ALLOWED) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/predictions/talker", {}, 200),
        ("/predictions/talker", {"x-do": "raise"}, 500),
        ("/predictions/talker", {"x-do": "stream"}, 200),
        # The ASGI lane answers this one.
        ("/predictions/talker", {"expect": "100-continue"}, 200),
        ("/predictions/talker/2.0", {}, 404),
        ("/predictions/nobody", {}, 404),
        ("/ping", {}, 200),
        ("/nothing", {}, 404),
    ],
)
def test_every_answer_says_who_may_read_it(open_server, path, headers, status):
    answer = open_server.inference.post(
        path, content=b"x", headers={"authorization": "Bearer in"} | headers
    )
    assert answer.status_code == status
    assert {name: answer.headers.get_list(name) for name in HEADERS} == {
        name: [value] for name, value in HEADERS.items()
    }


def test_a_preflight_needs_no_token(open_server):
    headers = {"origin": "https://my.site", "access-control-request-method": "POST"}
    answer = open_server.inference.options("/predictions/talker", headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")
    assert HEADERS.items() <= dict(answer.headers).items()
    # Without these headers, OPTIONS asks for the API's description.
    assert open_server.inference.options("/predictions/talker").status_code == 400


def test_without_the_settings_no_header_is_sent(server):
    answer = server.inference.post("/predictions/talker")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_header_of_the_handler_overrides_the_cors_header():
    cors = ((b"access-control-allow-origin", b"*"), (b"access-control-allow-methods", b"GET"))
    assert (
        missing_cors_headers(((b"access-control-allow-origin", b"https://other"),), cors)
        == cors[1:]
    )


def test_the_allowed_origin_may_call_the_management_api(open_server):
    for origin, status in (("https://my.site", 200), ("https://other.site", 403)):
        answer = open_server.management.get("/models", headers={"origin": origin})
        assert answer.status_code == status
