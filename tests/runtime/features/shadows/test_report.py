"""The shadow report: latencies, and examples without secrets or large bodies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.features.shadows.report import (
    MAX_EXCERPT_BYTES,
    MAX_PAIRS,
    Excerpt,
    ShadowReport,
    excerpt_of,
    side_of,
    without_secrets,
)
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.shared.quantiles import nearest_rank
from tsx_runtime.wire import Parts


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_sufficient_value(values: list[float], fraction: float) -> None:
    quantile = nearest_rank(sorted(values), fraction)
    assert quantile in values
    assert sum(value <= quantile for value in values) >= fraction * len(values)


def test_latencies_cover_only_the_newest_pairs() -> None:
    tally = ShadowReport()
    assert tally.latencies() == []
    fast_latency, slow_latency = (
        side_of(version, ComparedAnswer(200, {}, b""), seconds)
        for version, seconds in (("1.0", 0.1), ("2.0", 0.3))
    )
    failed_side = side_of("2.0", ComparedAnswer(500, {}, b""), 9.0)
    tally.add_pair(fast_latency, failed_side)
    for _ in range(MAX_PAIRS):
        tally.add_pair(fast_latency, slow_latency)
    assert tally.latencies() == [(0.1, 0.1), (0.3, 0.3)]
    assert (tally.primary_errors, tally.shadow_errors) == (0, 1)


def test_secret_headers_are_omitted() -> None:
    shown_headers = {"Content-Type": "text/csv", "X-User": "ann", "User-Agent": "x"}
    secret_headers = (
        "Authorization",
        "Proxy-Authorization",
        "Cookie",
        "Set-Cookie",
        "X-API-Key",
        "apikey",
        "X-Passphrase",
        "X-Goog-Iap-Jwt-Assertion",
        "X-Auth-Token",
        "X-Amz-Security-Token",
    )
    assert without_secrets(shown_headers | dict.fromkeys(secret_headers, "s3cret")) == shown_headers


def test_secrets_in_header_urls_are_not_shown() -> None:
    assert without_secrets({"x-tsx-callback-url": "https://a.example/?token=s3cret"}) == {
        "x-tsx-callback-url": "https://a.example/?token=***"
    }


def test_only_the_beginning_of_a_body_is_kept() -> None:
    assert excerpt_of(b"abc") == Excerpt(b"abc", 3)
    assert excerpt_of(memoryview(b"x" * 5000)) == Excerpt(b"x" * MAX_EXCERPT_BYTES, 5000)
    assert excerpt_of(Parts([b"a" * 2000, memoryview(b"b" * 2000), b"c"], 4001)) == Excerpt(
        b"a" * 2000 + b"b" * 48, 4001
    )
    assert excerpt_of(Parts([b"a", b"b"], 2)) == Excerpt(b"ab", 2)
