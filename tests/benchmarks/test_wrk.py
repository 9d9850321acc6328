"""Parsing of wrk's output."""

from __future__ import annotations

import pytest

from benchmarks import wrk

OUTPUT = """Running 2s test @ http://127.0.0.1:8080/predictions/ok
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.11ms  731.00us  21.39ms   93.02%
    Req/Sec    51.90k     6.24k   61.21k    75.00%
  Latency Distribution
     50%    {p50}
     75%    1.22ms
     90%    1.55ms
     99%    {p99}
  103322 requests in 2.00s, 14.19MB read
{error}Requests/sec:  51581.25
Transfer/sec:      7.08MB
"""


@pytest.mark.parametrize(
    ("p50", "p99", "milliseconds"),
    [
        ("1.00ms", "4.82ms", (1.0, 4.82)),
        ("170.00us", "1.20s", (0.17, 1200.0)),
        ("2.50s", "1.50m", (2500.0, 90000.0)),
    ],
)
def test_latencies_are_parsed_in_any_unit(
    p50: str, p99: str, milliseconds: tuple[float, float]
) -> None:
    result = wrk.parse(OUTPUT.format(p50=p50, p99=p99, error=""))
    assert result.rate == 51581.25
    assert result.requests == 103322
    assert (result.p50, result.p99) == pytest.approx(milliseconds)


@pytest.mark.parametrize(
    "line",
    ["  Non-2xx or 3xx responses: 12", "  Socket errors: connect 0, read 3, write 0, timeout 0"],
)
def test_a_round_with_an_error_does_not_count(line: str) -> None:
    with pytest.raises(wrk.NotAnswered, match=line.strip()):
        wrk.parse(OUTPUT.format(p50="1.00ms", p99="2.00ms", error=line + "\n"))


def test_a_round_without_responses_does_not_count() -> None:
    empty = "  Latency Distribution\n     50%    0.00us\n     99%    0.00us\n  0 requests in 2.00s, 0.00B read\nRequests/sec:      0.00\n"
    with pytest.raises(wrk.NotAnswered, match="not one"):
        wrk.parse(empty)
