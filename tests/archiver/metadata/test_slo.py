"""Latency targets: the one form that a model takes, and what is said of any other."""

from __future__ import annotations

import pytest

from tsx_archiver import parse_model_config
from tsx_archiver.metadata.slo import LatencyTarget, latency_target


@pytest.mark.parametrize(
    ("text", "quantile", "seconds"),
    [("p99<50ms", 0.99, 0.05), (" p99.9 <= 2s ", 0.999, 2.0), ("p50<800us", 0.5, 0.0008)],
)
def test_a_percentile_and_a_time_are_a_target(text, quantile, seconds):
    assert latency_target(text) == LatencyTarget(text.strip(), pytest.approx(quantile), pytest.approx(seconds))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("p99<50ms,p50<10ms", "one percentile and a time"),
        ("mean<50ms", "one percentile and a time"),
        ("max<50ms", "one percentile and a time"),
        ("errors<1%", "one percentile and a time"),
        ("p99<0ms", "a time above 0"),
        ("50ms", "not a bound"),
    ],
)
def test_anything_else_says_what_it_must_be(text, reason):
    with pytest.raises(ValueError, match=reason):
        latency_target(text)
    config, problems = parse_model_config({"slo": text})
    assert config.slo is None
    assert reason in problems[0].text


def test_a_model_config_has_it_as_text():
    assert parse_model_config({"slo": "p99<50ms"})[0].slo == "p99<50ms"
    assert "it must be a string" in parse_model_config({"slo": 50})[1][0].text
