"""Limits of losses, tolerances and custom metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tsx_cli.common.failure import UsageError
from tsx_cli.optimize.guard.limits import load_metric, parse_limits


def test_limits_apply_to_losses_or_values() -> None:
    limits = parse_limits(" top1 >= -0.5% , cosine>=0.999,perplexity<=+1%")
    assert [(limit.metric, limit.amount, limit.relative, limit.text) for limit in limits] == [
        ("top1", 0.005, True, "top1>=-0.5%"),
        ("cosine", 0.999, False, "cosine>=0.999"),
        ("perplexity", 0.01, True, "perplexity<=+1%"),
    ]
    assert parse_limits("perplexity<=12.5")[0].amount == 12.5
    assert parse_limits() == ()


def test_a_custom_metric_has_a_default_limit() -> None:
    assert [limit.text for limit in parse_limits("top1>=-1%", custom="f1")] == [
        "top1>=-1%",
        "f1>=-0.5%",
    ]
    assert [(limit.metric, limit.amount) for limit in parse_limits("f1>=-3.5", custom="f1")] == [
        ("f1", -3.5)
    ]


def test_a_tolerance_is_a_limit() -> None:
    (limit,) = parse_limits(tolerance="rtol=1e-2")
    assert (limit.metric, limit.tolerance and limit.tolerance.rtol) == ("tolerance", 0.01)
    with pytest.raises(UsageError, match="is not a tolerance"):
        parse_limits(tolerance="about")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("top1", "'top1' is not a limit"),
        ("perplexty<=+1%", "did you mean 'perplexity'?"),
        ("top1<=-0.5%", "more top1 is better: write top1>=-0.5%"),
        ("perplexity>=-1%", "less perplexity is better: write perplexity<=+1%"),
        ("top1>=0.5%", "does not say whether it is a loss"),
        ("perplexity<=1%", "does not say whether it is a loss"),
        ("top1>=-0%", "no number of rows shows a loss of 0 %"),
        ("top1>=1", "give a value between 0 and 1, as no rows show 1"),
        ("perplexity<=0.5", "give a value above 1"),
        ("top1>=-1%,top1>=0.9", "bounds top1 twice"),
        ("", "is not a limit"),
    ],
)
def test_an_invalid_limit_is_refused(limit: str, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        parse_limits(limit)


def test_a_custom_metric_is_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("HALF = 0.5\n\n\ndef f1(answers, labels):\n    return HALF\n")
    name, function = load_metric(f"{file}:f1")
    assert (name, function([], [])) == ("f1", 0.5)
    (tmp_path / "wrong.py").write_text("import nowhere_to_be_found\n")
    for metric, reason in [
        (f"{file}", "such as metrics.py:f1"),
        (f"{file}:f2", "has no function 'f2'"),
        (f"{file}:top1", "rename the function"),
        (f"{tmp_path / 'no.py'}:f1", "there is no file"),
        (f"{tmp_path / 'wrong.py'}:f1", "No module named 'nowhere_to_be_found'"),
    ]:
        with pytest.raises(UsageError, match=reason):
            load_metric(metric)
