"""Where predictions may come from, and what of a request's headers a handler sees: the settings
that open it.
"""

from __future__ import annotations

from tsx_runtime.core.isolation.hidden_credentials import HiddenHeaders

PATH = "/predictions/talker"
MINE = {"authorization": "Bearer mine", "cookie": "session=1", "proxy-authorization": "Basic eDp5"}


def statuses(server, *heads):
    return [
        [server.ask(lane=lane, **head).status_code for head in heads]
        for lane in ("fast", "framework")
    ]


def test_allowed_hosts_name_what_a_server_on_loopback_is_called_by(start_server):
    heads = (
        {"host": "models.example"},
        {"host": "evil.example"},
        {"host": "Models.Example:80", "origin": "https://models.example"},
    )
    with start_server(allowed_hosts=["models.example"]) as server:
        server.register("talker.mar", initial_workers=1)
        assert statuses(server, *heads) == [[200, 403, 200]] * 2
        assert (
            server.management.get("/models", headers=heads[0]).status_code == 403
        )  # predictions' alone


def test_a_star_opens_predictions_to_any_host_and_page(start_server):
    with start_server(allowed_hosts=["*"]) as server:
        server.register("talker.mar", initial_workers=1)
        assert (
            statuses(
                server, {"host": "evil.example", "origin": "null"}, {"sec_fetch_site": "cross-site"}
            )
            == [[200, 200]] * 2
        )


def test_the_site_of_cors_may_ask_and_no_other(start_server):
    mine = {"origin": "https://my.site", "sec_fetch_site": "cross-site"}
    with start_server(cors_allowed_origin="https://my.site") as server:
        server.register("talker.mar", initial_workers=1)
        assert statuses(server, mine, mine | {"origin": "https://other.site"}) == [[200, 403]] * 2
    with start_server(cors_allowed_origin="*") as server:
        server.register("talker.mar", initial_workers=1)
        assert statuses(server, mine, {"host": "evil.example"}) == [[200, 403]] * 2


def test_a_page_that_has_a_token_may_be_of_any_site(start_server):
    head = {"sec_fetch_site": "cross-site", "authorization": "Bearer in"}
    with start_server(inference_token="in") as server:
        server.register("talker.mar", initial_workers=1)
        assert statuses(server, head) == [[200]] * 2


def test_no_foreign_page_has_a_workflow_or_a_description_run(server, error_of):
    foreign = {"sec-fetch-site": "cross-site"}
    for client, path in (
        (server.inference, "/wfpredict/any"),
        (server.management, "/models/talker?customized=true"),
    ):
        answer = client.get(path, headers=foreign)
        assert (answer.status_code, error_of(answer)[0]) == (403, "ForeignOriginException")
    assert server.management.get("/ui/", headers=foreign).status_code == 200  # by a link


def test_handlers_get_the_headers_that_the_settings_name(start_server):
    own = {"talker": {"pass_headers": ["Authorization"]}}
    for settings, seen in (
        ({}, set()),
        ({"models": own}, {"authorization"}),
        ({"pass_headers": ["cookie"]}, {"cookie"}),
    ):
        with start_server(**settings) as server:
            server.register("talker.mar", initial_workers=1)
            for lane in ("fast", "framework"):
                answer = server.inference.post(
                    PATH, content=b"x" if lane == "fast" else iter([b"x"]), headers=MINE
                ).json()
                assert seen == MINE.keys() & {name.lower() for name in answer["headers"]}


def test_what_models_have_is_added_to_what_all_have(start_server):
    with start_server(
        pass_headers=["cookie"], models={"m": {"pass_headers": ["Authorization"]}}
    ) as server:
        hidden = HiddenHeaders(server.settings)
        assert hidden.of("m") == {b"proxy-authorization"}
        assert hidden.of("other") == {b"proxy-authorization", b"authorization"}
