"""Headers of requests for a handler, and a model's headers on an address that manages models."""

from __future__ import annotations

import pytest

from tsx_runtime.api.headers import answer_headers, shown_headers

CONFINED = {
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"sandbox; default-src 'none'",
}
STATE = (
    "set-cookie clear-site-data strict-transport-security alt-svc refresh www-authenticate "
    "service-worker-allowed report-to nel"
)


def test_an_answer_changes_nothing_but_itself_where_models_are_managed() -> None:
    harmless = [(b"content-type", b"text/html"), (b"x-own", b"1")]
    dangerous = [
        (name.encode(), b"*") for name in (*STATE.split(), *(name.decode() for name in CONFINED))
    ]
    assert answer_headers(200, [*harmless, *dangerous], is_confined=False) == (
        *harmless,
        *dangerous,
    )
    assert answer_headers(200, [*harmless, *dangerous], is_confined=True) == (
        *harmless,
        *CONFINED.items(),
    )


@pytest.mark.parametrize(("status", "is_sent"), [(202, True), (302, False), (307, False)])
def test_a_model_redirects_no_browser_to_the_management_api(status: int, is_sent: bool) -> None:
    headers = dict(
        answer_headers(status, [(b"location", b"/models?url=evil.mar")], is_confined=True)
    )
    assert (b"location" in headers) is is_sent


@pytest.mark.parametrize(
    "name", [b"X_Forwarded_User", b"x_forwarded-prefix", b"X-Forwarded_Access_Token", b"X_Real_IP"]
)
def test_a_handler_sees_no_other_spelling_of_a_proxys_header(name: bytes) -> None:
    usual = [(name.replace(b"_", b"-"), b"1"), (b"X_Own", b"2")]
    assert shown_headers([*usual, (name, b"3")], ()) == usual
