"""`tsx plan`: replicas and cost from the loads that a benchmark measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarked import a_run
from tests.support.models import make_model
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import (
    Accuracy,
    Environment,
    Figure,
    Latency,
    ModelInfo,
    OfferedLoad,
    Point,
    Results,
    Round,
    Trial,
)
from tsx_cli.bench.report.archive_record import record_of
from tsx_cli.main import main
from tsx_runtime.core.placement.hardware import hardware

WON = Configuration(workers=2, batch_size=4)
OTHER = Configuration(workers=1, batch_size=8, threads=2)


def point(throughput: float, p99_ms: float, *, is_open: bool = False, holds: bool = True) -> Point:
    offered = OfferedLoad(connections=12)
    if is_open:
        offered = OfferedLoad(mode="open", rate=throughput, arrivals="poisson")
    latency = Latency(p50_ms=p99_ms / 2, p99_ms=p99_ms)
    answers = {"seconds": 1, "sent": 9, "ok": 9, "throughput": throughput}
    return Point(
        offered=offered,
        throughput=Figure(value=throughput, low=throughput, high=throughput),
        latency=latency,
        p99_ms=Figure(value=p99_ms, low=p99_ms, high=p99_ms),
        holds=holds,
        rounds=[Round(**answers, latency=latency, busy_ms=4.0)],
    )


def results(*points: Point, fingerprint: str = "another", **more: Any) -> Results:
    points = points or (point(410, 45),)
    trial = Trial(configuration=OTHER.as_json(), points=[point(300, 20)], best=0)
    return a_run(
        model=ModelInfo(name="digits"),
        environment=Environment(fingerprint=fingerprint, cpu="Abacus 9", cores=2),
        slo="p99<50ms",
        trials=[Trial(configuration=WON.as_json(), points=list(points), best=0), trial],
        winner=0,
    ).model_copy(update=more)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(results().model_dump_json())
    return path


def run_plan(
    file: Path, run: Results, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, Any]:
    file.write_text(run.model_dump_json())
    assert main(["plan", "--rps", "900", "--results", str(file), "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_plan_has_replicas_latency_utilization_and_cost(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_plan(file, results(), capsys, "--price-per-hour", "0.5")
    assert (report["slo"], report["replicas"], report["describes"]) == ("p99<50ms", 3, str(WON))
    assert report["most_rps_per_replica"] == 410
    assert report["share_of_most"] == pytest.approx(900 / 3 / 410, abs=1e-4)
    load = report["load"]
    assert (load["describes"], load["p50_ms"], load["p99_ms"]) == ("12 connections", 22.5, 45)
    assert load["utilisation"] == pytest.approx(410 * 0.004 / 2)
    assert report["cost_per_hour"] == 1.5
    assert report["cost_per_million"] == pytest.approx(1.5 / (900 * 3600) * 1e6, rel=1e-4)
    assert report["measured"] == {
        "date": "2026-11-21T10:00:00+00:00",
        "on": "2 cores of Abacus 9",
        "here": False,
    }


@pytest.mark.parametrize(
    ("points", "rate", "lower_limit"),
    [
        ([point(410, 45), point(300, 30, is_open=True)], 410, False),
        ([point(200, 45), point(300, 30, is_open=True)], 300, True),
        (
            [
                point(410, 45),
                point(300, 30, is_open=True),
                point(330, 60, is_open=True, holds=False),
            ],
            300,
            False,
        ),
        ([point(410, 45), point(200, 10), point(330, 60, is_open=True, holds=False)], 200, False),
        ([point(200, 10), point(410, 90, holds=False)], 200, False),
        ([point(200, 10), point(410, 45, holds=False)], 200, False),
    ],
    ids=[
        "highest of all",
        "open loop without a knee",
        "knee",
        "below an open loop that broke",
        "bound",
        "fell behind",
    ],
)
def test_a_plan_uses_the_highest_measured_load_within_the_limits(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    points: list[Point],
    rate: float,
    lower_limit: bool,
) -> None:
    report = run_plan(file, results(*points), capsys)
    assert (report["most_rps_per_replica"], report["lower_limit"]) == (rate, lower_limit)


def test_other_limits_are_applied_to_the_measured_loads(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = results(point(200, 10), point(410, 45), point(500, 90, holds=False))
    for bound, rate in (("p99<20ms", 200), ("p99<100ms", 500)):
        assert run_plan(file, run, capsys, "--slo", bound)["most_rps_per_replica"] == rate


def test_headroom_adds_to_the_rate(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(file, results(), capsys, "--headroom", "50%")["replicas"] == 4


def test_another_configuration_can_be_planned_unless_its_responses_differ(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--workers", "1", "--batch-size", "8")
    assert run_plan(file, results(), capsys, *options)["describes"] == str(OTHER)
    run = results()
    run.trials[1].accuracy = Accuracy(same=False)
    file.write_text(run.model_dump_json())
    assert main(["plan", "--rps", "9", "--results", str(file), *options]) == 1
    assert "no load with workers 1, batch size 8" in capsys.readouterr().err


def test_a_table_names_the_configuration_and_the_machine(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--rps", "300", "--results", str(file)]
    assert main(command) == 0
    table = capsys.readouterr().out
    for text in ("300 requests/s under p99<50ms", "12 connections", "p99 45.0 ms", "82% of"):
        assert text in table
    assert "2026-11-21 on 2 cores of Abacus 9" in table
    assert "This machine is different" in table
    assert "tsx bench --ramp" in table
    run = results(point(300, 30, is_open=True), fingerprint=hardware().fingerprint)
    file.write_text(run.model_dump_json())
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "different" not in table
    assert "may do more" in table
    assert "tsx bench --ramp --write and a longer --time-limit" in table


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ([], 2, "name an archive"),
        (["--results", "FILE"], 2, "--rps 300"),
        (["--results", "FILE", "--rps", "0"], 2, "--rps"),
        (["--results", "FILE", "--rps", "nan"], 2, "--rps"),
        (["--results", "FILE", "--rps", "5", "--price-per-hour", "inf"], 2, "--price-per-hour"),
        (["--results", "FILE", "--rps", "5", "--headroom", "much"], 2, "--headroom"),
        (["--results", "FILE", "--rps", "5", "--headroom", "-5%"], 2, "--headroom"),
        (["--results", "FILE", "--rps", "5", "--slo", "fast"], 2, "--slo"),
        (
            ["--results", "FILE", "--rps", "5", "--slo", "p99<2ms"],
            1,
            "tsx bench digits.mar --slo 'p99<2ms' --workers 2 --batch-sizes 4 --ramp --write",
        ),
        (["--results", "nowhere.json", "--rps", "5"], 1, "nowhere.json"),
        (["nowhere.mar", "--rps", "5"], 1, "nowhere.mar"),
        (["--results", "FILE", "--rps", "5", "--workers", "0"], 2, "--workers"),
    ],
)
def test_a_plan_with_an_invalid_option_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, text: str
) -> None:
    assert (
        main(["plan", *[str(file) if option == "FILE" else option for option in options]]) == code
    )
    assert text in capsys.readouterr().err


def test_results_without_a_winner_are_reported(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(results(winner=None).model_dump_json())
    assert main(["plan", "--rps", "5", "--results", str(file)]) == 1
    assert "no winner" in capsys.readouterr().err


def archive(tmp_path: Path, config: str) -> Path:
    """Write an unpacked archive, which serves as well as a packed one."""
    handler = "def handle(data, context):\n    return data\n"
    return make_model(tmp_path / "digits", handler, config=config)


def test_an_archive_is_planned_with_its_own_latency_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = archive(tmp_path, "slo: p99<30ms\n")
    run = results(point(200, 10), point(410, 45))
    (directory / "tsx-bench.json").write_bytes(record_of(run).content())
    assert main(["plan", str(directory), "--rps", "400", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["slo"], report["replicas"]) == ("p99<30ms", 2)


def test_the_error_without_measured_loads_names_the_bench_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = archive(tmp_path, "batchSize: 2\n")
    assert main(["plan", str(directory), "--rps", "5"]) == 1
    assert f"`tsx bench {directory} --ramp --write` measures it" in capsys.readouterr().err
    old_record = json.loads(record_of(results()).content())
    # Earlier versions did not write `points`.
    del old_record["points"]
    (directory / "tsx-bench.json").write_text(json.dumps(old_record))
    assert main(["plan", str(directory), "--rps", "5"]) == 1
    assert f"tsx bench {directory} --slo 'p99<50ms' --workers 2" in capsys.readouterr().err
