"""Access guards: which requests each listener accepts."""

from __future__ import annotations

from functools import partial

import pytest

from tsx_runtime.api.access.auth import Guard, build_guards, check_required_tokens
from tsx_runtime.api.access.tokens import BearerToken
from tsx_runtime.errors import ForeignOrigin, InvalidToken, SettingError
from tsx_runtime.settings.schema import Settings

# Hosts other than this machine; four of them resemble it if they follow http://.
HOSTS = (
    b"evil.org",
    b"localhost.evil.org:8081",
    b"[::1",
    b"[::1].evil.com",
    b"127.0.0.1@evil.com",
    b"localhost.evil.com",
    b"localhost/.evil.com",
    b"[::1].evil.com:80",
    b"[::1]evil",
    b"evil.com#@127.0.0.1",
    b"",
    b" ",
    b"127.0.0.1 evil",
    b"127.0.0.1/evil",
    b"127.0.0.1:80:90",
    b"127.1",
    b"::1",
    b"[::1%25lo]",
)


def settings(**values: object) -> Settings:
    return Settings.model_validate(values)


def guard_of(role: str = "management", **values: object) -> Guard:
    """Return the guard that these settings give a listener."""
    guard = getattr(build_guards(settings(**values)), role)
    assert isinstance(guard, Guard)
    return guard


def test_defaults_need_no_token() -> None:
    check_required_tokens(settings())


@pytest.mark.parametrize(
    ("address", "token"),
    [
        ("inference_address", "inference_token"),
        ("management_address", "management_token"),
        ("metrics_address", "management_token"),
    ],
)
def test_an_open_address_needs_its_token(address: str, token: str) -> None:
    open_address = {address: "http://0.0.0.0:9000"}
    with pytest.raises(SettingError) as exc_info:
        check_required_tokens(settings(**open_address))
    assert address in exc_info.value.message
    assert f"Set {token}" in exc_info.value.message
    check_required_tokens(settings(**open_address, **{token: "secret"}))
    check_required_tokens(settings(**open_address, disable_token_authorization=True))


def test_inference_on_loopback_without_a_token_still_has_a_guard() -> None:
    guards = build_guards(settings())
    assert guards.inference is not None
    assert guards.inference.key is None
    assert guards.management is not None
    assert guards.metrics is not None
    assert build_guards(settings(allowed_hosts=["*"])).inference is None


def test_a_unix_socket_needs_no_token_but_checks_one_that_is_set() -> None:
    roles = ("inference", "management", "metrics")
    sockets = {f"{role}_address": f"unix:/run/{role}.sock" for role in roles}
    check_required_tokens(settings(**sockets))
    assert build_guards(settings(**sockets)) == (None, None, None, None)
    guard = guard_of(**sockets, management_token="secret")
    guard.check([(b"host", b"tsx"), (b"authorization", b"Bearer secret")])
    with pytest.raises(InvalidToken):
        guard.check([(b"host", b"localhost")])


def test_https_addresses_need_the_same_tokens_and_origins_as_http() -> None:
    with pytest.raises(SettingError, match="Set management_token"):
        check_required_tokens(settings(management_address="https://0.0.0.0:8081"))
    with pytest.raises(ForeignOrigin):
        guard_of(management_address="https://127.0.0.1:8081").check([(b"host", b"evil.org")])


def test_disabled_authorization_ignores_tokens() -> None:
    values = {
        "inference_token": "a",
        "management_token": "b",
        "disable_token_authorization": True,
        "management_address": "http://0.0.0.0:1",
    }
    assert guard_of("inference", **values).key is None
    management = guard_of(**values)
    assert (management.key, management.hosts) == (None, None)


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Basic secret",
        b"secret",
        b"Bearer secret2",
        b"Bearer \xff",
    ],
)
def test_a_wrong_token_is_refused(authorization: bytes) -> None:
    guard = Guard(BearerToken("secret"))
    with pytest.raises(InvalidToken) as exc_info:
        guard.check([(b"authorization", authorization)])
    assert "Token Authorization failed" in exc_info.value.message
    assert "secret" not in exc_info.value.message


