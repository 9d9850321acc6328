"""Latency targets: their syntax in a model's configuration, and errors for invalid ones."""

from __future__ import annotations

import pytest

from tsx_archiver import parse_model_config
from tsx_archiver.metadata.slo import LatencyTarget, latency_target, parse_slo


@pytest.mark.parametrize(
    ("text", "quantile", "seconds"),
    [("p99<50ms", 0.99, 0.05), (" p99.9 <= 2s ", 0.999, 2.0), ("p50<800us", 0.5, 0.0008)],
)
def test_a_percentile_and_a_time_are_a_valid_target(text, quantile, seconds):
    assert latency_target(text) == LatencyTarget(
        text.strip(), pytest.approx(quantile), pytest.approx(seconds)
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("p99<50ms,p50<10ms", "one percentile and a time"),
        ("mean<50ms", "one percentile and a time"),
        ("max<50ms", "one percentile and a time"),
        ("errors<1%", "one percentile and a time"),
        ("p99<0ms", "a time above 0"),
        ("50ms", "not a bound"),
        ("ttft.p99<50ms", "one percentile and a time"),
    ],
)
def test_invalid_targets_are_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        latency_target(text)
    config, problems = parse_model_config({"slo": text})
    assert config.slo is None
    assert reason in problems[0]


def test_a_model_config_keeps_its_target_as_text():
    assert parse_model_config({"slo": "p99<50ms"})[0].slo == "p99<50ms"
    assert "it must be a valid string" in parse_model_config({"slo": 50})[1][0]


def test_event_streams_have_their_own_limits():
    slo = parse_slo("ttft.p99<300ms,tpot.p50<50ms,tpot.mean<40ms,p99<2s,errors<1%")
    assert [bound.figure for bound in slo.of_streams] == [
        "ttft.p99_ms",
        "tpot.p50_ms",
        "tpot.mean_ms",
    ]
    assert (slo.tightest_ms, slo.limits) == (2000.0, {"ttft": 300.0, "tpot": 50.0, "": 2000.0})
    times = {"p99_ms": 1000.0, "ttft.p99_ms": 301.0, "tpot.p50_ms": 50.0, "tpot.mean_ms": 40.0}
    assert [bound.text for bound in slo.broken(times, 0.0)] == ["ttft.p99<300ms"]
    assert slo.broken({"p99_ms": 1000.0}, 0.0) == slo.of_streams  # only whole responses
    assert slo.latency_ratio(times) == 0.5  # only the limit of whole responses counts


@pytest.mark.parametrize(
    "text", ["ttft<1s", "ttft.errors<1%", "tpot.p99<5%", "ttft.p42<1s", "ttfb.p99<1s"]
)
def test_the_error_of_an_unknown_stream_limit_lists_the_known_ones(text):
    with pytest.raises(ValueError, match=r"of event streams ttft\.p99, tpot\.p99"):
        parse_slo(text)
