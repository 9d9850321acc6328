"""The settings that open predictions to other hosts and origins and pass headers to handlers."""

from __future__ import annotations

from contextlib import contextmanager

from tsx_runtime.core.hidden_credentials import HiddenHeaders
from tsx_runtime.settings.schema import Settings

SECRET_HEADERS = {"authorization", "cookie", "proxy-authorization"}
MINE = {"authorization": "Bearer mine", "cookie": "session=1", "proxy_authorization": "Basic eDp5"}


@contextmanager
def serve_talker(start_server, **settings):
    with start_server(**settings) as server:
        server.register("talker.mar", initial_workers=1)
        yield server


def statuses(server, *heads):
    return [
        [server.ask(lane=lane, **head).status_code for head in heads]
        for lane in ("fast", "framework")
    ]


def test_allowed_hosts_applies_to_predictions_on_loopback(start_server):
    heads = (
        {"host": "models.example"},
        {"host": "evil.example"},
        {"host": "Models.Example:80", "origin": "https://models.example"},
    )
    with serve_talker(start_server, allowed_hosts=["models.example"]) as server:
        assert statuses(server, *heads) == [[200, 403, 200]] * 2
        # The setting applies to predictions only.
        assert server.management.get("/models", headers=heads[0]).status_code == 403


def test_a_star_opens_predictions_to_any_host_and_page(start_server):
    heads = {"host": "evil.example", "origin": "null"}, {"sec_fetch_site": "cross-site"}
    with serve_talker(start_server, allowed_hosts=["*"]) as server:
        assert statuses(server, *heads) == [[200, 200]] * 2


def test_only_the_cors_origin_may_request_predictions(start_server):
    site = {"origin": "https://my.site", "sec_fetch_site": "cross-site"}
    with serve_talker(start_server, cors_allowed_origin="https://my.site") as server:
        assert statuses(server, site, site | {"origin": "https://other.site"}) == [[200, 403]] * 2
    with serve_talker(start_server, cors_allowed_origin="*") as server:
        assert statuses(server, site, {"host": "evil.example"}) == [[200, 403]] * 2


def test_a_page_with_a_token_may_be_of_any_origin(start_server):
    head = {"sec_fetch_site": "cross-site", "authorization": "Bearer in"}
    with serve_talker(start_server, inference_token="in") as server:
        assert statuses(server, head) == [[200]] * 2


def test_pages_of_other_origins_cannot_run_workflows_or_descriptions(server, error_of):
    cross_site = {"sec-fetch-site": "cross-site"}
    for client, path in (
        (server.inference, "/wfpredict/any"),
        (server.management, "/models/talker?customized=true"),
    ):
        answer = client.get(path, headers=cross_site)
        assert (answer.status_code, error_of(answer)[0]) == (403, "ForeignOriginException")
    # A link may lead to the page.
    assert server.management.get("/ui/", headers=cross_site).status_code == 200


def test_handlers_get_the_headers_listed_in_pass_headers(start_server):
    models = {"talker": {"pass_headers": ["Authorization"]}}
    for settings, names in (
        ({"models": models}, {"authorization"}),
        ({"pass_headers": ["cookie"]}, {"cookie"}),
    ):
        with serve_talker(start_server, **settings) as server:
            for lane in ("fast", "framework"):
                headers = server.ask(lane=lane, **MINE).json()["headers"]
                assert names == SECRET_HEADERS & {name.lower() for name in headers}


def test_pass_headers_of_a_model_are_added_to_the_global_list():
    models = {"m": {"pass_headers": ["Authorization"]}}
    hidden_headers = HiddenHeaders(Settings(pass_headers=["cookie"], models=models))
    assert hidden_headers.for_model("m") == {b"proxy-authorization"}
    assert hidden_headers.for_model("other") == {b"proxy-authorization", b"authorization"}