@pytest.mark.parametrize("authorization", [b"Bearer secret", b"bearer secret", b"Bearer  secret"])
def test_the_right_token_is_accepted(authorization: bytes) -> None:
    Guard(BearerToken("secret")).check(
        [(b"host", b"example.org"), (b"authorization", authorization)]
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((b"host", host) for host in HOSTS),
        *((b"origin", b"http://" + host) for host in HOSTS[3:7]),
        (b"origin", b"localhost"),
        (b"origin", b""),
        (b"origin", b"http://evil.org"),
        (b"origin", b"null"),
    ],
)
def test_requests_of_other_sites_are_refused_on_loopback(name: bytes, value: bytes) -> None:
    with pytest.raises(ForeignOrigin) as exc_info:
        guard_of().check([(b"host", b"localhost:8081"), (name, value)])
    assert value.decode() in exc_info.value.message


@pytest.mark.parametrize(
    "host", [b"localhost:8081", b"127.0.0.1:8081", b"LOCALHOST", b"[::1]:8081", b"127.0.0.2"]
)
def test_requests_of_this_machine_are_accepted(host: bytes) -> None:
    guard_of().check([(b"host", host), (b"origin", b"http://" + host)])


def test_an_open_address_accepts_any_host_header() -> None:
    guard = guard_of(management_address="http://0.0.0.0:8081", management_token="secret")
    guard.check([(b"host", b"models.example.org"), (b"authorization", b"Bearer secret")])


def test_only_the_origin_of_the_setting_may_call_and_a_star_allows_none() -> None:
    guard = guard_of(cors_allowed_origin="https://my.site")
    guard.check([(b"host", b"localhost"), (b"origin", b"https://my.site")])
    for origin in (b"https://my.site.evil.org", b"http://my.site", b"https://other.site"):
        with pytest.raises(ForeignOrigin):
            guard.check([(b"origin", origin)])
    with pytest.raises(ForeignOrigin):
        guard_of(cors_allowed_origin="*").check([(b"origin", b"https://other.site")])


@pytest.mark.parametrize("status", [400, 401])
def test_the_status_of_a_wrong_token_is_a_setting(status: int) -> None:
    guard = guard_of("inference", inference_token="secret", token_failure_status=status)
    with pytest.raises(InvalidToken) as exc_info:
        guard.check([])
    assert exc_info.value.status == status


def test_metrics_need_no_generated_token() -> None:
    values = {"generate_tokens": True, "metrics_address": "http://0.0.0.0:8082"}
    assert build_guards(settings(**values)).metrics is None
    assert build_guards(settings(**values)).management is not None
    assert build_guards(settings(**values, management_token="mine")).metrics is not None


def test_generated_tokens_are_sufficient_for_an_open_address() -> None:
    check_required_tokens(settings(generate_tokens=True, management_address="http://0.0.0.0:8081"))


def test_disabled_metrics_need_no_token() -> None:
    check_required_tokens(settings(enable_metrics_api=False, metrics_address="http://0.0.0.0:8082"))


def test_a_websocket_of_another_origin_is_refused_if_no_token_is_needed() -> None:
    inference = partial(guard_of, "inference", inference_address="http://0.0.0.0:8080")
    host = (b"host", b"models.example:8080")
    open_to_all = inference(disable_token_authorization=True)
    open_to_all.check_socket([host])
    open_to_all.check_socket([host, (b"origin", b"http://models.example")])
    for origin in (b"https://evil.example", b"null", b""):
        with pytest.raises(ForeignOrigin):
            open_to_all.check_socket([host, (b"origin", origin)])
    site = inference(disable_token_authorization=True, cors_allowed_origin="https://my.site")
    site.check_socket([host, (b"origin", b"https://my.site")])
    page, token = (b"origin", b"https://evil.example"), (b"authorization", b"Bearer a")
    inference(inference_token="a").check_socket([host, page, token])
