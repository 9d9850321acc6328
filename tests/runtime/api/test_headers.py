"""The headers of answers: what a model's own become on an address that manages models."""

from __future__ import annotations

import pytest

from tsx_runtime.api.headers import answer_headers

CONFINED = {
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"sandbox; default-src 'none'",
}
STATE = "set-cookie clear-site-data strict-transport-security alt-svc refresh www-authenticate service-worker-allowed report-to nel"


def test_an_answer_changes_nothing_but_itself_where_models_are_managed() -> None:
    own = [(b"content-type", b"text/html"), (b"x-own", b"1")]
    others = [(name.encode(), b"*") for name in (*STATE.split(), *(name.decode() for name in CONFINED))]
    assert answer_headers(200, [*own, *others], confined=False) == (*own, *others)
    assert answer_headers(200, [*own, *others], confined=True) == (*own, *CONFINED.items())


@pytest.mark.parametrize(("status", "is_sent"), [(202, True), (302, False), (307, False)])
def test_a_model_redirects_no_browser_to_the_management_api(status: int, is_sent: bool) -> None:
    named = dict(answer_headers(status, [(b"location", b"/models?url=evil.mar")], confined=True))
    assert (b"location" in named) is is_sent
