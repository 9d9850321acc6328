"""The headers that a handler receives, and a model's headers on a management address."""

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


def test_a_management_address_removes_headers_that_affect_other_pages() -> None:
    kept_headers = [(b"content-type", b"text/html"), (b"x-own", b"1")]
    removed_headers = [
        (name.encode(), b"*") for name in (*STATE.split(), *(name.decode() for name in CONFINED))
    ]
    assert answer_headers(200, [*kept_headers, *removed_headers], is_confined=False) == (
        *kept_headers,
        *removed_headers,
    )
    assert answer_headers(200, [*kept_headers, *removed_headers], is_confined=True) == (
        *kept_headers,
        *CONFINED.items(),
    )


@pytest.mark.parametrize(("status", "is_sent"), [(202, True), (302, False), (307, False)])
def test_a_model_cannot_redirect_a_browser_to_the_management_api(
    status: int, is_sent: bool
) -> None:
    headers = dict(
        answer_headers(status, [(b"location", b"/models?url=evil.mar")], is_confined=True)
    )
    assert (b"location" in headers) is is_sent


@pytest.mark.parametrize(
    "name", [b"X_Forwarded_User", b"x_forwarded-prefix", b"X-Forwarded_Access_Token", b"X_Real_IP"]
)
def test_headers_that_imitate_a_proxy_header_are_removed(name: bytes) -> None:
    own_headers = [(name.replace(b"_", b"-"), b"1"), (b"X_Own", b"2")]
    assert shown_headers([*own_headers, (name, b"3")], ()) == own_headers
