"""Settings that open predictions to other hosts and pages, and headers to handlers."""

from __future__ import annotations

from contextlib import contextmanager

from tsx_runtime.core.isolation.hidden_credentials import HiddenHeaders
from tsx_runtime.settings.schema import Settings

SECRET = {"authorization", "cookie", "proxy-authorization"}
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


def test_allowed_hosts_name_the_hosts_of_a_server_on_loopback(start_server):
    heads = (
        {"host": "models.example"},
        {"host": "evil.example"},
        {"host": "Models.Example:80", "origin": "https://models.example"},
    )
    with serve_talker(start_server, allowed_hosts=["models.example"]) as server:
        assert statuses(server, *heads) == [[200, 403, 200]] * 2
        # The hosts are those of predictions alone.
        assert server.management.get("/models", headers=heads[0]).status_code == 403


def test_a_star_opens_predictions_to_any_host_and_page(start_server):
    heads = {"host": "evil.example", "origin": "null"}, {"sec_fetch_site": "cross-site"}
    with serve_talker(start_server, allowed_hosts=["*"]) as server:
        assert statuses(server, *heads) == [[200, 200]] * 2


def test_the_site_of_cors_may_ask_and_no_other(start_server):
    site = {"origin": "https://my.site", "sec_fetch_site": "cross-site"}
    with serve_talker(start_server, cors_allowed_origin="https://my.site") as server:
        assert statuses(server, site, site | {"origin": "https://other.site"}) == [[200, 403]] * 2
    with serve_talker(start_server, cors_allowed_origin="*") as server:
        assert statuses(server, site, {"host": "evil.example"}) == [[200, 403]] * 2


def test_a_page_that_has_a_token_may_be_of_any_site(start_server):
    head = {"sec_fetch_site": "cross-site", "authorization": "Bearer in"}
    with serve_talker(start_server, inference_token="in") as server:
        assert statuses(server, head) == [[200]] * 2


def test_no_foreign_page_has_a_workflow_or_a_description_run(server, error_of):
    foreign = {"sec-fetch-site": "cross-site"}
    for client, path in (
        (server.inference, "/wfpredict/any"),
        (server.management, "/models/talker?customized=true"),
    ):
        answer = client.get(path, headers=foreign)
        assert (answer.status_code, error_of(answer)[0]) == (403, "ForeignOriginException")
    # A link may lead to the page.
    assert server.management.get("/ui/", headers=foreign).status_code == 200


def test_handlers_get_the_headers_that_the_settings_name(start_server):
    models = {"talker": {"pass_headers": ["Authorization"]}}
    for settings, names in (
        ({"models": models}, {"authorization"}),
        ({"pass_headers": ["cookie"]}, {"cookie"}),
    ):
        with serve_talker(start_server, **settings) as server:
            for lane in ("fast", "framework"):
                headers = server.ask(lane=lane, **MINE).json()["headers"]
                assert names == SECRET & {name.lower() for name in headers}


def test_the_headers_of_a_model_are_added_to_those_of_all_models():
    models = {"m": {"pass_headers": ["Authorization"]}}
    hidden = HiddenHeaders(Settings(pass_headers=["cookie"], models=models))
    assert hidden.for_model("m") == {b"proxy-authorization"}
    assert hidden.for_model("other") == {b"proxy-authorization", b"authorization"}
