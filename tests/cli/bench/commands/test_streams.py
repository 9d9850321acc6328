"""`tsx bench` of a model that streams tokens, and the comparison of its runs."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, Running, serving
from tests.support.streaming import CONFIG, TALKER
from tsx_cli.bench.load.results import read_results

pytestmark = pytest.mark.usefixtures("processes")

Run = Callable[..., Any]
LOAD = ("--prompt-tokens", "uniform:2,5", "--max-tokens", 6, "--duration", "0.5s", "--warm-up", 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("talker")
    make_model(directory / "talker.mar", TALKER, config=CONFIG)
    with serving(
        ["serve", directory / "talker.mar", *FREE_PORTS],
        directory,
        {"TSX_CACHE_DIR": str(directory / "cache")},
    ) as running:
        yield running


def test_a_running_server_is_measured_in_tokens(server: Running, run: Run) -> None:
    options = (
        *shlex.split(f"--against {server.address('predictions')} --model talker --connections 3"),
        *LOAD,
    )
    result = run(
        "bench",
        *options,
        *shlex.split(
            "--rounds 2 --slo 'ttft.p99<20s,tpot.p99<10s,p99<60s' --output out --junit out.xml"
        ),
    )
    assert result.code == 0, result.err
    for line in ("tokens/s", "TTFT p50", "TPOT p50", "goodput"):
        assert line in result.out, result.out
    results = read_results(Path("out/results.json"))
    point = results.trials[0].points[0]
    assert point.stream is not None
    assert point.stream.tokens == 6 * sum(round.ok for round in point.rounds)
    assert 0 < point.stream.ttft.p50_ms < point.latency.p50_ms
    assert 0 < point.stream.tpot.p50_ms < point.latency.p50_ms
    assert point.stream.goodput == pytest.approx(point.throughput.value)
    page = Path("out/report.html").read_text()
    assert "Time to first token and per output token" in page
    assert "<dt>goodput</dt>" in page
    assert "## Streams of tokens" in Path("out/report.md").read_text()
    (row,) = csv.DictReader(Path("out/results.csv").read_text().splitlines())
    assert float(row["ttft_p99_ms"]) == pytest.approx(point.stream.ttft.p99_ms, rel=1e-3)
    assert float(row["tokens_per_second"]) > 0
    assert 'name="ttft.p99&lt;20s"' in Path("out.xml").read_text()
    comparison = run(
        *shlex.split("bench compare out out --fail-if 'ttft.p99>10%' --fail-if 'tokens<-5%' --json")
    )
    assert comparison.code == 0, comparison.err
    figures = {change["figure"] for change in json.loads(comparison.out)["pairs"][0]["changes"]}
    assert {"p99", "tokens", "ttft.p99", "tpot.p99"} <= figures
    assert run("bench", "compare", "out", "out").code == 0
    assert run("bench", *options, "--slo", "tpot.p50<1ms").code == 1


def test_limits_on_streams_require_streamed_responses(server: Running, run: Run) -> None:
    Path("in.json").write_text('{"inputs": "cancelled"}')
    options = shlex.split(
        f"--against {server.address('predictions')} --model talker --input in.json --duration "
        "0.2s --warm-up 0"
    )
    result = run("bench", *options, "--slo", "ttft.p99<1s")
    assert result.code == 2
    assert "ttft.p99<1s is of event streams, and the answers are none" in result.err
    assert run("bench", *options, "--json", "plain.json").code == 0
    result = run("bench", "compare", "plain.json", "plain.json", "--fail-if", "ttft.p99>10%")
    assert result.code == 2
    assert "is of event streams" in result.err


@pytest.mark.slow
def test_an_archive_is_measured_in_tokens(run: Run, tmp_path: Path) -> None:
    make_model(tmp_path / "talker.mar", TALKER, config=CONFIG)
    options = shlex.split("--workers 1 --connections 2 --rounds 1 --duration 0.2s --output out")
    result = run(
        *shlex.split(
            "bench talker.mar --slo 'ttft.p99<20s' --prompt-tokens 8 --max-tokens 6 --time-limit "
            "60s"
        ),
        *options,
    )
    assert result.code == 0, result.out + result.err
    results = read_results(Path("out/results.json"))
    # There are no batch times to measure, since the model does not support batching.
    assert not results.curves
    assert {trial.as_configuration().batch_size for trial in results.trials} == {1}
    assert results.inputs.source == "generated: 256 different prompts of 8 words"
    assert results.winner is not None
    point = results.trials[results.winner].chosen
    assert point is not None
    assert point.stream is not None
    assert point.stream.goodput is not None
    assert "tokens/s" in result.out
    assert "TTFT p99" in result.err
