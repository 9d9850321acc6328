"""What lets pages of another origin read answers, on both lanes."""

from __future__ import annotations

import pytest

from tsx_runtime.api.access.origins import missing

ALLOWED = {
    "cors_allowed_origin": "https://my.site",
    "cors_allowed_methods": "GET, POST, OPTIONS",
    "cors_allowed_headers": "X-Custom-Header",
}
TOLD = {
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
        ("/predictions/talker", {"expect": "100-continue"}, 200),  # by the other lane
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
    assert {name: answer.headers.get_list(name) for name in TOLD} == {
        name: [value] for name, value in TOLD.items()
    }


def test_a_preflight_needs_no_token(open_server):
    asked = {"origin": "https://my.site", "access-control-request-method": "POST"}
    answer = open_server.inference.options("/predictions/talker", headers=asked)
    assert (answer.status_code, answer.content) == (200, b"")
    assert TOLD.items() <= dict(answer.headers).items()
    assert (
        open_server.inference.options("/predictions/talker").status_code == 400
    )  # that is a question for the API's description


def test_without_the_settings_nothing_is_said(server):
    answer = server.inference.post("/predictions/talker")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_what_a_handler_says_itself_goes_before():
    cors = ((b"access-control-allow-origin", b"*"), (b"access-control-allow-methods", b"GET"))
    assert missing(((b"access-control-allow-origin", b"https://other"),), cors) == cors[1:]


def test_the_site_that_is_named_may_manage(open_server):
    assert (
        open_server.management.get("/models", headers={"origin": "https://my.site"}).status_code
        == 200
    )
    assert (
        open_server.management.get("/models", headers={"origin": "https://other.site"}).status_code
        == 403
    )
