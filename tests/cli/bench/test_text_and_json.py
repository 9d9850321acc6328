"""A benchmark's limits, configurations and results as text and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.benchmarked import a_run
from tsx_archiver.metadata.modelconfig import parse_model_config
from tsx_cli.bench.load.configuration import PRECISIONS, Configuration
from tsx_cli.bench.load.results import (
    Figure,
    Latency,
    OfferedLoad,
    Point,
    Prediction,
    Results,
    Trial,
    parse_slo,
    read_results,
)
from tsx_cli.common.failure import CliError, UsageError

QUICK = Latency(
    mean_ms=4, p50_ms=4, p90_ms=8, p95_ms=9, p99_ms=40, p999_ms=80, max_ms=90
).model_dump()


@pytest.mark.parametrize(
    ("text", "errors", "broken"),
    [
        ("p99<100ms", 0, []),
        ("p99<=40ms", 0, []),
        ("p99<39ms", 0, ["p99<39ms"]),
        (" p50 < 5 ms , p99 < 0.03 s ", 0, ["p99 < 0.03 s"]),
        ("p99.9<80ms,max<0.09s", 0, []),
        ("p99<100ms", 0.001, ["errors<=0%"]),
        ("p99<100ms,errors<0.1%", 0.001, []),
        ("p99<100ms,errors<0.1%", 0.0011, ["errors<0.1%"]),
        ("mean<4000us", 0, []),
    ],
)
def test_missed_limits_are_listed(text: str, errors: float, broken: list[str]) -> None:
    assert [bound.text for bound in parse_slo(text).broken(QUICK, errors)] == broken


@pytest.mark.parametrize(
    "text",
    [
        "",
        "p99",
        "p99>100ms",
        "p98<100ms",
        "p99<100",
        "p99<1%",
        "errors<5ms",
        "p99<0ms",
        "p99<1s,p99<2s",
        "p99<-1ms",
    ],
)
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--slo"):
        parse_slo(text)


def test_the_tightest_limit_decides_the_latency_ratio() -> None:
    assert parse_slo("p99<80ms,p50<5ms").latency_ratio(QUICK) == pytest.approx(0.8)
    assert parse_slo("errors<1%").latency_ratio(QUICK) == 0


@given(
    st.builds(
        Configuration,
        device=st.sampled_from(["cpu", "cuda"]),
        precision=st.sampled_from(PRECISIONS),
        compiled=st.sampled_from([None, False, True]),
        threads=st.none() | st.integers(1, 64),
        workers=st.integers(1, 64),
        batch_size=st.integers(1, 512),
        form=st.sampled_from([None, "reference", "openvino-int8"]),
    )
)
def test_a_configuration_round_trips_and_has_only_known_keys(
    configuration: Configuration,
) -> None:
    config, problems = parse_model_config(
        {key: value for key, value in configuration.keys().items() if value is not None}
    )
    assert [problem for problem in problems if problem.key != "precision"] == []
    assert (config.min_workers, config.max_workers, config.batch_size, config.threads) == (
        configuration.workers,
        configuration.workers,
        configuration.batch_size,
        configuration.threads,
    )
    assert config.forms == (
        None if configuration.form in (None, "reference") else (configuration.form,)
    )
    assert Configuration(**json.loads(json.dumps(configuration.as_json()))) == configuration
    assert f"batch {configuration.batch_size}" in str(configuration)


def results() -> Results:
    point = Point(
        offered=OfferedLoad(connections=4),
        throughput=Figure(value=5, low=4, high=6),
        latency=Latency(),
        p99_ms=Figure(value=1, low=1, high=1),
    )
    endless = Prediction(throughput=5, p99_ms=math.inf)
    trial = Trial(
        configuration=Configuration(workers=2).as_json(), points=[point], best=0, predicted=endless
    )
    return a_run(trials=[trial], winner=0)


def test_results_round_trip_through_their_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(results().model_dump_json())
    assert "Infinity" not in file.read_text(), "Infinity is not valid JSON"
    restored = read_results(file)
    assert restored == results()
    assert restored.trials[0].as_configuration() == Configuration(workers=2)
    restored.trials[0].configuration["later"] = 1
    assert restored.trials[0].as_configuration() == Configuration(workers=2)
    assert restored.trials[0].chosen is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not a results.json"),
        ("[]", "not a results.json"),
        ('{"format": 1}', "not a results.json"),
        ('{"format": 99, "trials": []}', "format 99"),
        ('{"format": 1, "trials": []}', "damaged: started"),
        (100_000 * "[", "not a results.json"),
        (results().model_dump_json().replace('"value":5.0', '"value":NaN'), "NaN is not a number"),
        (
            results().model_dump_json().replace('"value":5.0', '"value":1e999'),
            "1e999 is not a number",
        ),
        (results().model_dump_json().replace('"workers":2', '"workers":[2]'), "damaged: workers"),
        (
            results().model_copy(update={"winner": 1}).model_dump_json(),
            "damaged: it refers to a trial",
        ),
        (
            results().model_copy(update={"baseline": -1}).model_dump_json(),
            "damaged: it refers to a trial",
        ),
    ],
)
def test_damaged_results_are_reported(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(CliError, match=problem):
        read_results(file)
    with pytest.raises(CliError, match="cannot be read"):
        read_results(tmp_path / "none")
